"""Any environment of Gymnasium as worlds of tokens, with noise: behind what the agents use of our own.

`noisy_envs.wrappers` does the work; here NumPy becomes torch, actions get the range that the environment has, and the
last observations of episodes come beside the first of the next. The worlds themselves cannot be saved or compiled.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, VectorEnv

from noisy_envs import registry
from noisy_envs.reference import References
from noisy_envs.shells.pure import Outcome
from noisy_envs.shells.vector import TokenVectorEnv
from noisy_envs.tokens import TokenSpec
from noisy_envs.window import unseen
from noisy_envs.wrappers import noisy_tokens, spec_of

if TYPE_CHECKING:
    from torch import Tensor

NOISE_OPTIONS = tuple(inspect.signature(noisy_tokens).parameters)[1:]  # of the wrappers; all others are the game's
EPISODES = 100  # of random play, for the reference
LONGEST = 10_000  # steps of an episode, where neither the id nor an option limits them: some policies never end one
SEED = 2**31 - 1 - EPISODES  # of random play: far from those of runs; old environments take no larger ones


@dataclass(frozen=True)
class Game:
    """An id of Gymnasium with options, checked: those of `noisy_tokens`, and those of the environment itself.

    Raises:
        ValueError: the id is not registered, an option does not fit, or observations or actions are of no kind that
            the agents can learn from.
    """

    env_id: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check by making one."""
        registry.canonical(self.env_id)
        if not isinstance(self.action_space, (Box, Discrete)) or len(self.action_space.shape or ()) > 1:
            raise ValueError(f"{self.env_id}: its actions, {self.action_space}, must be Discrete or a Box of one axis")

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
        ours = self.spec.vector_entry_point in (registry.VECTOR, TokenVectorEnv)
        return ours and not self.spec.additional_wrappers  # which wrap single environments

    @property
    def draws(self) -> bool:
        """Whether it can be drawn."""
        return "rgb_array" in self._one.metadata.get("render_modes", ())

    def make(self, render_mode: str | None = None) -> gymnasium.Env[Any, Any]:
        """Make a single environment."""
        noise, own = self._divided()
        if render_mode is not None:  # one that can not be drawn need not know the word
            own["render_mode"] = render_mode
        try:
            env = gymnasium.make(self.env_id, **own)
            return noisy_tokens(env, **noise)
        except (gymnasium.error.Error, ImportError, TypeError) as error:
            raise ValueError(f"env_id={self.env_id!r}: {error}") from None
        except (LookupError, AttributeError, AssertionError, RuntimeError, ArithmeticError) as error:  # of the author
            raise ValueError(f"env_id={self.env_id!r}: {type(error).__name__}: {error}") from error

    def make_vec(self, num_envs: int) -> VectorEnv[Any, Any, Any]:
        """Make environments that play at once where the game is `native`, and in turn elsewhere."""
        noise, own = self._divided()
        same_step: dict[str, Any] = {"autoreset_mode": AutoresetMode.SAME_STEP}
        if self.native:
            return noisy_tokens(gymnasium.make_vec(self.env_id, num_envs, **same_step, **own), **noise)
        return noisy_tokens(gymnasium.make_vec(self.env_id, num_envs, "sync", vector_kwargs=same_step, **own), **noise)

    def _divided(self) -> tuple[dict[str, Any], dict[str, Any]]:
        noise = {name: value for name, value in self.options.items() if name in NOISE_OPTIONS}
        own = {name: value for name, value in self.options.items() if name not in noise}
        if self.spec.max_episode_steps is None and not self.native:
            own = {"max_episode_steps": LONGEST} | own
        return {"num_noise": 0} | noise, own

    @cached_property
    def references(self) -> References:
        """Mean returns of random play, and of what the environment's author calls solved; NaN where that is unknown."""
        if self.spec.reward_threshold is None:
            return References(math.nan, math.nan)
        envs = self.make_vec(EPISODES)
        envs.reset(seed=SEED)
        envs.action_space.seed(SEED)
        total, running = np.zeros(EPISODES), np.ones(EPISODES, np.bool_)
        while running.any():
            _, reward, terminated, truncated, _ = envs.step(envs.action_space.sample())
            total += reward * running
            running &= ~(terminated | truncated)
        envs.close()
        return References(float(total.mean()), float(self.spec.reward_threshold))


class ForeignVectorEnv:
    """`B` worlds of a game, with the part of `TokenVectorEnv`'s interface that the agents use.

    Actions in a Box with bounds are taken from −1 to 1 and clipped; integers count from 0.
    """

    def __init__(self, game: Game, num_envs: int, device: str = "cpu") -> None:
        """Make the worlds, which live on the CPU; what is seen of them goes to `device`."""
        import torch

        self.num_envs, self.device = num_envs, device
        self._envs = game.make_vec(num_envs)
        self.token_spec = game.token_spec
        self.single_action_space, self.action_space = self._envs.single_action_space, self._envs.action_space
        self.worlds = torch.zeros((), dtype=torch.int64)  # steps played: all that there is to hand on

    def reset(self, *, seed: int) -> tuple[Tensor, dict[str, Any]]:
        """Start the first episodes of `seed`, world i of seed + i: tokens (B, N, D), info."""
        tokens, info = self._envs.reset(seed=seed % 2**31)
        return self._tensor(tokens), info

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Play actions: tokens (B, N, D), reward, terminated, truncated (B,), info; worlds that end begin anew."""
        tokens, reward, terminated, truncated, info = self._envs.step(self._read(actions))
        found = (self._tensor(x) for x in (tokens, reward.astype(np.float32), terminated, truncated))
        return *found, info  # type: ignore[return-value]

    def pure_step(self, worlds: Tensor, actions: Tensor) -> tuple[Tensor, Outcome]:
        """Play as `noisy_envs.shells.pure.pure_step` does, but change the worlds in place."""
        tokens, reward, terminated, truncated, info = self.step(actions)
        final_tokens, rows = tokens, info.get("_final_obs")
        if rows is not None and rows.any():
            final_tokens = tokens.clone()
            final_tokens[self._tensor(rows)] = self._tensor(np.stack(list(info["final_obs"][rows])))
        return worlds + 1, Outcome(tokens, final_tokens, reward, terminated, truncated)

    def close(self) -> None:
        """Release what the environments hold."""
        self._envs.close()

    def _tensor(self, array: np.ndarray) -> Tensor:
        import torch

        return torch.as_tensor(array).to(self.device, copy=True)  # Gymnasium may overwrite its own

    def _read(self, actions: Tensor) -> np.ndarray:
        return to_range(self.single_action_space, actions.detach().cpu().numpy())


def to_range(space: Any, actions: np.ndarray) -> np.ndarray:
    """Map integers from 0, or numbers from −1 to 1, (..., A), to what a space takes."""
    if isinstance(space, Discrete):
        return actions + space.start
    bounded = space.is_bounded("both")
    scaled = space.low + (actions + 1) / 2 * (space.high - space.low) if bounded else actions
    clipped: np.ndarray = np.clip(scaled, space.low, space.high).astype(space.dtype)
    return clipped


class OneForeign:
    """One world of a game to be drawn: of `ParallelTokenEnv` what the agents use, of `Episode` what is shown.

    Attributes:
        agents: "agent_0" while an episode is played.
        number: of the episode.
        tokens: (N, D), what it sees.
        signal: bool (N,), which of them are signal.
        clock: steps played of the episode.
        total_return: the sum of its rewards.
    """

    def __init__(self, game: Game) -> None:
        """Make the world."""
        self._env = game.make("rgb_array")
        self.token_spec = game.token_spec
        self.agents: list[str] = []

    @property
    def action_space(self) -> Any:
        """What `play` takes."""
        return self._env.action_space

    @property
    def ended(self) -> bool:
        """Whether there is nothing left to play."""
        return not self.agents

    def reset(self, seed: int, number: int = 0) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Start an episode, the same for the same seed + number."""
        self.tokens, info = self._env.reset(seed=(seed + number) % 2**31)
        self.agents, self.number, self.clock, self.total_return = ["agent_0"], number, 0, 0.0
        self.signal = info["signal_mask"]
        return {"agent_0": self.tokens}, {"agent_0": info}

    def step(self, actions: dict[str, Any]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Play the agent's action of "agent_0": what it sees, info; there are no `agents` once the episode is over."""
        info = self.play(to_range(self.action_space, np.asarray(actions["agent_0"])))
        return {"agent_0": self.tokens}, {"agent_0": info}

    def play(self, action: Any) -> dict[str, Any]:
        """Play an action of the game's own space; returns info."""
        self.tokens, reward, terminated, truncated, info = self._env.step(action)
        self.clock += 1
        self.total_return += float(reward)
        self.signal = info["signal_mask"]
        if terminated or truncated:
            self.agents = []
        return info

    def render(self, weights: np.ndarray | None = None, meaning: str = "weight") -> np.ndarray:
        """Draw the world, and under it what each token weighs (N,), if given: bars, those of features by name.

        `meaning` tells what the weights are.
        """
        from noisy_envs.bars import under

        with unseen():
            picture: Any = self._env.render()
        return under(np.asarray(picture, np.uint8), weights, self.signal, self.tokens, self.token_spec, meaning)

    def close(self) -> None:
        """Release what drawing holds."""
        self._env.close()
