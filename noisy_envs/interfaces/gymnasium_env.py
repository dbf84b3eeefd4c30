"""Gymnasium's interface: one environment in which one agent is controlled."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

from noisy_envs.interfaces.checks import check_action
from noisy_envs.interfaces.episode import RENDER_FPS, RENDER_MODES, Episode
from noisy_envs.interfaces.scripted import assign_policies, complete_actions
from noisy_envs.interfaces.spaces import TimeLimitSpec, action_space, observation_box
from noisy_envs.registration import GameLike, game_class
from noisy_envs.tokens import TokenSpec
from noisy_envs.validation import build

LEARNER = slice(0, 1)  # the first agent


class TokenEnv(TimeLimitSpec, gymnasium.Env[np.ndarray, Any]):
    """A game in which the first agent is controlled; observations are tokens (N, D).

    Args:
        game: a key of `noisy_envs.registration.GAMES`, a class that follows `noisy_envs.games.game.Game`, or
            "module:Class". The class docstring describes the game and its options.
        render_mode: None, "human" (a window, updated at each step in real time), "rgb_array", or for some games "ansi".
        options: of the game; unknown ones raise TypeError.

    Attributes:
        game: rules and options.
        token_spec: meaning of an observation.
        spec: set by `gymnasium.make`; its `max_episode_steps` is the game's `max_steps`, which the environment enforces
            itself. A shorter `max_episode_steps` adds Gymnasium's `TimeLimit`, as does `gymnasium.make(env.spec)`;
            `TimeLimit` reports an episode that terminates in the last step as truncated, too. For longer episodes set
            `max_steps`.

    Options of `reset` are `state`, a starting state (see `game.validate_state`), `game.reset_options`, and `episode`:
    seed and episode number determine an episode. Others are ignored. `info` contains `signal_mask`, bool (N,), the
    tokens that are relevant to the task, `snr`, their share of all tokens without padding, and, if the game terminates,
    `is_success`.
    """

    metadata: dict[str, Any] = {"render_modes": list(RENDER_MODES), "render_fps": RENDER_FPS}  # noqa: RUF012  Gymnasium declares it so

    def __init__(self, game: GameLike, render_mode: str | None = None, **options: Any) -> None:
        """Make the environment; see the class."""
        self.game = build(game_class(game), options)
        self.render_mode = render_mode
        self.metadata = {**type(self).metadata, "render_modes": list(self.game.render_modes)}
        self.observation_space = observation_box(self.game)
        self.action_space = action_space(self.game)
        self._episode = Episode(self.game, LEARNER, render_mode)
        self._assignment = assign_policies(self.game, LEARNER)

    @property
    def max_steps(self) -> int:
        """Steps after which an episode is truncated."""
        return self.game.max_steps

    @property
    def token_spec(self) -> TokenSpec:
        """Meaning of an observation; AttributeError if it is not a set of tokens."""
        return self.game.token_spec

    @property
    def state(self) -> Any:
        """A copy of the state, without batch axis, as `reset(options={"state": ...})` accepts it."""
        self._episode.check_playing()
        state = self._episode.state
        return type(state)._make(np.array(x[0]) for x in state)

    @property
    def episode(self) -> tuple[int | None, int]:
        """Seed and number of the current episode."""
        self._episode.check_playing()
        return self._episode.seed, self._episode.number

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start the next episode, or the first one of `seed`, and return tokens (N, D) float32 and info."""
        self._episode.check_open()
        self._episode.begin(seed, options)  # first: a failed reset changes nothing
        super().reset(seed=None if seed is None else int(seed))  # Gymnasium rejects NumPy integers
        tokens = self.game.observe(self._episode.state, LEARNER)[0, 0]
        self._info = self._episode.make_info(tokens)
        if self.render_mode == "human":
            self.render()
        return tokens, self._copied_info()

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Play an action, and return tokens (N, D) float32, reward, terminated, truncated and info."""
        episode = self._episode
        episode.check_playing()
        if episode.ended:
            raise RuntimeError(f"the episode ended after {episode.clock} steps: call reset()")
        own = check_action(self.game, action)[None, None]
        randomness = episode.step_randomness()
        reward = episode.advance(
            complete_actions(self.game, self._assignment, episode.state, own, randomness), randomness
        )[0]
        if self.render_mode == "human":
            self.render()
        tokens = self.game.observe(episode.state, LEARNER)[0, 0]
        changes = self.game.signal_moves or self.game.terminates
        info = episode.make_info(tokens) if changes else self._copied_info()
        return tokens, reward, episode.terminated, episode.truncated, info

    def render(self, weights: np.ndarray | None = None) -> np.ndarray | str | None:
        """Render the environment: an image (H, W, 3) uint8, text in mode "ansi", or None in human mode.

        Args:
            weights: of a pooling head, (N,) over tokens or (w, w) over pixels, shown as halos.
        """
        return self._episode.draw(weights)

    def close(self) -> None:
        """Close the window; the environment cannot be used any more."""
        self._episode.close()

    def _copied_info(self) -> dict[str, Any]:
        """Return a copy of the info of the reset, for games in which it does not change."""
        return {**self._info, "signal_mask": self._info["signal_mask"].copy()}


class PictureEnv(TokenEnv):
    """The same for games without text rendering: Gymnasium looks up the render modes in the class."""

    metadata: dict[str, Any] = {**TokenEnv.metadata, "render_modes": ["human", "rgb_array"]}  # noqa: RUF012
