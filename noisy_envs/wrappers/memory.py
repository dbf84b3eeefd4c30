"""What noise remembers of B environments: tokens of earlier steps, and what an episode began with.

Shapes: as in `noise`; `S` tokens of a step are remembered.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from noisy_envs.arrays import Array, as_numpy, namespace, outside_inference_mode
from noisy_envs.wrappers.episode_clock import Moment
from noisy_envs.wrappers.transforms import convert_like, draw_uniforms

RESERVOIR_SIZE = 128  # steps of an environment that are kept for the marginal distribution
RESERVOIR_HORIZON = 8192  # steps after which it forgets
NUM_PAST = 128  # rewards or actions from which an uncorrelated one is drawn


class SignalReservoir:
    """A random sample of past steps of each of B environments, with the signal tokens in them.

    Noise sampled from it has the distribution of the signal itself, not only its mean and deviation: a noise token has
    all values of one past signal token, so neither a feature nor a pair of features tells it apart by scale. The sample
    is taken from all steps since the seed (Vitter's algorithm R, where a step is one item). After `RESERVOIR_HORIZON`
    steps it forgets at that rate, to follow the observations of a better policy. The last few steps would be enough for
    the scale, but they contain information about the current episode, which noise must not have.
    """

    def __init__(self, num_envs: int, num_tokens: int, num_features: int) -> None:
        """Start empty."""
        self.shape = num_envs, RESERVOIR_SIZE, num_tokens, num_features
        self.num_steps = np.zeros(num_envs, np.int64)  # steps with signal since the seed
        self.sizes = np.zeros(self.shape[:2], np.int64)  # signal tokens of each step in the sample
        self.values: Any = None  # signal first; made when the first tokens tell library and device

    def forget(self, rows: np.ndarray) -> None:
        """Forget all steps of environments (R,)."""
        self.num_steps[rows] = 0

    def add(self, moment: Moment, values: Array, sizes: np.ndarray, u: Array) -> None:
        """Add a step of the environments that are new: the first `sizes` (R,) of values (R, N, D), by uniforms (R,)."""
        if self.values is None:
            with outside_inference_mode(values):
                self.values = namespace(values).zeros(self.shape, dtype=values.dtype, device=values.device)
        is_new, rows = moment.is_new & (sizes > 0), moment.rows
        count = self.num_steps[rows]
        slot = np.floor(as_numpy(u).astype(np.float64) * np.minimum(count + 1, RESERVOIR_HORIZON)).astype(np.int64)
        slot = np.where(count < RESERVOIR_SIZE, count, slot)
        added = np.flatnonzero(is_new & (slot < RESERVOIR_SIZE))
        index = convert_like(rows[added], values), convert_like(slot[added], values)
        self.values[index] = values[convert_like(added, values)]
        self.sizes[rows[added], slot[added]] = sizes[added]
        self.num_steps[rows] += is_new

    def sample(self, rows: np.ndarray, u_step: Array, u_token: Array) -> tuple[Array, np.ndarray]:
        """Sample tokens (R, M, D) by uniforms (R, M), one for the step and one for the token.

        The second result, bool (R, 1), is False for environments of which nothing is known; their tokens mean nothing.
        """
        like, u_step, u_token = u_step, *(as_numpy(u).astype(np.float64) for u in (u_step, u_token))
        count = self.num_steps[rows][:, None]  # (R, 1)
        step = np.floor(u_step * np.minimum(count, RESERVOIR_SIZE)).astype(np.int64)
        token = np.floor(u_token * self.sizes[rows[:, None], step]).astype(np.int64)
        index = (rows[:, None] + 0 * step, step, token)
        return self.values[tuple(convert_like(i, like) for i in index)], count > 0


class EpisodeStore:
    """The steps of the present episode of each of B environments, and of earlier ones since the seed.

    Args:
        num_envs: B.
        num_earlier: number of earlier episodes that are kept.
        max_steps: number of steps of an episode that are kept, its last ones. Memory grows as episodes need it.
    """

    def __init__(self, num_envs: int, num_earlier: int, max_steps: int) -> None:
        """Start empty."""
        self.num_earlier, self.max_steps = num_earlier, max_steps
        self.num_episodes = np.zeros(num_envs, np.int64)  # begun since the seed
        self.lengths = np.zeros((num_envs, 1 + num_earlier), np.int64)  # steps of each episode
        self.sizes = np.zeros((num_envs, 1 + num_earlier, 0), np.int64)  # tokens of each step
        self.values: Any = None  # (B, 1 + num_earlier, T, S, D)

    def forget(self, rows: np.ndarray) -> None:
        """Forget all episodes of environments (R,)."""
        self.num_episodes[rows] = 0

    def add(self, moment: Moment, values: Array, sizes: np.ndarray) -> None:
        """Add a step of the environments that are new: the first `sizes` (R,) of values (R, N, D)."""
        added = np.flatnonzero(moment.is_new)
        rows, step, sizes = moment.rows[added], moment.step[added], sizes[added]
        values = values[convert_like(added, values), : max(1, int(sizes.max(initial=0)))]
        self._reserve(1 + int(step.max(initial=0)), values)
        self.num_episodes[rows] += step == 0
        slot, place = self._slot(rows, 0), step % self.max_steps
        self.lengths[rows, slot] = 1 + step
        self.sizes[rows, slot, place] = sizes
        index = tuple(convert_like(i, values) for i in (rows, slot, place))
        self.values[(*index, slice(values.shape[1]))] = values

    def available(self, rows: np.ndarray) -> np.ndarray:
        """Return how many earlier episodes are known, in the shape of `rows`."""
        return np.minimum(self.num_episodes[rows] - 1, self.num_earlier)

    def length(self, rows: np.ndarray, back: np.ndarray) -> np.ndarray:
        """Return how many steps are known of the episode `back` episodes ago, in the shape of both."""
        return np.minimum(self.lengths[rows, self._slot(rows, back)], self.max_steps)

    def longer(self, rows: np.ndarray, back: np.ndarray, step: np.ndarray) -> np.ndarray:
        """Return numbers of episodes ago, (R, M): those of `back` (R, M), or others next to them in a circle.

        They are of episodes that are longer than `step` (R, 1), if any of the environments `rows` (R, 1) is.
        """
        all_back = np.arange(1, 1 + self.num_earlier)
        is_longer = (all_back <= self.available(rows)) & (self.length(rows, all_back) > step)
        if is_longer.all():
            return back
        place = np.where(np.tile(is_longer, 2), np.arange(2 * self.num_earlier), 2 * self.num_earlier)
        following = np.minimum.accumulate(place[:, ::-1], axis=1)[:, ::-1]  # the next place of a longer one
        found = np.take_along_axis(following, back - 1, axis=1)
        return np.where(found < 2 * self.num_earlier, 1 + found % self.num_earlier, back)

    def size(self, rows: np.ndarray, back: np.ndarray, step: np.ndarray) -> np.ndarray:
        """Return the number of tokens in a step of the episode `back` episodes ago."""
        return self.sizes[rows, self._slot(rows, back), step % self.max_steps]

    def read(self, rows: np.ndarray, back: np.ndarray, step: np.ndarray, token: np.ndarray) -> Array:
        """Return tokens (..., D) by environment, number of episodes ago, step and number, all of one shape (...)."""
        index = rows, self._slot(rows, back), step % self.max_steps, token
        return self.values[tuple(convert_like(i, self.values) for i in np.broadcast_arrays(*index))]

    def _slot(self, rows: np.ndarray, back: np.ndarray | int) -> np.ndarray:
        return (self.num_episodes[rows] - 1 - back) % (1 + self.num_earlier)

    def _reserve(self, steps: int, like: Array) -> None:
        """Make room for a number of steps, each of as many tokens as `like` (R, S, D) has."""
        shape = (*self.lengths.shape, 0, *like.shape[1:]) if self.values is None else tuple(self.values.shape)
        steps = min(steps, self.max_steps)
        if steps <= shape[2] and like.shape[1] <= shape[3]:
            return
        steps = shape[2] if steps <= shape[2] else min(max(steps, 2 * shape[2]), self.max_steps)
        with outside_inference_mode(like):
            new = (*shape[:2], steps, max(shape[3], like.shape[1]), shape[4])
            grown = namespace(like).zeros(new, dtype=like.dtype, device=like.device)
            if self.values is not None:
                grown[:, :, : shape[2], : shape[3]] = self.values
        sizes = np.zeros((*shape[:2], steps), np.int64)
        sizes[..., : shape[2]] = self.sizes
        self.values, self.sizes = grown, sizes


class EpisodeConstant:
    """Keeps what was drawn at the start of the episode, for each of B environments."""

    def __init__(self, num_envs: int) -> None:
        """Start empty."""
        self.num_envs = num_envs
        self.kept: Any = None  # (B, ...); made when the first draw tells library and device

    def __call__(self, drawn: Array, moment: Moment) -> Array:
        """Return what was drawn when the episodes began: (R, ...) -> (R, ...)."""
        if self.kept is None:
            with outside_inference_mode(drawn):
                shape = self.num_envs, *drawn.shape[1:]
                self.kept = namespace(drawn).zeros(shape, dtype=drawn.dtype, device=drawn.device)
        starts = np.flatnonzero(moment.is_new & (moment.step == 0))
        self.kept[convert_like(moment.rows[starts], drawn)] = drawn[convert_like(starts, drawn)]
        return self.kept[convert_like(moment.rows, drawn)]


class Follower:
    """The last reward or action of each of B environments, as one number; 0, or the bound next to it, at a start.

    If `correlated` is False, it is the number of a random step since the seed, of the last `NUM_PAST`: its distribution
    stays, but it no longer depends on the last step.

    Raises:
        ValueError: actions are neither Discrete nor a Box of at least one number.
    """

    def __init__(self, num_envs: int, correlation: str, correlated: bool, action_space: spaces.Space[Any]) -> None:
        """Start before the first step."""
        self.is_action, self.correlated = correlation == "action", correlated
        self.low, self.high = bounds_of_first(action_space) if self.is_action else (-np.inf, np.inf)
        self.present = np.zeros(num_envs, np.float32)
        self.past = np.zeros((num_envs, NUM_PAST), np.float32)
        self.count = np.zeros(num_envs, np.int64)  # steps since the seed

    def forget(self, rows: np.ndarray) -> None:
        """Forget all steps of environments (R,)."""
        self.count[rows] = 0

    def numbers(self, moment: Moment, like: Array) -> Array:
        """Return a number for each environment, (R,), in the library and on the device of `like`."""
        added = np.flatnonzero(moment.is_new)
        rows, number = moment.rows[added], np.zeros(len(added))
        if moment.last is not None:
            last = as_numpy(moment.last[0 if self.is_action else 1])
            number = np.where(moment.step[added] > 0, last.reshape(len(last), -1)[rows, 0], number)
        self.present[rows] = np.clip(number, self.low, self.high)
        if self.correlated:
            return convert_like(self.present[moment.rows], like)
        self.past[rows, self.count[rows] % NUM_PAST] = self.present[rows]
        self.count[rows] += 1
        *_, u = draw_uniforms(moment, (0, 0, 0, 0, 0, 0, 0, 1), like)
        index = as_numpy(u)[:, 0].astype(np.float64) * np.minimum(self.count[moment.rows], NUM_PAST)
        return convert_like(self.past[moment.rows, index.astype(np.int64)], like)


def bounds_of_first(space: spaces.Space[Any]) -> tuple[float, float]:
    """Return the bounds of the first number of actions."""
    if isinstance(space, spaces.Discrete):
        return float(space.start), float(space.start + space.n - 1)
    if isinstance(space, spaces.Box) and space.low.size:
        return float(space.low.flat[0]), float(space.high.flat[0])
    raise ValueError(f"action_space={space}: expected Discrete or a Box of numbers, as correlation='action'")


def signal_first(values: Array, signal: Array) -> tuple[Array, np.ndarray]:
    """Put the tokens `signal`, bool (R, N), of values (R, N, D) first, and return how many they are, (R,)."""
    xp = namespace(values)
    is_other = xp.astype(~signal, xp.int64)
    order = xp.argsort(is_other, axis=1, stable=True)
    return xp.take_along_axis(values, order[..., None], axis=1), signal.shape[1] - as_numpy(xp.sum(is_other, axis=1))
