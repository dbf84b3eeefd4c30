"""The wrappers of `noisy_envs.wrappers` for vector environments: world i seeded s is the single one seeded s + i.

They work in each auto-reset mode, on NumPy arrays, and all but `TokenizeObservation` on the tensors of our own
environments too, where each step waits for the device. `final_obs` and `final_info` are changed like the rest, and laid
out as they come: in Gymnasium's manner, or densely on torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.utils import RecordConstructorArgs
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space

from noisy_envs.arrays import Array, as_numpy, namespace
from noisy_envs.options import Count
from noisy_envs.shells.common import check_options, check_reset_mask, listed
from noisy_envs.tokens import TokenSpec
from noisy_envs.wrappers import tokens
from noisy_envs.wrappers.clock import Clock
from noisy_envs.wrappers.stack import num_draws, trusted_spec, world_space_of

__all__ = ["AddNoiseTokens", "FlattenTokens", "ShuffleTokens", "TokenizeObservation", "TokensAndMask"]


class VectorTokenWrapper(VectorWrapper, RecordConstructorArgs):
    """Shows observations and info of B worlds as a rule of `noisy_envs.wrappers.tokens` changes them.

    It is no `VectorObservationWrapper`: that refuses SAME_STEP, and leaves `info` as it is. Its base has no type
    parameters, since those of Gymnasium 1.2 take none.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any], rule: tokens.Rule) -> None:
        """Wrap vector environments."""
        super().__init__(env)
        self._mode = env.metadata.get("autoreset_mode")
        if not isinstance(self._mode, AutoresetMode):
            raise ValueError(f"{env}: metadata['autoreset_mode']={self._mode!r}: must be an AutoresetMode")
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
        seed = listed(seed)
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

    def _show(self, batch: Any, info: dict[str, Any], rows: np.ndarray, fresh: np.ndarray) -> tuple[Any, tokens.Facts]:
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
                final[row] = tokens.one(shown, i)
        elif isinstance(shown, dict):
            final = {name: self._spread(part, rows) for name, part in shown.items()}
        else:
            final = self._spread(shown, rows)
        return info | {"final_obs": final, "final_info": final_info | self._laid_out(facts, rows)}

    def _laid_out(self, facts: tokens.Facts, rows: np.ndarray) -> dict[str, Array]:
        """Lay out facts (R, ...) of the worlds `rows` as Gymnasium does: (B, ...), and a mask (B,) of each."""
        info = {}
        for name, fact in facts.items():
            info[name] = self._spread(fact, rows)
            info[f"_{name}"] = tokens.moved(self._marked(rows), fact)
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
        whole[tokens.moved(rows, part)] = part
        return whole

    def _take(self, whole: Array, rows: np.ndarray) -> Array:
        """Return the `rows` (R,) of an array (B, ...)."""
        return whole if len(rows) == self.num_envs else whole[tokens.moved(rows, whole)]


class TokenizeObservation(VectorTokenWrapper):
    """Turns flat observations into tokens (B, 1 + F, 2); see `noisy_envs.wrappers.TokenizeObservation`."""

    def __init__(self, env: VectorEnv[Any, Any, Any], squash: bool = False) -> None:
        """Wrap vector environments of NumPy arrays."""
        RecordConstructorArgs.__init__(self, squash=squash)
        super().__init__(env, tokens.Tokenize(world_space_of(env), squash))


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
        RecordConstructorArgs.__init__(
            self, num_noise=num_noise, distribution=distribution, scale=scale, frozen=frozen, shuffle=shuffle
        )
        space, spec = world_space_of(env), trusted_spec(env)
        rule = tokens.AddNoise(space, spec, env.num_envs, num_noise, distribution, scale, frozen, shuffle)
        super().__init__(env, rule)


class ShuffleTokens(VectorTokenWrapper):
    """Gives all tokens (B, N, D) but the query random places in each step, in each world its own."""

    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        """Wrap vector environments of tokens."""
        RecordConstructorArgs.__init__(self)
        super().__init__(env, tokens.Shuffle(world_space_of(env), trusted_spec(env)))


class TokensAndMask(VectorTokenWrapper):
    """Shows dictionaries: `tokens` (B, N, D) float32, and `mask` bool (B, N), False for padding."""

    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        """Wrap vector environments of tokens."""
        RecordConstructorArgs.__init__(self)
        super().__init__(env, tokens.Mask(world_space_of(env), trusted_spec(env)))


class FlattenTokens(VectorTokenWrapper):
    """Shows the tokens (B, N, D) as vectors (B, N · D), row after row; `token_spec` still describes the rows."""

    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        """Wrap vector environments of tokens."""
        RecordConstructorArgs.__init__(self)
        super().__init__(env, tokens.Flatten(world_space_of(env), trusted_spec(env)))
