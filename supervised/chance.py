"""Chance of a data set's items: numbers that follow from a seed, an epoch and the item alone, see `Chance`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from noisy_envs.arrays import namespace
from noisy_envs.randomness import episode_key, uniforms


class Chance(NamedTuple):
    """Random numbers of items, which no batch, order or device changes.

    An item is what an episode is to the environments, and an epoch what a step is: see `noisy_envs.randomness`.
    """

    seed: int
    epoch: int = 0

    def draw(self, items: Tensor, counts: tuple[int, ...]) -> tuple[Tensor, ...]:
        """Return numbers from U[0, 1) of items (B,), int64, where these are: for each count, float32 (B, count)."""
        if items.device.type == "cpu":  # where NumPy is faster
            return tuple(torch.from_numpy(drawn) for drawn in self._draw(items.numpy(), counts))
        return self._draw(items, counts)

    def _draw(self, items: np.ndarray | Tensor, counts: tuple[int, ...]) -> tuple[Any, ...]:
        xp = namespace(items)
        key = episode_key(xp.full_like(items, self.seed), items)
        return uniforms(key, xp.full_like(items[:1], self.epoch), counts)


def below(numbers: Tensor, bound: int) -> Tensor:
    """Turn numbers from U[0, 1) into whole ones from 0 up to a bound, int64.

    Each is as likely, but for a difference of bound / 2²⁴: a number has 24 bits.
    """
    return (numbers * bound).long()
