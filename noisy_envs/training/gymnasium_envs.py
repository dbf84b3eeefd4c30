"""Gives any Gymnasium environment tokens, noise, and the vector interface that the agents use.

`noisy_envs.wrappers` makes the tokens. Here arrays become tensors, and actions are mapped to the range of the
environment. The state of these environments can be neither saved nor compiled.
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

NOISE_OPTIONS = tuple(inspect.signature(noisy_tokens).parameters)[1:]  # all other options are the environment's
RANDOM_EPISODES = 100  # that estimate the return of the random policy
RANDOM_SEED = 2**31 - 1 - RANDOM_EPISODES  # far from the seeds of runs; old environments take none that is larger
MAX_EPISODE_STEPS = 10_000  # without a limit of the ID or an option: some policies never end an episode
MAX_EXACT_INTEGER = 2.0**53  # up to which float64 holds every integer


class InvalidStep(ValueError):
    """An environment returned a reward or an end of an episode that is no number."""


class PlainSteps(gymnasium.Wrapper[Any, Any, Any, Any], RecordConstructorArgs):
    """Returns copies of observations, which the environment may overwrite, and rewards and ends as plain numbers."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        """Wrap an environment."""
        RecordConstructorArgs.__init__(self)
        super().__init__(env)
        self._takes_arrays = isinstance(env.action_space, Box)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode; return an observation and info."""
        observation, info = self.env.reset(seed=seed, options=options)
        return self._copy(observation), info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Play an action; return observation, reward, terminated, truncated and info.

        Raises:
            InvalidStep: reward, terminated or truncated is not one number.
        """
        if self._takes_arrays:  # Gymnasium splits a batch of Boxes without an axis into scalars
            action = np.asarray(action)
        observation, reward, terminated, truncated, info = self.env.step(action)
        if not (isinstance(reward, float) and isinstance(terminated, bool) and isinstance(truncated, bool)):
            reward = self._number("reward", reward, float)
            terminated, truncated = (
                self._number("terminated", terminated, bool),
                self._number("truncated", truncated, bool),
            )
        return self._copy(observation), reward, terminated, truncated, info

    def _copy(self, observation: Any) -> Any:
        return observation.copy() if isinstance(observation, np.ndarray) else deepcopy(observation)  # slower

    def _number(self, name: str, value: Any, kind: type) -> Any:
        try:
            return kind(float(np.asarray(value).item()))
        except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor with a gradient
            env: Any = self.unwrapped
            message = f"{env.spec.id}: step returned {name}={value!r}: expected one {kind.__name__}"
            raise InvalidStep(registration.one_line(message)) from None


def true_rewards(rewards: np.ndarray, info: dict[str, Any]) -> np.ndarray:
    """Return rewards (B,) without the noise of `NoisyRewards`; where an episode ended, the info is of its end."""
    for part in (info, info.get("final_info", {})):
        if "true_reward" in part:
            rewards = np.where(part["_true_reward"], part["true_reward"], rewards)
    return rewards


@dataclass(frozen=True)
class GymnasiumGame:
    """A Gymnasium environment ID with valid options: those of `noisy_tokens`, and those of the environment.

    Raises:
        ValueError: the ID is not registered, an option is not allowed, or the agents do not support its
            observations or actions.
    """

    env_id: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check by making one environment."""
        registration.canonical_id(self.env_id)
        space = registration.one_line(f"{self.env_id}: action_space={self.action_space}")
        if not isinstance(self.action_space, (Box, Discrete)):
            raise ValueError(f"{space}: expected Discrete or Box; gymnasium.wrappers.TransformAction converts others")
        if 0 in (self.action_space.shape or ()):
            raise ValueError(f"{space}: expected at least one number")

    @cached_property
    def _example(self) -> gymnasium.Env[Any, Any]:
        """An environment that is never played."""
        return self.make()

    @property
    def token_spec(self) -> TokenSpec:
        """Meaning of an observation."""
        return spec_of(self._example)

    @property
    def action_space(self) -> Any:
        """Action space of the environment."""
        return self._example.action_space

    @property
    def num_noise(self) -> Any:
        """Number of noise tokens, or its range."""
        return self.options.get("num_noise", 0)

    @property
    def spec(self) -> EnvSpec:
        """Gymnasium's specification."""
        return gymnasium.spec(self.env_id.rpartition(":")[2])

    @property
    def native(self) -> bool:
        """Whether it is a game that is registered with this package's vector environment."""
        ours = self.spec.vector_entry_point in (registration.VECTOR, TokenVectorEnv)
        return ours and not self.spec.additional_wrappers  # those wrap single environments

    @property
    def can_render(self) -> bool:
        """Whether it can be drawn as an image."""
        return "rgb_array" in self._example.metadata.get("render_modes", ())

    def make(self, render_mode: str | None = None) -> gymnasium.Env[Any, Any]:
        """Make a single environment."""
        try:
            noise, options = self._split_options()
            if render_mode is not None:  # an environment that cannot be drawn may lack the argument
                options["render_mode"] = render_mode
            return noisy_tokens(PlainSteps(gymnasium.make(self.env_id, **options)), **noise)
        except (gymnasium.error.Error, ImportError, TypeError) as error:
            raise ValueError(f"env_id={self.env_id!r}: {registration.one_line(error)}") from None
        except (LookupError, AttributeError, AssertionError, RuntimeError, ArithmeticError) as error:  # of its code
            reason = registration.one_line(f"{type(error).__name__}: {error}")
            raise ValueError(f"env_id={self.env_id!r}: {reason}") from error

    def make_vec(self, num_envs: int) -> VectorEnv[Any, Any, Any]:
        """Make environments: one vectorised environment if the game is `native`, else one after another."""
        noise, options = self._split_options()
        kind: dict[str, Any] = {"autoreset_mode": AutoresetMode.SAME_STEP}
        if not self.native:  # copy=False: tokens are copies already
            kind = {"vectorization_mode": "sync", "vector_kwargs": kind | {"copy": False}, "wrappers": (PlainSteps,)}
        return noisy_tokens(gymnasium.make_vec(self.env_id, num_envs, **kind, **options), **noise)

    def _split_options(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the options of `noisy_tokens`, and those of the environment with a limit of steps."""
        noise = {name: value for name, value in self.options.items() if name in NOISE_OPTIONS}
        options = {name: value for name, value in self.options.items() if name not in noise}
        limit = options.pop("max_episode_steps", None)
        limit = self.spec.max_episode_steps if limit is None else limit
        if limit is None or limit == -1:  # Gymnasium's sign for no limit
            limit = None if self.native else MAX_EPISODE_STEPS  # a native game has its own
        if limit is not None:
            check_count("max_episode_steps", limit, minimum=1, may_be_range=False)
            options["max_episode_steps"] = limit
        return {"num_noise": 0} | noise, options

    @cached_property
    def baselines(self) -> BaselineReturns:
        """Mean return of the random policy, and the reward threshold; NaN without a threshold."""
        if self.spec.reward_threshold is None:
            return BaselineReturns(math.nan, math.nan)
        envs = self.make_vec(RANDOM_EPISODES)
        envs.reset(seed=RANDOM_SEED)
        envs.action_space.seed(RANDOM_SEED)
        total, running = np.zeros(RANDOM_EPISODES), np.ones(RANDOM_EPISODES, np.bool_)
        while running.any():
            _, reward, terminated, truncated, info = envs.step(envs.action_space.sample())
            total += true_rewards(reward, info) * running
            running &= ~(terminated | truncated)
        envs.close()
        return BaselineReturns(float(total.mean()), float(self.spec.reward_threshold))


class GymnasiumVectorEnv:
    """`B` environments with the part of `TokenVectorEnv`'s interface that the agents use.

    A Box of actions is flattened; `ActionRange` maps the agents' actions to it.
    """

    def __init__(self, game: GymnasiumGame, num_envs: int, device: str = "cpu") -> None:
        """Make the environments on the CPU; observations go to `device`."""
        import torch

        self.num_envs, self.device = num_envs, device
        self._envs = game.make_vec(num_envs)
        self.token_spec = game.token_spec
        space = self._envs.single_action_space
        self._to_range = ActionRange(space)
        self.single_action_space = flatten_space(space) if isinstance(space, Box) else space
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.batch_state = torch.zeros((), dtype=torch.int64)  # number of steps: nothing else can be saved

    def reset(self, *, seed: int) -> tuple[Tensor, dict[str, Any]]:
        """Start the first episodes, environment i with seed + i; return tokens (B, N, D) and info."""
        tokens, info = self._envs.reset(seed=seed % 2**31)
        return self._tensor(tokens), info

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Play actions; return tokens (B, N, D), reward, terminated and truncated (B,), and info.

        An environment whose episode ends is reset in the same step. The info has `true_reward` (B,), without noise, if
        a wrapper disturbs the rewards.
        """
        arrays = self._envs.step(self._to_range(actions.detach().cpu().numpy()))
        tokens, reward, terminated, truncated, info = arrays
        if (true := true_rewards(reward, info)) is not reward:
            info = info | {"true_reward": self._tensor(true.astype(np.float32))}
        tensors = (self._tensor(x) for x in (tokens, reward.astype(np.float32), terminated, truncated))
        return *tensors, info  # type: ignore[return-value]

    def pure_step(self, count: Tensor, actions: Tensor) -> tuple[Tensor, StepResult]:
        """Play as `noisy_envs.interfaces.functional.pure_step` does, but change the environments in place."""
        tokens, reward, terminated, truncated, info = self.step(actions)
        final_tokens, rows = tokens, info.get("_final_obs")
        if rows is not None and rows.any():
            final_tokens = tokens.clone()
            final_tokens[self._tensor(rows)] = self._tensor(np.stack(list(info["final_obs"][rows])))
        return count + 1, StepResult(tokens, final_tokens, reward, terminated, truncated)

    def close(self) -> None:
        """Release what the environments hold."""
        self._envs.close()

    def _tensor(self, array: np.ndarray) -> Tensor:
        import torch

        return torch.as_tensor(array).to(self.device, copy=True)  # Gymnasium may overwrite its arrays


class ActionRange:
    """Maps actions of an agent to those of a space: integers from 0, or numbers (..., A) for a Box of A numbers.

    A component with two bounds is scaled: −1 becomes the lower and 1 the upper bound. To any other component the
    allowed value nearest to 0 is added. Values out of bounds become the bound. Integers with two bounds share the range
    from −1 to 1 in equal parts; other integers are rounded.
    """

    def __init__(self, space: Any) -> None:
        """Take a Discrete space or a Box."""
        self._space = space
        if isinstance(space, Discrete):
            return
        low, high = space.low.astype(np.float64), space.high.astype(np.float64)
        self._whole = space.dtype.kind != "f"
        if self._whole:  # the float nearest to a large bound may be out of bounds
            low, high = (np.where(abs(x) < MAX_EXACT_INTEGER, x, np.nextafter(x, 0)) for x in (low, high))
        two = space.bounded_below & space.bounded_above
        with np.errstate(invalid="ignore"):  # ∞ − ∞ without two bounds
            self._middle = np.where(two, low / 2 + high / 2, np.clip(0, low, high)) + self._whole / 2
            self._reach = np.where(two, high / 2 - low / 2 + self._whole / 2, 1)
        self._low, self._high = low, high

    def __call__(self, actions: np.ndarray) -> np.ndarray:
        """Return actions (...) of a Discrete space, or (..., *shape) of a Box."""
        space = self._space
        if isinstance(space, Discrete):
            return (actions + space.start).astype(space.dtype)
        values = self._middle + self._reach * actions.reshape((*actions.shape[:-1], *space.shape))
        if self._whole:
            values = np.floor(values)
        return np.asarray(values.clip(self._low, self._high), space.dtype)

    def inverse(self, action: Any) -> np.ndarray:
        """Return the agent's action that becomes `action`: an integer from 0, or numbers (A,)."""
        if isinstance(self._space, Discrete):
            return np.asarray(action - self._space.start)
        centred = np.asarray(action, np.float64) + self._whole / 2 - self._middle
        return (centred / np.where(self._reach, self._reach, 1)).ravel()
