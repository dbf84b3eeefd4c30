"""Random numbers for the items of a data set that depend only on a seed, an epoch and the item, see `Chance`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from noisy_envs.arrays import namespace
from noisy_envs.randomness import episode_key, uniforms


class Chance(NamedTuple):
    """Random numbers of items, independent of batch, order and device.

    They are those of `noisy_envs.randomness`, with items in place of episodes and epochs in place of steps.
    """

    seed: int
    epoch: int = 0

    def draw(self, items: Tensor, counts: tuple[int, ...]) -> tuple[Tensor, ...]:
        """Draw from U[0, 1) for items (B,), int64, on their device: for each count, float32 (B, count)."""
        if items.device.type == "cpu":  # where NumPy is faster
            return tuple(torch.from_numpy(numbers) for numbers in self._draw(items.numpy(), counts))
        return self._draw(items, counts)

    def _draw(self, items: np.ndarray | Tensor, counts: tuple[int, ...]) -> tuple[Any, ...]:
        xp = namespace(items)
        key = episode_key(xp.full_like(items, self.seed), items)
        return uniforms(key, xp.full_like(items[:1], self.epoch), counts)


def below(numbers: Tensor, bound: int) -> Tensor:
    """Convert numbers from U[0, 1) to integers in [0, bound), int64.

    Their probabilities differ by at most bound / 2²⁴, because a number has 24 bits.
    """
    return (numbers * bound).long()
