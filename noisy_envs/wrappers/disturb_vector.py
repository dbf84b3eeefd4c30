"""The wrappers of `noisy_envs.wrappers.disturb` for vector environments.

Environment i of a vector with seed s equals the single environment with seed s + i, in every autoreset mode, on NumPy
arrays and on the tensors of this package's environments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.utils import RecordConstructorArgs
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper

from noisy_envs.arrays import Array, as_numpy, namespace
from noisy_envs.interfaces.checks import check_options, check_reset_mask, seeds_as_list
from noisy_envs.wrappers.disturb import ActionNoise, RewardNoise
from noisy_envs.wrappers.episode_clock import EpisodeClock, Moment
from noisy_envs.wrappers.introspection import autoreset_mode_of, num_random_layers, single_space_of
from noisy_envs.wrappers.transforms import convert_like


class Disturbed(VectorWrapper, RecordConstructorArgs):
    """Knows seed, episode number and step of each environment."""

    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        """Wrap vector environments."""
        single_space_of(env)
        super().__init__(env)
        self._mode = autoreset_mode_of(env)
        self._clock = EpisodeClock(env.num_envs, num_random_layers(env), is_random=True)
        self._ended = np.zeros(env.num_envs, np.bool_)  # environments that the next step resets
        self._rows = np.arange(env.num_envs)

    @property
    def num_random_layers(self) -> int:
        """Number of layers that draw random numbers, this one included."""
        return self._clock.depth + 1

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start the next episodes, or the first ones of `seed`, in all environments or those of `reset_mask`."""
        seed = seeds_as_list(seed)
        options = None if options is None else check_options(options)  # a copy: Gymnasium removes the mask
        mask = check_reset_mask((options or {}).get("reset_mask"), self.num_envs)
        start = self._clock.plan_reset(seed, options, mask)
        result = self.env.reset(seed=seed, options=options)  # type: ignore[arg-type]
        self._clock.start(start)
        self._ended[start.rows] = False
        return result

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Play actions; return observations (B, ...), rewards, terminated, truncated (B,) and info."""
        self._clock.check_started()
        self._clock.steps += 1
        moment = self._clock.moment(self._rows, ~self._ended)
        observations, rewards, terminated, truncated, info = self.env.step(self._actions(actions, moment))
        rewards, info = self._rewards(rewards, info, moment)
        ended = as_numpy(terminated) | as_numpy(truncated)
        if self._mode is AutoresetMode.NEXT_STEP:
            self._clock.start_next(np.flatnonzero(self._ended))
            self._ended = ended
        elif self._mode is AutoresetMode.SAME_STEP:
            self._clock.start_next(np.flatnonzero(ended))
        return observations, rewards, terminated, truncated, info

    def _actions(self, actions: Any, moment: Moment) -> Any:
        return actions

    def _rewards(self, rewards: Array, info: dict[str, Any], moment: Moment) -> tuple[Array, dict[str, Any]]:
        return rewards, info


class NoisyActions(Disturbed):
    """Plays other actions than the agent's; see `noisy_envs.wrappers.NoisyActions`."""

    def __init__(self, env: VectorEnv[Any, Any, Any], scale: float = 0.0, probability: float = 0.0) -> None:
        """Wrap vector environments."""
        super().__init__(env)
        self._noise = ActionNoise(env.single_action_space, scale, probability)
        RecordConstructorArgs.__init__(self, **self._noise.options)

    def _actions(self, actions: Any, moment: Moment) -> Any:
        actions = actions if hasattr(actions, "detach") else np.asarray(actions, self.action_space.dtype)
        return self._noise.apply(actions, moment)


class NoisyRewards(Disturbed):
    """Returns rewards with noise; `info["true_reward"]` has those without; see `noisy_envs.wrappers.NoisyRewards`."""

    def __init__(self, env: VectorEnv[Any, Any, Any], scale: float = 0.0, drop_probability: float = 0.0) -> None:
        """Wrap vector environments."""
        super().__init__(env)
        self._noise = RewardNoise(scale, drop_probability)
        RecordConstructorArgs.__init__(self, **self._noise.options)

    def _rewards(self, rewards: Array, info: dict[str, Any], moment: Moment) -> tuple[Array, dict[str, Any]]:
        xp = namespace(rewards)
        played = convert_like(moment.is_new, rewards)  # others were reset instead
        noisy = self._noise.apply(rewards, moment)
        mask = xp.reshape(played, (-1,) + (1,) * (rewards.ndim - 1))
        known = {"true_reward": rewards, "_true_reward": played}
        return xp.where(mask, noisy, rewards), known | info  # those of a layer below are the true ones
