"""Gymnasium's view: one learning agent in one world."""

from __future__ import annotations

import dataclasses
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec

from noisy_envs.interfaces.checks import check_action
from noisy_envs.interfaces.episode import RENDER_FPS, RENDER_MODES, Episode
from noisy_envs.interfaces.scripted import assign_policies, complete_actions
from noisy_envs.interfaces.spaces import action_space, observation_box
from noisy_envs.registration import GameLike, game_class
from noisy_envs.tokens import TokenSpec
from noisy_envs.validation import build, plain

LEARNER = slice(0, 1)  # the first agent


class TokenEnv(gymnasium.Env[np.ndarray, Any]):
    """A game seen by its first agent, whose observation is a set of tokens (N, D).

    Args:
        game: a key of `noisy_envs.registration.GAMES`, a class that follows `noisy_envs.games.game.Game`, or
            "module:Class". The class docstring describes the game and its options.
        render_mode: None, "human" (a window, paced, drawn at each step), "rgb_array", or of some games "ansi".
        options: the game's; an unknown one raises TypeError and names what is allowed.

    Attributes:
        core: rules and parameters.
        token_spec: the meaning of an observation.
        spec: Gymnasium's, of an environment that `gymnasium.make` made. Its `max_episode_steps` is the game's
            `max_steps`, a limit that the environment itself keeps. `gymnasium.make(env.spec)` adds Gymnasium's
            `TimeLimit`, as a shorter `max_episode_steps` does: it calls an episode truncated that ends in the last step
            by itself, too. A longer one has no effect; `max_steps` makes episodes longer.

    `reset` takes the options `state` (a state to start from, see `game.validate_state`), `game.reset_options`, and
    `episode` (its number: the seed and this number alone name an episode), and ignores others. `info` holds
    `signal_mask`, bool (N,), the tokens on which the task depends, `snr`, their share of all tokens that are not
    padding, and in games that terminate `is_success`, whether the goal is reached.
    """

    metadata: dict[str, Any] = {"render_modes": list(RENDER_MODES), "render_fps": RENDER_FPS}  # noqa: RUF012  Gymnasium declares it so
    _spec: EnvSpec | None = None

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
    def spec(self) -> EnvSpec | None:
        """How Gymnasium made it; see the class."""
        return self._spec

    @spec.setter
    def spec(self, spec: EnvSpec | None) -> None:
        """Keep what `gymnasium.make` says, and add the time limit."""
        if spec is not None:
            kwargs = {name: plain(value) for name, value in spec.kwargs.items()}  # JSON knows no numbers of NumPy
            spec = dataclasses.replace(spec, max_episode_steps=self.game.max_steps, kwargs=kwargs)
        self._spec = spec

    @property
    def token_spec(self) -> TokenSpec:
        """What an observation means; AttributeError where it is no set of tokens."""
        return self.game.token_spec

    @property
    def state(self) -> Any:
        """A copy of the world's state, without batch axis; `reset(options={"state": ...})` takes it."""
        self._episode.check_playing()
        state = self._episode.state
        return type(state)._make(np.array(x[0]) for x in state)

    @property
    def episode(self) -> tuple[int | None, int]:
        """Seed and number of the episode in play."""
        self._episode.check_playing()
        return self._episode.seed, self._episode.number

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start the next episode, or the first one of `seed`: tokens (N, D) float32, info."""
        self._episode.check_open()
        self._episode.begin(seed, options)  # first: a refused reset changes nothing
        super().reset(seed=None if seed is None else int(seed))  # Gymnasium refuses NumPy's integers
        tokens = self.game.observe(self._episode.state, LEARNER)[0, 0]
        self._info = self._episode.make_info(tokens)
        if self.render_mode == "human":
            self.render()
        return tokens, self._copied_info()

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Play an action, (5,) or an integer: tokens (N, D) float32, reward, terminated, truncated, info."""
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
        """Draw the world: an image (H, W, 3) uint8, a text in mode "ansi", or None in human mode.

        Args:
            weights: (N,) weights of a pooling head over the tokens, or (w, w) over pixels, drawn as halos.
        """
        return self._episode.draw(weights)

    def close(self) -> None:
        """Close the window; the environment cannot be used any more. Closing twice does nothing."""
        self._episode.close()

    def _copied_info(self) -> dict[str, Any]:
        """Return the info of the start anew; where nothing in it changes, it is found once an episode."""
        return {**self._info, "signal_mask": self._info["signal_mask"].copy()}


class PictureEnv(TokenEnv):
    """The same of a game that is not drawn in characters: of its modes Gymnasium asks the class, before it is made."""

    metadata: dict[str, Any] = {**TokenEnv.metadata, "render_modes": ["human", "rgb_array"]}  # noqa: RUF012
