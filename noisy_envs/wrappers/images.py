"""Images as patches: square parts of equal size, row by row.

Shapes: images (R, H, W, C), or (R, H, W) if they are grey; `n` patches of P · P · C numbers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from noisy_envs.arrays import Array, namespace
from noisy_envs.validation import check_count, plain, unexpected

CHANNELS = (1, 3, 4)  # of grey, RGB and RGBA images


def is_image(space: spaces.Space[Any]) -> bool:
    """Tell whether a space has images (H, W, C), or grey ones (H, W) uint8; other Boxes with two axes are sets."""
    if not isinstance(space, spaces.Box):
        return False
    return len(space.shape) == 3 or (len(space.shape) == 2 and space.dtype == np.uint8)


class Patches(NamedTuple):
    """How images are divided into patches."""

    rows: int  # of patches
    columns: int
    size: int  # P, in pixels
    channels: int  # C

    @classmethod
    def of(cls, space: spaces.Box, size: Any) -> Patches:
        """Divide the images of a space into patches of `size` pixels in height and width.

        Raises:
            ValueError: the images cannot be divided so, or their channels come first.
        """
        size = plain(size)
        check_count("patch_size", size, minimum=1, may_be_range=False)
        height, width, channels = (*space.shape, 1)[:3]
        if channels > max(CHANNELS) and height in CHANNELS and 2 * height < min(width, channels):
            hint = f"gymnasium.wrappers.TransformObservation with np.moveaxis makes it {(width, channels, height)}"
            raise ValueError(f"{space}: expected an image (height, width, channels), got its channels first; {hint}")
        sizes = [n for n in range(1, min(height, width) + 1) if height % n == width % n == 0]
        if size not in sizes:
            known = ", ".join(map(str, sizes))
            raise unexpected("patch_size", size, f"a divisor of the image's {height} and {width} pixels: {known}")
        return cls(height // size, width // size, size, channels)

    @property
    def names(self) -> list[str]:
        """Names of the numbers of a patch."""
        side = range(self.size)
        return [f"pixel[{i},{j},{c}]" for i in side for j in side for c in range(self.channels)]

    @property
    def places(self) -> np.ndarray:
        """Row and column of each patch's middle, (n, 2): from −1 at the upper or left edge to 1 at the other."""
        middles = [(2 * np.arange(count) + 1) / count - 1 for count in (self.rows, self.columns)]
        return np.stack(np.meshgrid(*middles, indexing="ij"), axis=-1).reshape(-1, 2).astype(np.float32)

    def split(self, images: Array) -> Array:
        """Divide images (R, H, W, C), or (R, H, W), into patches (R, n, P · P · C)."""
        shape = (len(images), self.rows, self.size, self.columns, self.size, -1)
        return self._reorder(images, shape, (len(images), self.rows * self.columns, -1))

    def join(self, patches: Array, shape: tuple[int, ...]) -> Array:
        """Join patches (R, n, P · P · C) to images (R, *shape)."""
        blocks = (len(patches), self.rows, self.columns, self.size, self.size, -1)
        return self._reorder(patches, blocks, (len(patches), *shape))

    def _reorder(self, array: Array, blocks: tuple[int, ...], shape: tuple[int, ...]) -> Array:
        """Exchange the axes of columns and of rows within patches."""
        xp = namespace(array)
        return xp.reshape(xp.permute_dims(xp.reshape(array, blocks), (0, 1, 3, 2, 4, 5)), shape)
