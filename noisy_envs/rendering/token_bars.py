"""Bars below a picture: the weight of each token, in a fixed order.

Other Gymnasium environments draw their own pictures, in which tokens cannot get halos. Shapes: `N` tokens.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from noisy_envs.tokens import TokenSpec

if TYPE_CHECKING:
    import pygame

Array = npt.NDArray[Any]
Picture = npt.NDArray[np.uint8]

SIGNAL, NOISE = (16, 120, 44), (240, 150, 140)  # the paper's green and red, of different lightness
INK, LINE, PAPER = (30, 30, 30), (205, 205, 205), (255, 255, 255)
HEIGHT, ROW, TEXT = 104, 22, 18  # pixels: heights of the strip, of a line of text, and of the font
MIN_TEXT_WIDTH = 300  # pixels; narrower strips have no text
MARGIN, GAP = 10, 14  # pixels: at both sides, and between signal and noise
MIN_SIGNAL_WIDTH = 0.6  # fraction of the width, so that the names of a few signal features fit


def add_bars(
    picture: Picture, weights: Array | None, signal: Array, tokens: Array, spec: TokenSpec, overlay: str
) -> Picture:
    """Add a strip below a picture, with a bar for each token as high as its weight: (H + h, W, 3).

    Args:
        picture: picture (H, W, 3).
        weights: weights (N,), not negative; None for a blank strip.
        signal: signal tokens, bool (N,). They come first, in dark green; the others are light red.
        tokens: tokens (N, D). Their roles order and name the bars; padding has no bar.
        spec: meaning of the tokens.
        overlay: name of the weights in the legend.
    """
    import pygame

    width, has_text = picture.shape[1], picture.shape[1] >= MIN_TEXT_WIDTH
    strip = pygame.Surface((width, HEIGHT if has_text else HEIGHT - 2 * ROW), depth=32)
    strip.fill(PAPER)
    if weights is not None:
        order, names = _ordered(signal, tokens, spec)
        floor = strip.get_height() - (ROW if has_text else 0)
        edges = _edges(width, signal[order])
        for token, (left, right) in zip(order, edges, strict=True):
            full = floor - (ROW if has_text else 2)
            height = max(round(float(weights[token] / (weights.max() or 1)) * full), 1)
            bar = pygame.Rect(left, floor - height, max(right - left - 1, 1), height)
            pygame.draw.rect(strip, SIGNAL if signal[token] else NOISE, bar)
        if has_text:
            _write_names(strip, names, edges, floor)
            _write_legend(strip, f"{overlay}, the largest {weights.max():.2f}")
    pixels = np.frombuffer(pygame.image.tobytes(strip, "RGB"), np.uint8).reshape(strip.get_height(), width, 3)
    return np.concatenate([picture, pixels])


def _ordered(signal: Array, tokens: Array, spec: TokenSpec) -> tuple[list[int], list[str]]:
    """Return the tokens in the order of their bars, signal first, then by role, and the name of each."""
    roles = tokens[:, spec.padding_feature] if spec.roles else np.zeros(len(tokens))
    role_names = {number: name for name, number in spec.roles.items()}
    order = np.lexsort([roles, ~signal])
    shown = [int(token) for token in order if not spec.padded or spec.mask(tokens[token])]
    return shown, [role_names.get(int(roles[i]), "signal" if signal[i] else "noise") for i in shown]


def _edges(width: int, signal: Array) -> list[tuple[int, int]]:
    """Return the left and right edges of the bars; a gap separates the bars of signal from the others."""
    first, last = MARGIN, width - MARGIN
    count, total = int(signal.sum()), len(signal)
    if count in (0, total):
        ends = np.linspace(first, last, total + 1).round().astype(int).tolist()
        return list(itertools.pairwise(ends))
    middle = first + (last - first) * max(count / total, MIN_SIGNAL_WIDTH)
    left = np.linspace(first, middle - GAP / 2, count + 1).round().astype(int).tolist()
    right = np.linspace(middle + GAP / 2, last, total - count + 1).round().astype(int).tolist()
    return [*itertools.pairwise(left), *itertools.pairwise(right)]


def _write_names(strip: pygame.Surface, names: list[str], edges: list[tuple[int, int]], floor: int) -> None:
    """Write the names below the bars, once for neighbours of one name; names that do not fit are left out."""
    import pygame

    pygame.draw.line(strip, LINE, (edges[0][0], floor), (edges[-1][1], floor))
    first = 0
    for name, group in itertools.groupby(names):
        count = len(list(group))
        left, right = edges[first][0], edges[first + count - 1][1]
        first += count
        full = name if count == 1 else f"{count} × {name}"
        # the shortest form of feature[12] is its index
        for text in (full, name, name[name.find("[") :] if "[" in name else ""):
            label = _font().render(text, True, INK)
            if label.get_width() <= right - left:
                strip.blit(label, label.get_rect(center=((left + right) // 2, floor + ROW // 2)))
                break


def _write_legend(strip: pygame.Surface, text: str) -> None:
    """Write above the bars what their colours and heights mean."""
    import pygame

    x = MARGIN
    for name, color in (("signal", SIGNAL), ("noise", NOISE)):
        pygame.draw.rect(strip, color, (x, ROW // 2 - 5, 10, 10))
        label = _font().render(name, True, INK)
        strip.blit(label, label.get_rect(midleft=(x + 15, ROW // 2)))
        x += 15 + label.get_width() + MARGIN
    label = _font().render(text, True, INK)
    strip.blit(label, label.get_rect(midright=(strip.get_width() - MARGIN, ROW // 2)))


def _font() -> pygame.font.Font:
    import pygame

    pygame.font.init()
    return pygame.font.Font(None, TEXT)  # not stored: a pygame.quit() elsewhere would invalidate it
