"""Any environment of Gymnasium as worlds of tokens, with noise: behind what the agents use of our own.

`noisy_envs.wrappers` does the work; here NumPy becomes torch, actions get the range that the environment has, and the
last observations of episodes come beside the first of the next. The worlds themselves cannot be saved or compiled.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.spaces import Box, Discrete, flatten_space
from gymnasium.utils import RecordConstructorArgs
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from noisy_envs import registration
from noisy_envs.baselines import BaselineReturns
from noisy_envs.interfaces.functional import StepResult
from noisy_envs.interfaces.vector_env import TokenVectorEnv
from noisy_envs.tokens import TokenSpec
from noisy_envs.validation import check_count
from noisy_envs.wrappers import noisy_tokens, spec_of

if TYPE_CHECKING:
    from torch import Tensor

NOISE_OPTIONS = tuple(inspect.signature(noisy_tokens).parameters)[1:]  # of the wrappers; all others are the game's
EPISODES = 100  # of random play, for the reference
LONGEST = 10_000  # steps of an episode, where neither the id nor an option limits them: some policies never end one
SEED = 2**31 - 1 - EPISODES  # of random play: far from those of runs; old environments take no larger ones
EXACT = 2.0**53  # below which float64 holds each integer


class Unfit(ValueError):
    """An environment gives in a step what no agent can learn from."""


class Plain(gymnasium.Wrapper[Any, Any, Any, Any], RecordConstructorArgs):
    """Gives copies of observations, which the environment may overwrite, and rewards and ends as plain numbers."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        """Wrap an environment."""
        RecordConstructorArgs.__init__(self)
        super().__init__(env)
        self._takes_arrays = isinstance(env.action_space, Box)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode: an observation, info."""
        observation, info = self.env.reset(seed=seed, options=options)
        return self._copied(observation), info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Play an action: an observation, reward, terminated, truncated, info.

        Raises:
            Unfit: a reward or an end is not one number.
        """
        if self._takes_arrays:  # of a batch of Boxes without an axis come scalars
            action = np.asarray(action)
        observation, reward, terminated, truncated, info = self.env.step(action)
        if not (isinstance(reward, float) and isinstance(terminated, bool) and isinstance(truncated, bool)):
            reward = self._one("reward", reward, float)
            terminated, truncated = self._one("terminated", terminated, bool), self._one("truncated", truncated, bool)
        return self._copied(observation), reward, terminated, truncated, info

    def _copied(self, observation: Any) -> Any:
        return observation.copy() if isinstance(observation, np.ndarray) else deepcopy(observation)  # which is slower

    def _one(self, name: str, value: Any, kind: type) -> Any:
        try:
            return kind(float(np.asarray(value).item()))
        except (TypeError, ValueError, RuntimeError):  # the last of a tensor with a gradient
            env: Any = self.unwrapped
            told = registration.one_line(f"{env.spec.id}: step gave {name}={value!r}: must be one {kind.__name__}")
            raise Unfit(told) from None


@dataclass(frozen=True)
class GymnasiumGame:
    """An id of Gymnasium with options, checked: those of `noisy_tokens`, and those of the environment itself.

    Raises:
        ValueError: the id is not registered, an option does not fit, or observations or actions are of no kind that
            the agents can learn from.
    """

    env_id: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check by making one."""
        registration.canonical_id(self.env_id)
        told = registration.one_line(f"{self.env_id}: its actions, {self.action_space}")
        if not isinstance(self.action_space, (Box, Discrete)):
            raise ValueError(f"{told}, must be Discrete or a Box; gymnasium.wrappers.TransformAction can make them so")
        if 0 in (self.action_space.shape or ()):
            raise ValueError(f"{told}, must hold a number at least")

    @cached_property
    def _one(self) -> gymnasium.Env[Any, Any]:
        """An environment, to be asked and not played."""
        return self.make()

    @property
    def token_spec(self) -> TokenSpec:
        """What an observation means."""
        return spec_of(self._one)

    @property
    def action_space(self) -> Any:
        """What the environment takes."""
        return self._one.action_space

    @property
    def num_noise(self) -> Any:
        """How many tokens of noise there are, a number or a range."""
        return self.options.get("num_noise", 0)

    @property
    def spec(self) -> EnvSpec:
        """How Gymnasium knows it."""
        return gymnasium.spec(self.env_id.rpartition(":")[2])

    @property
    def native(self) -> bool:
        """Whether its rules play many worlds at once: a game of your own with this package's vector environment."""
        ours = self.spec.vector_entry_point in (registration.VECTOR, TokenVectorEnv)
        return ours and not self.spec.additional_wrappers  # which wrap single environments

    @property
    def draws(self) -> bool:
        """Whether it can be drawn."""
        return "rgb_array" in self._one.metadata.get("render_modes", ())

    def make(self, render_mode: str | None = None) -> gymnasium.Env[Any, Any]:
        """Make a single environment."""
        try:
            noise, own = self._divided()
            if render_mode is not None:  # one that can not be drawn need not know the word
                own["render_mode"] = render_mode
            return noisy_tokens(Plain(gymnasium.make(self.env_id, **own)), **noise)
        except (gymnasium.error.Error, ImportError, TypeError) as error:
            raise ValueError(f"env_id={self.env_id!r}: {registration.one_line(error)}") from None
        except (LookupError, AttributeError, AssertionError, RuntimeError, ArithmeticError) as error:  # of the author
            told = registration.one_line(f"{type(error).__name__}: {error}")
            raise ValueError(f"env_id={self.env_id!r}: {told}") from error

    def make_vec(self, num_envs: int) -> VectorEnv[Any, Any, Any]:
        """Make environments that play at once where the game is `native`, and in turn elsewhere."""
        noise, own = self._divided()
        kind: dict[str, Any] = {"autoreset_mode": AutoresetMode.SAME_STEP}
        if not self.native:  # tokens are made of what is shown, which need not be copied once more
            kind = {"vectorization_mode": "sync", "vector_kwargs": kind | {"copy": False}, "wrappers": (Plain,)}
        return noisy_tokens(gymnasium.make_vec(self.env_id, num_envs, **kind, **own), **noise)

    def _divided(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the options of the noise, and those of the game, by which its episodes end."""
        noise = {name: value for name, value in self.options.items() if name in NOISE_OPTIONS}
        own = {name: value for name, value in self.options.items() if name not in noise}
        limit = own.pop("max_episode_steps", None)
        limit = self.spec.max_episode_steps if limit is None else limit
        if limit is None or limit == -1:  # which Gymnasium takes for no limit
            limit = None if self.native else LONGEST  # a native one has its own
        if limit is not None:
            check_count("max_episode_steps", limit, minimum=1, may_be_range=False)
            own["max_episode_steps"] = limit
        return {"num_noise": 0} | noise, own

    @cached_property
    def references(self) -> BaselineReturns:
        """Mean returns of random play, and of what the environment's author calls solved; NaN where that is unknown."""
        if self.spec.reward_threshold is None:
            return BaselineReturns(math.nan, math.nan)
        envs = self.make_vec(EPISODES)
        envs.reset(seed=SEED)
        envs.action_space.seed(SEED)
        total, running = np.zeros(EPISODES), np.ones(EPISODES, np.bool_)
        while running.any():
            _, reward, terminated, truncated, _ = envs.step(envs.action_space.sample())
            total += reward * running
            running &= ~(terminated | truncated)
        envs.close()
        return BaselineReturns(float(total.mean()), float(self.spec.reward_threshold))


class ForeignVectorEnv:
    """`B` worlds of a game, with the part of `TokenVectorEnv`'s interface that the agents use.

    Of a Box the agents see one axis, whatever its shape; `Range` tells what becomes of their actions.
    """

    def __init__(self, game: GymnasiumGame, num_envs: int, device: str = "cpu") -> None:
        """Make the worlds, which live on the CPU; what is seen of them goes to `device`."""
        import torch

        self.num_envs, self.device = num_envs, device
        self._envs = game.make_vec(num_envs)
        self.token_spec = game.token_spec
        takes = self._envs.single_action_space
        self._to_range = Range(takes)
        self.single_action_space = flatten_space(takes) if isinstance(takes, Box) else takes
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.batch_state = torch.zeros((), dtype=torch.int64)  # steps played: all that there is to hand on

    def reset(self, *, seed: int) -> tuple[Tensor, dict[str, Any]]:
        """Start the first episodes of `seed`, world i of seed + i: tokens (B, N, D), info."""
        tokens, info = self._envs.reset(seed=seed % 2**31)
        return self._tensor(tokens), info

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Play actions: tokens (B, N, D), reward, terminated, truncated (B,), info; worlds that end begin anew."""
        tokens, reward, terminated, truncated, info = self._envs.step(self._read(actions))
        found = (self._tensor(x) for x in (tokens, reward.astype(np.float32), terminated, truncated))
        return *found, info  # type: ignore[return-value]

    def pure_step(self, worlds: Tensor, actions: Tensor) -> tuple[Tensor, StepResult]:
        """Play as `noisy_envs.interfaces.functional.pure_step` does, but change the worlds in place."""
        tokens, reward, terminated, truncated, info = self.step(actions)
        final_tokens, rows = tokens, info.get("_final_obs")
        if rows is not None and rows.any():
            final_tokens = tokens.clone()
            final_tokens[self._tensor(rows)] = self._tensor(np.stack(list(info["final_obs"][rows])))
        return worlds + 1, StepResult(tokens, final_tokens, reward, terminated, truncated)

    def close(self) -> None:
        """Release what the environments hold."""
        self._envs.close()

    def _tensor(self, array: np.ndarray) -> Tensor:
        import torch

        return torch.as_tensor(array).to(self.device, copy=True)  # Gymnasium may overwrite its own

    def _read(self, actions: Tensor) -> np.ndarray:
        return self._to_range(actions.detach().cpu().numpy())


class Range:
    """Maps what an agent chooses to what a space takes: integers from 0, or numbers (..., A) of a Box of A numbers.

    A number between two bounds is scaled: −1 becomes the lower, 1 the upper bound. Any other is added to 0, or to the
    value next to 0 that is allowed. What lies beyond a bound becomes the bound. Integers between two bounds have equal
    parts of the range from −1 to 1; other integers are rounded.
    """

    def __init__(self, space: Any) -> None:
        """Prepare for the actions of `space`, Discrete or a Box."""
        self._space = space
        if isinstance(space, Discrete):
            return
        low, high = space.low.astype(np.float64), space.high.astype(np.float64)
        self._whole = space.dtype.kind != "f"
        if self._whole:  # the nearest float of a large one may be outside
            low, high = (np.where(abs(x) < EXACT, x, np.nextafter(x, 0)) for x in (low, high))
        two = space.bounded_below & space.bounded_above
        with np.errstate(invalid="ignore"):  # ∞ − ∞, where there are no two bounds
            self._middle = np.where(two, low / 2 + high / 2, np.clip(0, low, high)) + self._whole / 2
            self._reach = np.where(two, high / 2 - low / 2 + self._whole / 2, 1)
        self._low, self._high = low, high

    def __call__(self, actions: np.ndarray) -> np.ndarray:
        """Return actions (...) of a Discrete space, or (..., *shape) of a Box."""
        space = self._space
        if isinstance(space, Discrete):
            return (actions + space.start).astype(space.dtype)
        found = self._middle + self._reach * actions.reshape((*actions.shape[:-1], *space.shape))
        if self._whole:
            found = np.floor(found)
        return np.asarray(found.clip(self._low, self._high), space.dtype)

    def inverse(self, action: Any) -> np.ndarray:
        """Return what becomes an action of the space: an integer from 0, or numbers (A,)."""
        if isinstance(self._space, Discrete):
            return np.asarray(action - self._space.start)
        centred = np.asarray(action, np.float64) + self._whole / 2 - self._middle
        return (centred / np.where(self._reach, self._reach, 1)).ravel()
