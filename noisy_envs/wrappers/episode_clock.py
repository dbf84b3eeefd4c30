"""Seeds, episode numbers and steps of the environments under a wrapper, which determine its random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from noisy_envs.interfaces.checks import check_episode, check_options, next_episodes
from noisy_envs.randomness import episode_key, episode_words

SALT = 0x746F6B65  # separates the random numbers of wrappers from those of games, which have the same seeds


class Moment(NamedTuple):
    """The time of R observations; it determines the random numbers of a transform."""

    rows: np.ndarray  # (R,) int64, numbers of the environments
    is_new: np.ndarray  # bool (R,), False for an environment that returns its last observation again
    step: np.ndarray  # (R,) int64, steps played in the episode, 0 at its start
    key: np.ndarray  # (R, 2) int64, keys of the episodes
    episode: np.ndarray  # (R,) int64, numbers of the episodes
    last: tuple[Any, Any] | None = None  # actions and rewards of the last step, (B, ...) each

    @property
    def start(self) -> Moment:
        """The start of the same episodes."""
        return self._replace(step=0 * self.step)


class EpisodeStart(NamedTuple):
    """The episodes that a reset starts."""

    rows: np.ndarray  # (R,) environments that are reset
    reseeded: np.ndarray  # bool (R,), whether the seed is new, so that the history is forgotten
    seeds: np.ndarray  # (R,)
    numbers: np.ndarray  # (R,)


class EpisodeClock:
    """Seeds, numbers and steps of the episodes in B environments.

    Args:
        num_envs: B.
        depth: number of wrappers below that draw random numbers; this layer draws different ones.
        is_random: whether random numbers are drawn at all. Without them keys stay 0, since they cost the most time.
    """

    def __init__(self, num_envs: int, depth: int, is_random: bool) -> None:
        """Start before the first episode."""
        self.depth, self.is_random = depth, is_random
        self.seeds, self.numbers = np.full(num_envs, -1), np.full(num_envs, -1)
        self.steps = np.zeros(num_envs, np.int64)
        self.salted = np.zeros(num_envs, np.int64)  # seeds of this layer, 63 bits each
        self.keys = np.zeros((num_envs, 2), np.int64)
        self.last: tuple[Any, Any] | None = None  # actions and rewards of the last step, (B, ...) each

    def plan_reset(
        self, seed: int | Sequence[int | None] | None, options: dict[str, Any] | None, mask: np.ndarray | None = None
    ) -> EpisodeStart:
        """Return the episodes that a reset starts; nothing changes yet.

        Args:
            seed: seed of environment 0, where environment i gets seed + i; or one for each environment.
            options: `episode`, the number of the episode; others are ignored.
            mask: environments that are reset, bool (B,); None for all.

        Raises:
            ValueError, TypeError, RuntimeError: a seed, episode number or mask is not allowed.
        """
        rows = np.arange(len(self.seeds)) if mask is None else np.flatnonzero(mask)
        if mask is not None and (self.seeds < 0).any():
            raise RuntimeError("the first reset must be of all environments: leave out options['reset_mask']")
        number = check_episode(check_options(options).get("episode"))
        seeds, numbers = next_episodes(seed, number, self.seeds, self.numbers)
        given = [x is not None for x in seed] if isinstance(seed, Sequence) else [seed is not None] * len(seeds)
        return EpisodeStart(rows, (np.array(given) | (self.seeds < 0))[rows], seeds[rows], numbers[rows])

    def start(self, start: EpisodeStart) -> None:
        """Start episodes."""
        rows = start.rows
        self.seeds[rows], self.numbers[rows], self.steps[rows] = start.seeds, start.numbers, 0
        if not self.is_random:
            return
        if start.reseeded.any():
            high, low = episode_words(start.seeds, SALT + self.depth)
            self.salted[rows] = (high >> 1) << 32 | low
        self.keys[rows] = episode_key(self.salted[rows], start.numbers)

    def start_next(self, rows: np.ndarray) -> None:
        """Start the next episodes of environments (R,)."""
        if len(rows):
            self.start(EpisodeStart(rows, np.zeros(len(rows), np.bool_), self.seeds[rows], self.numbers[rows] + 1))

    def count_step(self, actions: Any, rewards: Any) -> None:
        """Count a step of all environments, with its actions and rewards (B, ...)."""
        self.steps += 1
        self.last = actions, rewards

    def check_started(self) -> None:
        """Raise RuntimeError if an environment was never reset."""
        if (self.seeds < 0).any():
            raise RuntimeError("no episode has begun: call reset() first")

    def moment(self, rows: np.ndarray, is_new: np.ndarray) -> Moment:
        """Return the present moment of environments (R,)."""
        return Moment(rows, is_new, self.steps[rows], self.keys[rows], self.numbers[rows], self.last)
