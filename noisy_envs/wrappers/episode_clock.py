"""Which episodes the worlds under a wrapper play, and how far they are: what all chance of a wrapper follows from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from noisy_envs.interfaces.checks import check_episode, check_options, next_episodes
from noisy_envs.randomness import episode_key, episode_words

SALT = 0x746F6B65  # sets the chance of wrappers apart from that of the games, which have the same seeds


class Moment(NamedTuple):
    """When R worlds are looked at: it decides all that is drawn."""

    rows: np.ndarray  # (R,) int64, which worlds these are
    fresh: np.ndarray  # bool (R,), false for a world that shows again what it has shown
    step: np.ndarray  # (R,) int64 steps played of the episode, 0 at its start
    key: np.ndarray  # (R, 2) int64 of the episode

    @property
    def start(self) -> Moment:
        """The start of the same episodes."""
        return self._replace(step=0 * self.step)


class Start(NamedTuple):
    """The episodes that a reset begins."""

    rows: np.ndarray  # (R,) worlds that are reset
    anew: np.ndarray  # bool (R,), whether the seed is a new one, so that the past does not count
    seeds: np.ndarray  # (R,)
    numbers: np.ndarray  # (R,)


class Clock:
    """Seeds, numbers and steps of the episodes in B worlds.

    Args:
        num_worlds: B.
        depth: how many wrappers below draw too; the numbers differ from theirs.
        draws: whether numbers are drawn at all; keys, which cost more than all else here, stay 0 where none are.
    """

    def __init__(self, num_worlds: int, depth: int, draws: bool) -> None:
        """Begin before the first episode."""
        self.depth, self.draws = depth, draws
        self.seeds, self.numbers = np.full(num_worlds, -1), np.full(num_worlds, -1)
        self.steps = np.zeros(num_worlds, np.int64)
        self.salted = np.zeros(num_worlds, np.int64)  # seeds of this layer, of 63 bits
        self.keys = np.zeros((num_worlds, 2), np.int64)

    def plan(
        self, seed: int | Sequence[int | None] | None, options: dict[str, Any] | None, mask: np.ndarray | None = None
    ) -> Start:
        """Tell which episodes a reset begins; nothing changes yet, and a seed that is none is refused.

        Args:
            seed: of world 0, and world i takes seed + i; or one for each world.
            options: `episode`, the number to begin at; others are ignored.
            mask: bool (B,), which worlds are reset; by default all.
        """
        rows = np.arange(len(self.seeds)) if mask is None else np.flatnonzero(mask)
        if mask is not None and (self.seeds < 0).any():
            raise RuntimeError("the first reset must be of all worlds: leave out options['reset_mask']")
        number = check_episode(check_options(options).get("episode"))
        seeds, numbers = next_episodes(seed, number, self.seeds, self.numbers)
        given = [one is not None for one in seed] if isinstance(seed, Sequence) else [seed is not None] * len(seeds)
        return Start(rows, (np.array(given) | (self.seeds < 0))[rows], seeds[rows], numbers[rows])

    def begin(self, start: Start) -> None:
        """Begin episodes."""
        rows = start.rows
        self.seeds[rows], self.numbers[rows], self.steps[rows] = start.seeds, start.numbers, 0
        if not self.draws:
            return
        if start.anew.any():
            high, low = episode_words(start.seeds, SALT + self.depth)
            self.salted[rows] = (high >> 1) << 32 | low
        self.keys[rows] = episode_key(self.salted[rows], start.numbers)

    def follow(self, rows: np.ndarray) -> None:
        """Begin the next episodes of worlds (R,)."""
        if len(rows):
            self.begin(Start(rows, np.zeros(len(rows), np.bool_), self.seeds[rows], self.numbers[rows] + 1))

    def check_begun(self) -> None:
        """Raise if a world was never reset."""
        if (self.seeds < 0).any():
            raise RuntimeError("no episode has begun: call reset() first")

    def moment(self, rows: np.ndarray, fresh: np.ndarray) -> Moment:
        """Describe the present of worlds (R,)."""
        return Moment(rows, fresh, self.steps[rows], self.keys[rows])
