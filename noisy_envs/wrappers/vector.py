"""The wrappers of `noisy_envs.wrappers` for vector environments: world i seeded s is the single one seeded s + i.

They work in each auto-reset mode, on NumPy arrays, and all but `TokenizeObservation` on the tensors of our own
environments too, where each step waits for the device. `final_obs` and `final_info` are changed like the rest, and laid
out as they come: in Gymnasium's manner, or densely on torch.
"""

from __future__ import annotations

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
from noisy_envs.wrappers import transforms
from noisy_envs.wrappers.episode_clock import Clock
from noisy_envs.wrappers.introspection import num_draws, spec_of, world_space_of

__all__ = [
    "AddNoiseTokens",
    "FlattenTokens",
    "RecordEpisodeStatistics",
    "ShuffleTokens",
    "TokenizeObservation",
    "TokensAndMask",
]


def autoreset_mode_of(env: VectorEnv[Any, Any, Any]) -> AutoresetMode:
    """Return when worlds are reset, or raise where the environments do not tell."""
    mode = env.metadata.get("autoreset_mode")
    if not isinstance(mode, AutoresetMode):
        raise ValueError(f"{env}: metadata['autoreset_mode']={mode!r}: must be an AutoresetMode")
    return mode


class VectorTokenWrapper(VectorWrapper, RecordConstructorArgs):
    """Shows observations and info of B worlds as a rule of `noisy_envs.wrappers.transforms` changes them.

    It is no `VectorObservationWrapper`: that refuses SAME_STEP, and leaves `info` as it is. Its base has no type
    parameters, since those of Gymnasium 1.2 take none.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any], rule: transforms.Rule) -> None:
        """Wrap vector environments."""
        super().__init__(env)
        self._mode = autoreset_mode_of(env)
        self.single_observation_space = rule.space
        self.observation_space = batch_space(rule.space, env.num_envs)
        self._rule = rule
        self._clock = Clock(env.num_envs, num_draws(env), rule.draws)
        self._ended = np.zeros(env.num_envs, np.bool_)  # whether the next step resets a world
        self._rows = np.arange(env.num_envs)

    @property
    def token_spec(self) -> TokenSpec:
        """What the tokens mean."""
        return self._rule.spec

    @property
    def num_draws(self) -> int:
        """How many layers draw numbers, this one included."""
        return self._clock.depth + self._rule.draws

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start the next episodes, or the first ones of `seed`, of all worlds or of `options["reset_mask"]`."""
        seed = seeds_as_list(seed)
        options = None if options is None else check_options(options)  # a copy: Gymnasium takes the mask out
        mask = check_reset_mask((options or {}).get("reset_mask"), self.num_envs)
        start = self._clock.plan(seed, options if self._rule.draws else None, mask)
        observations, info = self.env.reset(seed=seed, options=options)  # type: ignore[arg-type]
        self._clock.begin(start)
        self._rule.forget(start.rows[start.anew])
        self._ended[start.rows] = False
        shown, facts = self._show(self._rule.read(observations), info, self._rows, self._marked(start.rows))
        return shown, info | self._laid_out({name: self._take(x, start.rows) for name, x in facts.items()}, start.rows)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Play actions: observations (B, ...), rewards, terminated, truncated (B,), info."""
        self._clock.check_begun()
        observations, rewards, terminated, truncated, info = self.env.step(actions)
        self._clock.steps += 1
        ended = as_numpy(terminated) | as_numpy(truncated)
        if self._mode is AutoresetMode.NEXT_STEP:
            self._clock.follow(np.flatnonzero(self._ended))
            self._ended = ended
        elif self._mode is AutoresetMode.SAME_STEP and ended.any():
            info = self._finish(info, np.flatnonzero(ended))
            self._clock.follow(np.flatnonzero(ended))
        shown, facts = self._show(self._rule.read(observations), info, self._rows, self._marked(self._rows))
        return shown, rewards, terminated, truncated, info | self._laid_out(facts, self._rows)

    def _show(
        self, batch: Any, info: dict[str, Any], rows: np.ndarray, fresh: np.ndarray
    ) -> tuple[Any, transforms.Facts]:
        """Change what the worlds `rows` (R,) show."""
        signal = info.get("signal_mask")
        if signal is not None:
            signal = self._take(signal, rows)
        return self._rule.show(batch, signal, self._clock.moment(rows, fresh))

    def _finish(self, info: dict[str, Any], rows: np.ndarray) -> dict[str, Any]:
        """Return `info` with what the worlds `rows` (R,), whose episodes ended, showed last."""
        final, final_info = info["final_obs"], info.get("final_info", {})
        in_objects = getattr(final, "dtype", None) == np.object_
        batch = self._rule.batch([final[i] for i in rows]) if in_objects else self._take(self._rule.read(final), rows)
        shown, facts = self._show(batch, final_info, rows, np.ones(len(rows), np.bool_))
        if in_objects:
            final = np.full(self.num_envs, None, dtype=object)
            for i, row in enumerate(rows):
                final[row] = transforms.one(shown, i)
        elif isinstance(shown, dict):
            final = {name: self._spread(part, rows) for name, part in shown.items()}
        else:
            final = self._spread(shown, rows)
        return info | {"final_obs": final, "final_info": final_info | self._laid_out(facts, rows)}

    def _laid_out(self, facts: transforms.Facts, rows: np.ndarray) -> dict[str, Array]:
        """Lay out facts (R, ...) of the worlds `rows` as Gymnasium does: (B, ...), and a mask (B,) of each."""
        info = {}
        for name, fact in facts.items():
            info[name] = self._spread(fact, rows)
            info[f"_{name}"] = transforms.moved(self._marked(rows), fact)
        return info

    def _marked(self, rows: np.ndarray) -> np.ndarray:
        """Return a mask, bool (B,), that is true for `rows` (R,)."""
        mask = np.zeros(self.num_envs, np.bool_)
        mask[rows] = True
        return mask

    def _spread(self, part: Array, rows: np.ndarray) -> Array:
        """Return an array (B, ...) of zeros in which `rows` hold `part` (R, ...)."""
        if len(rows) == self.num_envs:
            return part
        whole = namespace(part).zeros((self.num_envs, *part.shape[1:]), dtype=part.dtype, device=part.device)
        whole[transforms.moved(rows, part)] = part
        return whole

    def _take(self, whole: Array, rows: np.ndarray) -> Array:
        """Return the `rows` (R,) of an array (B, ...)."""
        return whole if len(rows) == self.num_envs else whole[transforms.moved(rows, whole)]


class TokenizeObservation(VectorTokenWrapper):
    """Turns flat observations into tokens (B, 1 + F, 2); see `noisy_envs.wrappers.TokenizeObservation`."""

    def __init__(self, env: VectorEnv[Any, Any, Any], squash: bool = False) -> None:
        """Wrap vector environments of NumPy arrays."""
        RecordConstructorArgs.__init__(self, squash=plain(squash))
        super().__init__(env, transforms.Tokenize(world_space_of(env), squash))


class AddNoiseTokens(VectorTokenWrapper):
    """Adds tokens that say nothing: (B, N + M, D) for (B, N, D); see `noisy_envs.wrappers.AddNoiseTokens`."""

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        num_noise: Count,
        distribution: str = "gaussian",
        scale: float = 1.0,
        frozen: bool = False,
        shuffle: bool = True,
    ) -> None:
        """Wrap vector environments of tokens."""
        space, spec = world_space_of(env), spec_of(env)
        rule = transforms.AddNoise(space, spec, env.num_envs, num_noise, distribution, scale, frozen, shuffle)
        RecordConstructorArgs.__init__(self, **rule.options)
        super().__init__(env, rule)


class ShuffleTokens(VectorTokenWrapper):
    """Gives all tokens (B, N, D) but the query random places in each step, in each world its own."""

    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        """Wrap vector environments of tokens."""
        RecordConstructorArgs.__init__(self)
        super().__init__(env, transforms.Shuffle(world_space_of(env), spec_of(env)))


class TokensAndMask(VectorTokenWrapper):
    """Shows dictionaries: `tokens` (B, N, D) float32, and `mask` bool (B, N), False for padding."""

    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        """Wrap vector environments of tokens."""
        RecordConstructorArgs.__init__(self)
        super().__init__(env, transforms.Mask(world_space_of(env), spec_of(env)))


class FlattenTokens(VectorTokenWrapper):
    """Shows the tokens (B, N, D) as vectors (B, N · D), row after row; `token_spec` still describes the rows."""

    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        """Wrap vector environments of tokens."""
        RecordConstructorArgs.__init__(self)
        super().__init__(env, transforms.Flatten(world_space_of(env), spec_of(env)))


class RecordEpisodeStatistics(VectorWrapper, RecordConstructorArgs):
    """Tells in `info` what each episode gave that ended, as Gymnasium's wrapper of this name, also on tensors.

    `info["episode"]` has `r`, the sum of rewards (B,), or of several learners (B, n), and `l`, steps, and `t`, seconds,
    (B,) each; 0 where no episode ended, as the mask `info["_episode"]` (B,) says. They are in the library and on the
    device of the rewards, for which each step waits.

    Args:
        env: vector environments of NumPy arrays or tensors, in any auto-reset mode.
        buffer_length: how many of the last episodes the queues hold.
        stats_key: a word for `info`, if not "episode".

    Attributes:
        episode_count: episodes that ended so far.
        return_queue: what the last ones returned, numbers or arrays (n,).
        length_queue: their steps.
        time_queue: their seconds.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any], buffer_length: int = 100, stats_key: str = "episode") -> None:
        """Wrap vector environments."""
        buffer_length = plain(buffer_length)
        check_count("buffer_length", buffer_length, minimum=0, may_be_range=False)
        RecordConstructorArgs.__init__(self, buffer_length=buffer_length, stats_key=stats_key)
        world_space_of(env)
        super().__init__(env)
        self._key, self._mode = stats_key, autoreset_mode_of(env)
        self.episode_count = 0
        self.return_queue, self.length_queue, self.time_queue = (deque[Any](maxlen=buffer_length) for _ in range(3))
        self._returns = np.zeros(env.num_envs)  # (B,), or once rewards are seen (B, n)
        self._lengths, self._starts = np.zeros(env.num_envs, np.int64), np.zeros(env.num_envs)
        self._ended = np.zeros(env.num_envs, np.bool_)  # whether the next step resets a world

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start the next episodes, of all worlds or of `options["reset_mask"]`."""
        options = None if options is None else check_options(options)  # a copy: Gymnasium takes the mask out
        mask = check_reset_mask((options or {}).get("reset_mask"), self.num_envs)
        result = self.env.reset(seed=seed, options=options)  # type: ignore[arg-type]
        self._begin(np.ones(self.num_envs, np.bool_) if mask is None else mask)
        return result

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Play actions: what the environments give, with the statistics in info."""
        observations, rewards, terminated, truncated, info = self.env.step(actions)
        reward, ended = as_numpy(rewards), as_numpy(terminated) | as_numpy(truncated)
        if self._returns.shape != reward.shape:
            self._returns = np.zeros(reward.shape)
        idle = self._ended.copy()
        self._begin(idle)  # this step reset them, and plays nothing there
        self._returns[~idle] += reward[~idle]
        self._lengths += ~idle
        self._ended = ended
        if ended.any():
            if self._key in info:
                raise ValueError(f"stats_key={self._key!r}: must be no key that info has already")
            info = info | self._record(ended, rewards)
        if self._mode is AutoresetMode.SAME_STEP:
            self._begin(ended)
        return observations, rewards, terminated, truncated, info

    def _begin(self, mask: np.ndarray) -> None:
        """Count the episodes of the worlds `mask`, bool (B,), from 0."""
        self._returns[mask], self._lengths[mask], self._starts[mask] = 0.0, 0, time.perf_counter()
        self._ended = self._ended & ~mask

    def _record(self, ended: np.ndarray, like: Array) -> dict[str, Any]:
        """Return what `info` tells of the worlds `ended`, bool (B,), in the library of `like`, and queue it."""
        real = np.float64 if isinstance(like, np.ndarray) else np.float32  # as our vector environments have it
        spent = np.round(time.perf_counter() - self._starts, 6)
        self.episode_count += int(ended.sum())
        told = {}
        for name, values, queue, dtype in (
            ("r", self._returns, self.return_queue, real),
            ("l", self._lengths, self.length_queue, np.int64),
            ("t", spent, self.time_queue, real),
        ):
            queue.extend(values[ended])
            shown = np.zeros(values.shape, dtype)
            shown[ended] = values[ended]
            told[name] = transforms.moved(shown, like)
        return {self._key: told, f"_{self._key}": transforms.moved(ended.copy(), like)}
