"""The wrappers of `noisy_envs.wrappers` for vector environments.

Environment i of a vector with seed s equals the single environment with seed s + i. The wrappers work in every
autoreset mode, on NumPy arrays, and also on the tensors of this package's environments, where each step waits for the
device. They transform `final_obs` and `final_info` too, and keep their layout:
Gymnasium's, or dense tensors on torch.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.utils import RecordConstructorArgs
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space

from noisy_envs.arrays import Array, as_numpy, namespace
from noisy_envs.interfaces.checks import check_options, check_reset_mask, seeds_as_list
from noisy_envs.tokens import TokenSpec
from noisy_envs.validation import Count, check_count, plain
from noisy_envs.wrappers import faults, noise, tokenize, transforms
from noisy_envs.wrappers.distract import Distract
from noisy_envs.wrappers.disturb_vector import NoisyActions, NoisyRewards
from noisy_envs.wrappers.episode_clock import EpisodeClock
from noisy_envs.wrappers.introspection import autoreset_mode_of, num_random_layers, single_space_of, spec_of
from noisy_envs.wrappers.noise import NoiseOptions

__all__ = [
    "AddDistractorPatches",
    "AddNoiseTokens",
    "DisturbTokens",
    "DropTokens",
    "DuplicateTokens",
    "FlattenTokens",
    "NoisyActions",
    "NoisyRewards",
    "RecordEpisodeStatistics",
    "ShuffleTokens",
    "TokenizeObservation",
    "TokensAndMask",
]


class VectorTokenWrapper(VectorWrapper, RecordConstructorArgs):
    """Applies a transform of `noisy_envs.wrappers.transforms` to observations and info of B environments.

    It does not derive from `VectorObservationWrapper`, which does not support SAME_STEP and does not change `info`. The
    base class has no type parameters, since `VectorWrapper` of Gymnasium 1.2 does not accept any.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any], transform: transforms.Transform) -> None:
        """Wrap vector environments."""
        super().__init__(env)
        self._mode = autoreset_mode_of(env)
        self.single_observation_space = transform.space
        self.observation_space = batch_space(transform.space, env.num_envs)
        self._transform = transform
        self._clock = EpisodeClock(env.num_envs, num_random_layers(env), transform.is_random)
        self._ended = np.zeros(env.num_envs, np.bool_)  # environments that the next step resets
        self._rows = np.arange(env.num_envs)

    @property
    def token_spec(self) -> TokenSpec:
        """Meaning of the tokens."""
        return self._transform.spec

    @property
    def num_random_layers(self) -> int:
        """Number of layers that draw random numbers, this one included."""
        return self._clock.depth + self._transform.is_random

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start the next episodes, or the first ones of `seed`, in all environments or those of `reset_mask`."""
        seed = seeds_as_list(seed)
        options = None if options is None else check_options(options)  # a copy: Gymnasium removes the mask
        mask = check_reset_mask((options or {}).get("reset_mask"), self.num_envs)
        start = self._clock.plan_reset(seed, options if self._transform.is_random else None, mask)
        observations, info = self.env.reset(seed=seed, options=options)  # type: ignore[arg-type]
        self._clock.start(start)
        self._transform.forget(start.rows[start.reseeded])
        self._ended[start.rows] = False
        batch = self._transform.read(observations)
        transformed, own_info = self._apply(batch, info, self._rows, self._mask_of(start.rows))
        own_info = {name: self._gather(x, start.rows) for name, x in own_info.items()}
        return transformed, info | self._with_masks(own_info, start.rows)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Play actions; return observations (B, ...), rewards, terminated, truncated (B,) and info."""
        self._clock.check_started()
        observations, rewards, terminated, truncated, info = self.env.step(actions)
        self._clock.count_step(actions, rewards)
        ended = as_numpy(terminated) | as_numpy(truncated)
        if self._mode is AutoresetMode.NEXT_STEP:
            self._clock.start_next(np.flatnonzero(self._ended))
            self._ended = ended
        elif self._mode is AutoresetMode.SAME_STEP and ended.any():
            info = self._transform_final(info, np.flatnonzero(ended))
            self._clock.start_next(np.flatnonzero(ended))
        batch = self._transform.read(observations)
        transformed, own_info = self._apply(batch, info, self._rows, self._mask_of(self._rows))
        return transformed, rewards, terminated, truncated, info | self._with_masks(own_info, self._rows)

    def _apply(
        self, batch: Any, info: dict[str, Any], rows: np.ndarray, is_new: np.ndarray
    ) -> tuple[Any, transforms.Info]:
        """Transform the observations of the environments `rows` (R,); return them and their info."""
        signal = info.get("signal_mask")
        if signal is not None:
            signal = self._gather(signal, rows)
        return self._transform.apply(batch, signal, self._clock.moment(rows, is_new))

    def _transform_final(self, info: dict[str, Any], rows: np.ndarray) -> dict[str, Any]:
        """Return `info` with the transformed last observations of `rows` (R,), whose episodes ended."""
        final, final_info = info["final_obs"], info.get("final_info", {})
        as_objects = getattr(final, "dtype", None) == np.object_
        if as_objects:
            batch = self._transform.stack([final[i] for i in rows])
        else:
            batch = self._gather(self._transform.read(final), rows)
        transformed, own_info = self._apply(batch, final_info, rows, np.ones(len(rows), np.bool_))
        if as_objects:
            final = np.full(self.num_envs, None, dtype=object)
            for i, row in enumerate(rows):
                final[row] = transforms.item(transformed, i)
        elif isinstance(transformed, dict):
            final = {name: self._scatter(part, rows) for name, part in transformed.items()}
        else:
            final = self._scatter(transformed, rows)
        return info | {"final_obs": final, "final_info": final_info | self._with_masks(own_info, rows)}

    def _with_masks(self, info: transforms.Info, rows: np.ndarray) -> dict[str, Array]:
        """Turn info (R, ...) of the environments `rows` into Gymnasium's layout: (B, ...), and a mask (B,) for each."""
        result = {}
        for name, value in info.items():
            result[name] = self._scatter(value, rows)
            result[f"_{name}"] = transforms.convert_like(self._mask_of(rows), value)
        return result

    def _mask_of(self, rows: np.ndarray) -> np.ndarray:
        """Return a mask, bool (B,), that is True for `rows` (R,)."""
        mask = np.zeros(self.num_envs, np.bool_)
        mask[rows] = True
        return mask

    def _scatter(self, part: Array, rows: np.ndarray) -> Array:
        """Return an array (B, ...) that holds `part` (R, ...) in `rows`, and zeros in the others."""
        if len(rows) == self.num_envs:
            return part
        whole = namespace(part).zeros((self.num_envs, *part.shape[1:]), dtype=part.dtype, device=part.device)
        whole[transforms.convert_like(rows, part)] = part
        return whole

    def _gather(self, whole: Array, rows: np.ndarray) -> Array:
        """Return the `rows` (R,) of an array (B, ...)."""
        return whole if len(rows) == self.num_envs else whole[transforms.convert_like(rows, whole)]


class TokenizeObservation(VectorTokenWrapper):
    """Turns observations into tokens (B, N, D); see `noisy_envs.wrappers.TokenizeObservation`."""

    def __init__(
        self, env: VectorEnv[Any, Any, Any], squash: bool = False, patch_size: int = tokenize.PATCH_SIZE
    ) -> None:
        """Wrap vector environments."""
        RecordConstructorArgs.__init__(self, squash=plain(squash), patch_size=plain(patch_size))
        super().__init__(env, tokenize.Tokenize(single_space_of(env), squash, patch_size))


class AddDistractorPatches(VectorTokenWrapper):
    """Adds random patches around and over images (B, H, W, C); see `noisy_envs.wrappers.AddDistractorPatches`."""

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        around: int = 1,
        over: Count = 0,
        patch_size: int = tokenize.PATCH_SIZE,
        content: str = "uniform",
        frozen: bool = False,
        moves: bool = False,
    ) -> None:
        """Wrap vector environments of images."""
        transform = Distract(single_space_of(env), around, over, patch_size, content, frozen, moves)
        RecordConstructorArgs.__init__(self, **transform.options)
        super().__init__(env, transform)


class AddNoiseTokens(VectorTokenWrapper):
    """Adds M uninformative tokens: (B, N, D) become (B, N + M, D); see `noisy_envs.wrappers.AddNoiseTokens`."""

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        num_noise: Count,
        distribution: str = "gaussian",
        scale: float = 1.0,
        frozen: bool = False,
        shuffle: bool = True,
        noise_role: str = "own",
        delay: int = 1,
        correlation: str = "none",
        correlated: bool = True,
        schedule: str = "constant",
        schedule_episodes: int = 1000,
    ) -> None:
        """Wrap vector environments of tokens."""
        space, spec = single_space_of(env), spec_of(env)
        options = NoiseOptions(
            num_noise, distribution, scale, frozen, shuffle, noise_role, delay, correlation, correlated, schedule,
            schedule_episodes,
        )  # fmt: skip
        RecordConstructorArgs.__init__(self, **dataclasses.asdict(options))
        super().__init__(env, noise.AddNoise(space, spec, env.single_action_space, env.num_envs, options))


class DisturbTokens(VectorTokenWrapper):
    """Disturbs values of tokens (B, N, D); see `noisy_envs.wrappers.DisturbTokens`."""

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        kind: str = "gaussian",
        probability: float = 1.0,
        scale: float = 1.0,
        delay: int = 1,
    ) -> None:
        """Wrap vector environments of tokens."""
        space, spec = single_space_of(env), spec_of(env)
        transform = faults.Disturb(space, spec, env.num_envs, kind, probability, scale, delay)
        RecordConstructorArgs.__init__(self, **transform.options)
        super().__init__(env, transform)


class DropTokens(VectorTokenWrapper):
    """Turns random tokens (B, N, D) into padding; see `noisy_envs.wrappers.DropTokens`."""

    def __init__(self, env: VectorEnv[Any, Any, Any], probability: float, frozen: bool = False) -> None:
        """Wrap vector environments of tokens."""
        transform = faults.Drop(single_space_of(env), spec_of(env), probability, frozen)
        RecordConstructorArgs.__init__(self, **transform.options)
        super().__init__(env, transform)


class DuplicateTokens(VectorTokenWrapper):
    """Adds M copies of tokens: (B, N, D) become (B, N + M, D); see `noisy_envs.wrappers.DuplicateTokens`."""

    def __init__(
        self, env: VectorEnv[Any, Any, Any], num_copies: int, frozen: bool = False, shuffle: bool = True
    ) -> None:
        """Wrap vector environments of tokens."""
        transform = faults.Duplicate(single_space_of(env), spec_of(env), num_copies, frozen, shuffle)
        RecordConstructorArgs.__init__(self, **transform.options)
        super().__init__(env, transform)


class ShuffleTokens(VectorTokenWrapper):
    """Puts all tokens (B, N, D) but the query in random order in each step, independently in each environment."""

    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        """Wrap vector environments of tokens."""
        RecordConstructorArgs.__init__(self)
        super().__init__(env, transforms.Shuffle(single_space_of(env), spec_of(env)))


class TokensAndMask(VectorTokenWrapper):
    """Returns dictionaries: `tokens` (B, N, D) float32, and `mask` bool (B, N), False for padding."""

    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        """Wrap vector environments of tokens."""
        RecordConstructorArgs.__init__(self)
        super().__init__(env, transforms.Mask(single_space_of(env), spec_of(env)))


class FlattenTokens(VectorTokenWrapper):
    """Flattens the tokens (B, N, D) to vectors (B, N · D), row by row; `token_spec` still describes the rows."""

    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        """Wrap vector environments of tokens."""
        RecordConstructorArgs.__init__(self)
        super().__init__(env, transforms.Flatten(single_space_of(env), spec_of(env)))


class RecordEpisodeStatistics(VectorWrapper, RecordConstructorArgs):
    """Adds statistics of episodes that ended to `info`, as Gymnasium's wrapper of this name, but also on tensors.

    `info["episode"]` has `r`, the return (B,), or (B, n) of n controlled agents, `l`, the number of steps (B,), and
    `t`, the number of seconds (B,). They are 0 where no episode ended, as the mask `info["_episode"]` (B,) shows.
    They have the library and device of the rewards, so each step waits for the device.

    Args:
        env: vector environments of NumPy arrays or tensors, in any autoreset mode.
        buffer_length: number of last episodes in the queues.
        stats_key: key in `info`.

    Attributes:
        episode_count: number of episodes that have ended.
        return_queue: returns of the last episodes, numbers or arrays (n,).
        length_queue: numbers of steps of the last episodes.
        time_queue: seconds of the last episodes.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any], buffer_length: int = 100, stats_key: str = "episode") -> None:
        """Wrap vector environments."""
        buffer_length = plain(buffer_length)
        check_count("buffer_length", buffer_length, minimum=0, may_be_range=False)
        RecordConstructorArgs.__init__(self, buffer_length=buffer_length, stats_key=stats_key)
        single_space_of(env)
        super().__init__(env)
        self._key, self._mode = stats_key, autoreset_mode_of(env)
        self.episode_count = 0
        self.return_queue, self.length_queue, self.time_queue = (deque[Any](maxlen=buffer_length) for _ in range(3))
        self._returns = np.zeros(env.num_envs)  # (B,), or (B, n) after the first rewards of n agents
        self._lengths, self._starts = np.zeros(env.num_envs, np.int64), np.zeros(env.num_envs)
        self._ended = np.zeros(env.num_envs, np.bool_)  # environments that the next step resets

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start the next episodes, in all environments or those of `options["reset_mask"]`."""
        options = None if options is None else check_options(options)  # a copy: Gymnasium removes the mask
        mask = check_reset_mask((options or {}).get("reset_mask"), self.num_envs)
        result = self.env.reset(seed=seed, options=options)  # type: ignore[arg-type]
        self._start(np.ones(self.num_envs, np.bool_) if mask is None else mask)
        return result

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Play actions; return the results of the environments, with statistics in info."""
        observations, rewards, terminated, truncated, info = self.env.step(actions)
        reward, ended = as_numpy(rewards), as_numpy(terminated) | as_numpy(truncated)
        if self._returns.shape != reward.shape:
            self._returns = np.zeros(reward.shape)
        idle = self._ended.copy()
        self._start(idle)  # this step reset them instead of playing an action
        self._returns[~idle] += reward[~idle]
        self._lengths += ~idle
        self._ended = ended
        if ended.any():
            if self._key in info:
                raise ValueError(f"stats_key={self._key!r}: expected a key that info does not have yet")
            info = info | self._record(ended, rewards)
        if self._mode is AutoresetMode.SAME_STEP:
            self._start(ended)
        return observations, rewards, terminated, truncated, info

    def _start(self, mask: np.ndarray) -> None:
        """Start new statistics for the environments `mask`, bool (B,)."""
        self._returns[mask], self._lengths[mask], self._starts[mask] = 0.0, 0, time.perf_counter()
        self._ended = self._ended & ~mask

    def _record(self, ended: np.ndarray, like: Array) -> dict[str, Any]:
        """Return the info about the environments `ended`, bool (B,), in the library of `like`, and queue it."""
        real = np.float64 if isinstance(like, np.ndarray) else np.float32  # as in this package's vector environments
        spent = np.round(time.perf_counter() - self._starts, 6)
        self.episode_count += int(ended.sum())
        statistics = {}
        for name, values, queue, dtype in (
            ("r", self._returns, self.return_queue, real),
            ("l", self._lengths, self.length_queue, np.int64),
            ("t", spent, self.time_queue, real),
        ):
            queue.extend(values[ended])
            masked = np.zeros(values.shape, dtype)
            masked[ended] = values[ended]
            statistics[name] = transforms.convert_like(masked, like)
        return {self._key: statistics, f"_{self._key}": transforms.convert_like(ended.copy(), like)}
