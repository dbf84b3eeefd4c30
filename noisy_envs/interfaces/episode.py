"""Episodes of a single environment, for the Gymnasium and PettingZoo interfaces."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

from noisy_envs.arrays import Array
from noisy_envs.games.game import Game
from noisy_envs.interfaces.checks import (
    check_episode,
    check_game,
    check_initial_state,
    check_options,
    check_render_mode,
    check_seed,
    random_seed,
    requested_state,
)
from noisy_envs.randomness import episode_words, uniforms

RENDER_MODES = ("human", "rgb_array", "ansi")  # a game may support only some
RENDER_FPS = 10  # a step of the particle games is 0.1 s
CHUNK = 128  # steps whose randomness is sampled at once: of a single step the NumPy calls would cost more than the work


class Episode:
    """Plays episodes of one environment: a batch of one, with seed, clock, time limit and rendering.

    `begin` starts the next episode, and `advance` plays a step. `state` is the game's, `clock` counts steps, and
    (`seed`, `number`) determine the episode.
    """

    def __init__(self, game: Game, learners: slice, render_mode: str | None) -> None:
        """Prepare to play `game` with rewards for the agents `learners`."""
        check_render_mode(game, render_mode, RENDER_MODES)
        self.game = game
        self.learners = learners
        self.render_mode = render_mode
        self.seed: int | None = None
        self.number = -1
        self.clock = 0
        self.state: Any = None
        self.terminated = False
        self.total_return = 0.0  # of the first of `learners`
        self._padded = getattr(getattr(game, "token_spec", None), "padded", True)  # pictures have no spec
        self._renderer: Any = None
        self._closed = False

    @property
    def truncated(self) -> bool:
        """Whether the time limit is reached without termination."""
        return self.clock >= self.game.max_steps and not self.terminated

    @property
    def ended(self) -> bool:
        """Whether the episode has ended."""
        return self.terminated or self.clock >= self.game.max_steps

    def begin(self, seed: int | None, options: dict[str, Any] | None) -> None:
        """Start an episode: the first one of `seed`, or the next one of the current seed.

        Options are `episode`, its number, and `state` or one of the game's `reset_options`, the starting state. Others
        are ignored.

        Raises:
            ValueError, TypeError: invalid seed or option, or a game that does not follow its protocol.
        """
        self.check_open()
        options = check_options(options)
        # all checks come first: a failed reset changes nothing
        state = requested_state(self.game, options, ())
        number = check_episode(options.get("episode"))
        if seed is None and self.seed is not None:
            seed, following = self.seed, self.number + 1
        else:
            seed, following = random_seed() if seed is None else check_seed(seed), 0
        number = following if number is None else number
        key = np.array([episode_words(seed, number)])
        drawn = state is None
        if drawn:
            state = self.game.initial(uniforms(key, np.zeros(1, np.int64), self.game.num_reset_uniforms))
        if self.state is None:
            check_game(self.game, state, self.learners, key)
        if drawn:
            check_initial_state(self.game, state, np.array([seed]), np.array([number]))
        self.seed, self.number, self.state, self._key = seed, number, state, key
        self.clock, self.total_return = 0, 0.0
        self._check_terminated()

    def advance(self, action: Array, randomness: Any) -> list[float]:
        """Play one step of the joint action (1, A, ...), and return the rewards of `learners`."""
        self.state = self.game.transition(self.state, action, randomness)
        self.clock += 1
        self._check_terminated()
        rewards: list[float] = self.game.reward(self.state, self.learners)[0].tolist()
        self.total_return += rewards[0]
        return rewards

    def step_randomness(self) -> Any:
        """Return the randomness of the next step; calls before `advance` return the same."""
        if not self.game.num_step_uniforms:
            return self.game.sample_randomness(())
        index = self.clock % CHUNK
        if index == 0:
            counters = np.arange(self.clock + 1, self.clock + 1 + CHUNK)
            drawn = self.game.sample_randomness(uniforms(self._key, counters, self.game.num_step_uniforms))
            self._randomness = split_steps(drawn)
        return self._randomness[index]

    def make_info(self, tokens: np.ndarray) -> dict[str, Any]:
        """Return the `info` of tokens (N, D): signal mask, SNR and, if the game terminates, success."""
        mask = self.game.signal_mask(tokens, self.state)
        # without padding all tokens count; skipping the mask saves time in a single step
        present = np.count_nonzero(self.game.token_mask(tokens)) if self._padded else mask.size
        info = {"signal_mask": mask, "snr": float(np.count_nonzero(mask) / present)}
        if self.game.terminates:
            info["is_success"] = self.terminated and bool(self.game.success(self.state)[0])
        return info

    def draw(self, weights: np.ndarray | None = None, overlay: str = "attention") -> np.ndarray | str | None:
        """Render the environment: an image (H, W, 3) uint8, text in mode "ansi", or None in human mode.

        Args:
            weights: (N,) of tokens or (w, w) of pixels, shown as halos.
            overlay: name of the weights in the legend.
        """
        self.check_playing()
        if self.render_mode is None:
            modes = self.game.render_modes
            gymnasium.logger.warn(f"render() does nothing without a render_mode; this environment supports {modes}")
            return None
        if self.render_mode == "ansi":
            return self.game.render_text(self.state)[0]
        if self._renderer is None:
            from noisy_envs.rendering.renderer import Renderer

            self._renderer = Renderer(self.game, self.render_mode, RENDER_FPS)
        state = type(self.state)._make(field[0] for field in self.state)
        return self._renderer.draw(state, self.clock, self.total_return, weights, overlay)

    def close(self) -> None:
        """Close the window; the environment cannot be used any more."""
        self._closed = True
        if self._renderer is not None:
            self._renderer.close()

    def _check_terminated(self) -> None:
        """Update `terminated`."""
        self.terminated = self.game.terminates and bool(self.game.terminated(self.state)[0])

    def check_open(self) -> None:
        """Raise if the environment is closed."""
        if self._closed:
            raise RuntimeError("the environment is closed: make a new one")

    def check_playing(self) -> None:
        """Raise if the environment is closed or was never reset."""
        self.check_open()
        if self.state is None:
            raise RuntimeError("no episode has started: call reset() first")


def split_steps(randomness: Any) -> list[Any]:
    """Split the randomness of CHUNK steps, an array (CHUNK, ...) or a tuple of them, into that of each, (1, ...)."""
    if not isinstance(randomness, tuple):
        return [randomness[i : i + 1] for i in range(CHUNK)]
    rows = zip(*([field[i : i + 1] for i in range(CHUNK)] for field in randomness), strict=True)
    return list(map(getattr(type(randomness), "_make", tuple), rows))
