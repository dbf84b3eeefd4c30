"""Noise on actions and rewards; `disturb_vector` has the wrappers of vector environments.

Seed, episode number and step determine all random numbers, as in `noisy_envs.wrappers`. Shapes: `B` environments.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.utils import RecordConstructorArgs

from noisy_envs.arrays import Array, namespace
from noisy_envs.validation import check_number, plain, unexpected
from noisy_envs.wrappers.episode_clock import EpisodeClock, Moment
from noisy_envs.wrappers.introspection import num_random_layers, space_of
from noisy_envs.wrappers.transforms import box_muller, convert_like, draw_uniforms

ROW = np.zeros(1, np.int64)  # a single environment is row 0 of a batch of one
NEW = np.ones(1, np.bool_)


def check_probability(name: str, value: Any) -> None:
    """Raise unless `value` is a number from 0 to 1."""
    check_number(name, value, minimum=0)
    if value > 1:
        raise unexpected(name, value, "at most 1")


class ActionNoise:
    """Changes batches of actions: those of a Box by Gaussian noise, those of a Discrete space by random ones."""

    def __init__(self, space: spaces.Space[Any], scale: float, probability: float) -> None:
        """Prepare for actions of `space`.

        Raises:
            ValueError: it is another kind of space, or an option does not fit it.
        """
        scale, probability = plain(scale), plain(probability)
        check_number("scale", scale, minimum=0)
        check_probability("probability", probability)
        self.options: dict[str, Any] = {"scale": scale, "probability": probability}
        self.is_box = isinstance(space, spaces.Box) and space.dtype.kind == "f"
        if isinstance(space, spaces.Box) and self.is_box:
            if probability:
                raise unexpected("probability", probability, f"0 for {space}, whose noise is Gaussian: set scale")
            self.low, self.high, self.count = space.low, space.high, space.low.size
        elif isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
            if scale:
                raise unexpected("scale", scale, f"0 for {space}, whose noise is a random action: set probability")
            self.start = np.asarray(space.start)
            self.size = np.asarray(space.n if isinstance(space, spaces.Discrete) else space.nvec)
            self.count = self.size.size
        else:
            hint = "gymnasium.wrappers.TransformAction converts others"
            raise ValueError(f"{space}: expected Discrete, MultiDiscrete or a Box of floats; {hint}")
        self.scale, self.probability = scale, probability

    def apply(self, actions: Array, moment: Moment) -> Array:
        """Return disturbed actions (B, ...)."""
        if not (self.scale or self.probability):
            return actions
        xp = namespace(actions)
        u, u_second = draw_uniforms(moment, (self.count, self.count), actions)
        if self.is_box:
            noise = xp.reshape(self.scale * box_muller(u, u_second), actions.shape)
            low, high = (convert_like(bound, actions) for bound in (self.low, self.high))
            return xp.astype(xp.clip(actions + noise, low, high), actions.dtype)
        start, size = (xp.reshape(convert_like(x, actions), (1, -1)) for x in (self.start, self.size))
        random = xp.reshape(xp.astype(start + xp.floor(u_second * size), actions.dtype), actions.shape)
        return xp.where(xp.reshape(u < self.probability, actions.shape), random, actions)


class RewardNoise:
    """Changes batches of rewards: drops some, and adds Gaussian noise."""

    def __init__(self, scale: float, drop_probability: float) -> None:
        """Check the options."""
        scale, drop_probability = plain(scale), plain(drop_probability)
        check_number("scale", scale, minimum=0)
        check_probability("drop_probability", drop_probability)
        self.options: dict[str, Any] = {"scale": scale, "drop_probability": drop_probability}
        self.scale, self.drop_probability = scale, drop_probability

    def apply(self, rewards: Array, moment: Moment) -> Array:
        """Return disturbed rewards (B,), or (B, n) of n agents."""
        xp = namespace(rewards)
        count = int(np.prod(rewards.shape[1:]))
        u, u_first, u_second = (xp.reshape(x, rewards.shape) for x in draw_uniforms(moment, (count,) * 3, rewards))
        kept = xp.where(u < self.drop_probability, xp.zeros_like(rewards), rewards)
        return kept + xp.astype(self.scale * box_muller(u_first, u_second), rewards.dtype)


class Disturbed(gymnasium.Wrapper[Any, Any, Any, Any], RecordConstructorArgs):
    """Knows seed, episode number and step of an environment."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        """Wrap an environment."""
        space_of(env)
        super().__init__(env)
        self._clock = EpisodeClock(1, num_random_layers(env), is_random=True)
        self._ended = False  # then the next step starts an episode, as that of an Autoreset below does

    @property
    def num_random_layers(self) -> int:
        """Number of layers that draw random numbers, this one included."""
        return self._clock.depth + 1

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start the next episode, or the first one of `seed`; return observation and info."""
        start = self._clock.plan_reset([seed], options)
        result = self.env.reset(seed=seed, options=options)
        self._clock.start(start)
        self._ended = False
        return result

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Play an action; return observation, reward, terminated, truncated and info."""
        self._clock.check_started()
        self._clock.steps += 1
        moment = self._clock.moment(ROW, NEW)
        observation, reward, terminated, truncated, info = self.env.step(self._action(action, moment))
        if self._ended:  # this step reset the environment instead of playing an action
            self._clock.start_next(ROW)
        else:
            reward, info = self._reward(reward, info, moment)
        self._ended = bool(terminated or truncated)
        return observation, reward, terminated, truncated, info

    def _action(self, action: Any, moment: Moment) -> Any:
        return action

    def _reward(self, reward: Any, info: dict[str, Any], moment: Moment) -> tuple[Any, dict[str, Any]]:
        return reward, info


class NoisyActions(Disturbed):
    """Plays another action than the agent's: with Gaussian noise (Box), or sometimes a random one (Discrete).

    The environment itself changes, so an agent is evaluated with this wrapper.

    Args:
        env: an environment whose actions are a `Box` of floats, `Discrete` or `MultiDiscrete`.
        scale: standard deviation of the noise of each number of a Box, in its units; the sum is clipped to the bounds.
        probability: of a uniformly random action instead of the agent's, for each number of a `MultiDiscrete`.

    Raises:
        ValueError: the actions are of another kind, or the option is that of the other kind.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], scale: float = 0.0, probability: float = 0.0) -> None:
        """Wrap an environment; see the class."""
        super().__init__(env)
        self._noise = ActionNoise(env.action_space, scale, probability)
        RecordConstructorArgs.__init__(self, **self._noise.options)

    def _action(self, action: Any, moment: Moment) -> Any:
        action = np.asarray(action, self.action_space.dtype)
        disturbed = self._noise.apply(action[None], moment)[0]
        # NumPy returns a number instead of an array without axes
        return action.dtype.type(disturbed) if isinstance(self.action_space, spaces.Discrete) else np.asarray(disturbed)


class NoisyRewards(Disturbed):
    """Returns rewards with noise; `info["true_reward"]` has the reward itself.

    The noise is for training. An agent is evaluated by the true rewards, as the training scripts do.

    Args:
        env: an environment.
        scale: standard deviation of the Gaussian noise that is added, in units of the reward.
        drop_probability: probability that a reward is 0, before noise is added.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], scale: float = 0.0, drop_probability: float = 0.0) -> None:
        """Wrap an environment; see the class."""
        super().__init__(env)
        self._noise = RewardNoise(scale, drop_probability)
        RecordConstructorArgs.__init__(self, **self._noise.options)

    def _reward(self, reward: Any, info: dict[str, Any], moment: Moment) -> tuple[Any, dict[str, Any]]:
        noisy = self._noise.apply(np.asarray([reward], np.float64), moment)
        return float(noisy[0]), {"true_reward": reward} | info  # that of a layer below is the true one
