"""Random patches around and over images, before they become tokens.

Shapes: `R` images in a batch, `n` patches of an image, `m` of the canvas that it lies in, `V` numbers of a patch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from noisy_envs.arrays import Array, namespace
from noisy_envs.validation import Count, check_choice, check_count, check_flag, highest, lowest, plain
from noisy_envs.wrappers.episode_clock import Moment
from noisy_envs.wrappers.images import Patches, is_image
from noisy_envs.wrappers.transforms import Info, convert_like, draw_uniforms

CONTENTS = ("uniform", "image")


class Distract:
    """Lays images on a canvas of noise patches, through which some of the image's own are not seen."""

    is_random = True
    spec: Any = None  # pixels are no tokens

    def __init__(
        self,
        space: spaces.Space[Any],
        around: int,
        over: Count,
        patch_size: int,
        content: str,
        frozen: bool,
        moves: bool,
    ) -> None:
        """Prepare for images of `space`.

        Raises:
            ValueError: the observations are no images, or an option has a value that is not allowed.
        """
        if not (isinstance(space, spaces.Box) and is_image(space)):
            hint = "AddNoiseTokens adds noise to other observations, after TokenizeObservation"
            raise ValueError(f"{space}: expected an image (height, width, channels), or (height, width) uint8; {hint}")
        around, over, patch_size, frozen, moves = map(plain, (around, over, patch_size, frozen, moves))
        self.patches = Patches.of(space, patch_size)
        rows, columns, _, channels = self.patches
        check_count("around", around, minimum=0, maximum=100, may_be_range=False)
        check_count("over", over, minimum=0, maximum=rows * columns)
        check_choice("content", content, CONTENTS)
        check_flag("frozen", frozen)
        check_flag("moves", moves)
        self.low, self.high = space.low.min(), space.high.max()
        if content == "uniform" and not np.isfinite([self.low, self.high]).all():
            hint = "content='image' takes patches of the image"
            raise ValueError(f"content={content!r}: expected pixels with finite bounds, got {space}; {hint}")
        self.around, self.over, self.content, self.frozen, self.moves = around, over, content, frozen, moves
        self.options: dict[str, Any] = {
            "around": around, "over": over, "patch_size": patch_size, "content": content, "frozen": frozen,
            "moves": moves,
        }  # fmt: skip
        self.canvas = Patches(rows + 2 * around, columns + 2 * around, patch_size, channels)
        height, width = self.canvas.rows * patch_size, self.canvas.columns * patch_size
        self.shape = (height, width, *space.shape[2:])
        self.space = spaces.Box(self.low, self.high, self.shape, space.dtype.type)
        self._number_patches()

    def _number_patches(self) -> None:
        """Number the patches of the canvas from the middle to the edge: a further ring does not change the others."""
        rows, columns = self.patches[:2]
        row, column = np.divmod(np.arange(self.canvas.rows * self.canvas.columns), self.canvas.columns)
        row, column = row - self.around, column - self.around
        ring = np.maximum.reduce([-row, row - rows + 1, -column, column - columns + 1, 0 * row])
        self.rank = np.argsort(np.argsort(ring, kind="stable"))  # (m,)
        self.inside = np.flatnonzero(ring == 0)  # (n,) the image's patches, where it is in the middle
        self.num_values = self.patches.size**2 * self.patches.channels  # V
        # streams: content, order in which patches are covered, place of the image, number of covered patches
        self.draws = len(ring) * (self.num_values if self.content == "uniform" else 1), len(self.inside)
        self.start_draws = 0, 0, 2, 1

    def stack(self, observations: list[Any]) -> np.ndarray:
        """Stack images (H, W, C) to (R, H, W, C)."""
        return np.stack(observations)

    def read(self, observations: Any) -> Any:
        """Return images (R, H, W, C) unchanged."""
        return observations

    def forget(self, rows: np.ndarray) -> None:
        """Do nothing: there is no history."""

    def apply(self, images: Array, signal: Array | None, moment: Moment) -> tuple[Array, Info]:
        """Return canvases (R, H', W', C); the info has the pixels that are signal, bool (R, H', W'), and their share.

        `signal`, bool (R, H, W), marks the image's own signal; None if all of it is.
        """
        xp = namespace(images)
        own = self.patches.split(images)  # (R, n, V)
        u_content, u_order = draw_uniforms(moment.start if self.frozen else moment, self.draws, images)
        *_, u_place, u_number = draw_uniforms(moment.start, self.start_draws, images)
        canvas = self._noise(own, u_content)
        seen = ~self._covered(u_order, u_number)[..., None]  # (R, n, 1)
        marks = xp.ones_like(own[..., :1], dtype=xp.bool) if signal is None else self.patches.split(signal)
        rows, cells = xp.arange(len(own), device=own.device)[:, None], self._cells(u_place)
        canvas[rows, cells] = xp.where(seen, own, canvas[rows, cells])
        size = self.patches.size**2
        mask = xp.zeros((*canvas.shape[:2], size), dtype=xp.bool, device=own.device)
        mask[rows, cells] = seen & marks
        mask = self.canvas.join(mask, self.shape[:2])
        real = xp.float64 if xp is np else xp.float32  # as in this package's vector environments
        share = xp.mean(xp.astype(mask, real), axis=(1, 2))
        return self.canvas.join(canvas, self.shape), {"signal_mask": mask, "snr": share}

    def _noise(self, own: Array, u: Array) -> Array:
        """Return noise patches (R, m, V) by uniforms (R, m · V), or (R, m) for those of the image's own (R, n, V)."""
        xp, rank = namespace(own), convert_like(self.rank, own)
        if self.content == "image":
            source = xp.astype(xp.floor(u[:, rank] * own.shape[1]), xp.int64)
            return xp.take_along_axis(own, source[..., None], axis=1)
        u = xp.reshape(u, (len(own), len(self.rank), self.num_values))[:, rank]
        low, span = float(self.low), float(self.high) - float(self.low)
        whole = self.space.dtype.kind != "f"
        values = xp.floor(low + u * (span + 1)) if whole else low + u * span
        return xp.astype(values, own.dtype)

    def _covered(self, u_order: Array, u_number: Array) -> Array:
        """Tell which patches of the image are not seen, bool (R, n), by uniforms (R, n) and (R, 1)."""
        xp, low, high = namespace(u_order), lowest(self.over), highest(self.over)
        rank = xp.argsort(xp.argsort(u_order, axis=1, stable=True), axis=1, stable=True)
        return rank < (low + xp.floor(u_number * (1 + high - low)) if low < high else low)

    def _cells(self, u_place: Array) -> Array:
        """Return which patches of the canvas (R, n), or (1, n), are the image's."""
        xp, cells = namespace(u_place), convert_like(self.inside, u_place)[None]
        if not self.moves:
            return cells
        offset = xp.astype(xp.floor(u_place * (2 * self.around + 1)), xp.int64) - self.around
        return cells + offset[:, :1] * self.canvas.columns + offset[:, 1:]
