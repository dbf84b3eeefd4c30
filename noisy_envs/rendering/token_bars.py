"""Bars under the picture of a world: what each token weighs in the pool, in an order that never changes.

`N` tokens. Environments of others draw themselves, so that nothing in their pictures can get a halo.
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
HEIGHT, ROW, TEXT = 104, 22, 18  # pixels: of the strip, of a line of words, of their font
NARROW = 300  # pixels of width that hold no words
MARGIN, GAP = 10, 14  # pixels at both sides, and between signal and noise
SHARE = 0.6  # of the width that signal has at least, so that the names of a few features can be read


def under(
    picture: Picture, weights: Array | None, signal: Array, tokens: Array, spec: TokenSpec, meaning: str
) -> Picture:
    """Add a strip with a bar for each token, as high as its weight against the largest: (H + h, W, 3).

    Args:
        picture: (H, W, 3).
        weights: (N,), none negative; without them the strip is blank.
        signal: bool (N,); these tokens come first, in dark green, the others in light red.
        tokens: (N, D), whose roles order and name the bars; padding has none.
        spec: what they mean.
        meaning: what the weights are.
    """
    import pygame

    width, words = picture.shape[1], picture.shape[1] >= NARROW
    strip = pygame.Surface((width, HEIGHT if words else HEIGHT - 2 * ROW), depth=32)
    strip.fill(PAPER)
    if weights is not None:
        order, names = _ordered(signal, tokens, spec)
        floor = strip.get_height() - (ROW if words else 0)
        edges = _edges(width, signal[order])
        for token, (left, right) in zip(order, edges, strict=True):
            height = max(round(float(weights[token] / (weights.max() or 1)) * (floor - (ROW if words else 2))), 1)
            bar = pygame.Rect(left, floor - height, max(right - left - 1, 1), height)
            pygame.draw.rect(strip, SIGNAL if signal[token] else NOISE, bar)
        if words:
            _name(strip, names, edges, floor)
            _explain(strip, f"{meaning}, the largest {weights.max():.2f}")
    pixels = np.frombuffer(pygame.image.tobytes(strip, "RGB"), np.uint8).reshape(strip.get_height(), width, 3)
    return np.concatenate([picture, pixels])


def _ordered(signal: Array, tokens: Array, spec: TokenSpec) -> tuple[list[int], list[str]]:
    """Return the tokens as they stand, signal first, then by role, and the name of each."""
    roles = tokens[:, spec.padding_feature] if spec.roles else np.zeros(len(tokens))
    known = {number: name for name, number in spec.roles.items()}
    order = np.lexsort([roles, ~signal])
    shown = [int(token) for token in order if not spec.padded or spec.mask(tokens[token])]
    return shown, [known.get(int(roles[i]), "signal" if signal[i] else "noise") for i in shown]


def _edges(width: int, signal: Array) -> list[tuple[int, int]]:
    """Return the left and right ends of bars, those of signal first and apart from the others."""
    first, last = MARGIN, width - MARGIN
    count, total = int(signal.sum()), len(signal)
    if count in (0, total):
        ends = np.linspace(first, last, total + 1).round().astype(int).tolist()
        return list(itertools.pairwise(ends))
    middle = first + (last - first) * max(count / total, SHARE)
    left = np.linspace(first, middle - GAP / 2, count + 1).round().astype(int).tolist()
    right = np.linspace(middle + GAP / 2, last, total - count + 1).round().astype(int).tolist()
    return [*itertools.pairwise(left), *itertools.pairwise(right)]


def _name(strip: pygame.Surface, names: list[str], edges: list[tuple[int, int]], floor: int) -> None:
    """Write below the bars what they are, once for neighbours of one name; what does not fit is cut."""
    import pygame

    pygame.draw.line(strip, LINE, (edges[0][0], floor), (edges[-1][1], floor))
    place = 0
    for name, same in itertools.groupby(names):
        count = len(list(same))
        left, right = edges[place][0], edges[place + count - 1][1]
        place += count
        told = name if count == 1 else f"{count} × {name}"
        # of feature[12] its number is enough
        for text in (told, name, name[name.find("[") :] if "[" in name else ""):
            label = _font().render(text, True, INK)
            if label.get_width() <= right - left:
                strip.blit(label, label.get_rect(center=((left + right) // 2, floor + ROW // 2)))
                break


def _explain(strip: pygame.Surface, meaning: str) -> None:
    """Write above the bars what their height and colours mean."""
    import pygame

    x = MARGIN
    for name, color in (("signal", SIGNAL), ("noise", NOISE)):
        pygame.draw.rect(strip, color, (x, ROW // 2 - 5, 10, 10))
        label = _font().render(name, True, INK)
        strip.blit(label, label.get_rect(midleft=(x + 15, ROW // 2)))
        x += 15 + label.get_width() + MARGIN
    label = _font().render(meaning, True, INK)
    strip.blit(label, label.get_rect(midright=(strip.get_width() - MARGIN, ROW // 2)))


def _font() -> pygame.font.Font:
    import pygame

    pygame.font.init()
    return pygame.font.Font(None, TEXT)  # not kept: a pygame.quit() elsewhere would end it
