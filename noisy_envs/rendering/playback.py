"""One environment being played, step by step: for the viewer, and for videos of evaluations and baselines.

Shapes: `n` controlled agents, `N` tokens of `D` features each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from noisy_envs.arrays import Array
from noisy_envs.interfaces.checks import check_action
from noisy_envs.interfaces.episode import Episode
from noisy_envs.interfaces.scripted import assign_policies, complete_actions, controlled_agents
from noisy_envs.registration import GAMES, OTHER, find, noise_option, same_start
from noisy_envs.rendering.window import headless_pygame
from noisy_envs.tokens import TokenSpec
from noisy_envs.training.gymnasium_envs import ActionRange, GymnasiumGame
from noisy_envs.validation import Count, build, highest

Picture = Array


class Playback(Protocol):
    """An environment being played: a game of this package, or another Gymnasium environment made noisy by the wrappers.

    `make_playback` makes one, at the start of an episode.

    Attributes:
        env_id: environment ID.
        env_kwargs: options, added to those of the ID.
        learners: the team of controlled agents; others follow their scripted policies.
        seed: seed of the episodes. Seed and episode number determine how the environment behaves.
        episode: number of the episode.
    """

    env_id: str
    env_kwargs: Mapping[str, Any]
    learners: str
    seed: int
    episode: int

    @property
    def token_spec(self) -> TokenSpec:
        """Meaning of the tokens; AttributeError where agents observe pixels."""

    @property
    def tokens(self) -> Array:
        """Observations (n, N, D) of the controlled agents; (n, w, w, 3) where they observe pixels."""

    @property
    def signal_mask(self) -> Array:
        """Signal tokens of the first controlled agent, bool (N,); (w, w) for pixels."""

    @property
    def clock(self) -> int:
        """Number of steps played in the episode."""

    @property
    def total_return(self) -> float:
        """Sum of the rewards of the first controlled agent in the episode."""

    @property
    def done(self) -> bool:
        """Whether the episode is terminated or truncated."""

    @property
    def noise(self) -> Count:
        """Number of noise tokens, or its range."""

    def reset(self, episode: int) -> None:
        """Start the episode of this number."""

    def step(self, actions: Array) -> None:
        """Play one step of the actions (n, ...) that a trained agent chooses, one for each controlled agent.

        In other Gymnasium environments they are converted to the action space as
        `noisy_envs.training.gymnasium_envs.ActionRange` describes.
        """

    def baseline_actions(self, policy: str, generator: np.random.Generator) -> Array:
        """Return the actions (n, ...) of a baseline policy; other Gymnasium environments have "random" only."""

    def render(self, weights: Array | None = None, overlay: str = "attention") -> Picture:
        """Return an image (H, W, 3) uint8.

        Args:
            weights: (N,) weights of the first agent's tokens, drawn as halos, or as bars below the image of another
                Gymnasium environment.
            overlay: name of the weights in the legend.
        """

    def close(self) -> None:
        """Release the renderer."""


def make_playback(
    env_id: str, env_kwargs: Mapping[str, Any], learners: str = "first", seed: int = 0, episode: int = 0
) -> Playback:
    """Make an environment and start an episode; see `Playback`.

    Raises:
        ValueError, TypeError: naming the argument or option that is not allowed.
    """
    if find(env_id)[0] == OTHER:
        return _GymnasiumPlayback(env_id, env_kwargs, seed, episode)
    return _GamePlayback(env_id, env_kwargs, learners, seed, episode)


def add_noise(playback: Playback, number: int) -> Playback:
    """Return a playback of the same episode with `number` more noise tokens; the same one if they do not fit."""
    env_id, env_kwargs = playback.env_id, playback.env_kwargs
    changed = {**env_kwargs, noise_option(env_id): max(0, highest(playback.noise) + number)}
    try:
        changed |= same_start(env_id, changed, (env_id, dict(env_kwargs)))
        return make_playback(env_id, changed, playback.learners, playback.seed, playback.episode)
    except ValueError:
        return playback


def signal_share(playback: Playback, weights: Array) -> float:
    """Return the share of the weights (N,) or (w, w) that lies on signal."""
    return float(weights.ravel() @ playback.signal_mask.ravel() / (weights.sum() or 1.0))


class Film(NamedTuple):
    """Frames of an episode."""

    frames: list[Picture]
    signal_share: float | None  # share of the weights on signal, averaged over the actions; None without weights


def record(
    playback: Playback, act: Callable[[Playback], tuple[Array, Array | None]], overlay: str = "attention"
) -> Film:
    """Play to the end of the episode and return its frames, one for each action and one for the end.

    Args:
        playback: environment to play.
        act: returns the actions (n, ...) to play next, and the weights (N,) to draw, or None.
        overlay: name of the weights in the legend.
    """
    frames, shares = [], []
    while not playback.done:
        actions, weights = act(playback)
        frames.append(playback.render(weights, overlay))
        if weights is not None:
            shares.append(signal_share(playback, weights))
        playback.step(actions)
    frames.append(playback.render())
    return Film(frames, sum(shares) / len(shares) if shares else None)


class _GamePlayback:
    """A game of this package."""

    def __init__(self, env_id: str, env_kwargs: Mapping[str, Any], learners: str, seed: int, episode: int) -> None:
        name, parameters = find(env_id)
        self.env_id, self.env_kwargs, self.learners, self.seed = env_id, env_kwargs, learners, seed
        self.game = game = build(GAMES[name], parameters | dict(env_kwargs))
        self.noise = getattr(game, noise_option(env_id))
        self._agents = controlled_agents(game, learners, ("first", *game.teams))
        self._assignment = assign_policies(game, self._agents)
        self._episode = Episode(game, self._agents, "rgb_array")
        self.reset(episode)

    @property
    def token_spec(self) -> TokenSpec:
        return self.game.token_spec

    @property
    def state(self) -> Any:
        return self._episode.state

    @property
    def tokens(self) -> Array:
        return self.game.observe(self.state, self._agents)[0]

    @property
    def signal_mask(self) -> Array:
        return self.game.signal_mask(self.tokens[:1], self.state)[0]

    @property
    def clock(self) -> int:
        return self._episode.clock

    @property
    def total_return(self) -> float:
        return self._episode.total_return

    @property
    def done(self) -> bool:
        return self._episode.ended

    def reset(self, episode: int) -> None:
        self.episode = episode
        self._episode.begin(self.seed, {"episode": episode})

    def step(self, actions: Array) -> None:
        checked = np.stack([check_action(self.game, action) for action in actions])[None]
        randomness = self._episode.step_randomness()
        joint = complete_actions(self.game, self._assignment, self.state, checked, randomness)
        self._episode.advance(joint, randomness)

    def baseline_actions(self, policy: str, generator: np.random.Generator) -> Array:
        count = self._agents.stop - self._agents.start
        shape = (1, count, self.game.num_actions) if self.game.continuous_actions else (1, count)
        u = generator.random(shape, dtype=np.float32)
        return self.game.policy(policy, self.state, u, self._agents)[0]

    def render(self, weights: Array | None = None, overlay: str = "attention") -> Picture:
        picture: Any = self._episode.draw(weights, overlay)
        return picture

    def close(self) -> None:
        self._episode.close()


class _GymnasiumPlayback:
    """Another Gymnasium environment, made noisy by the wrappers; it has one agent."""

    learners = "first"

    def __init__(self, env_id: str, env_kwargs: Mapping[str, Any], seed: int, episode: int) -> None:
        game = GymnasiumGame(env_id, env_kwargs)
        if not game.can_render:
            raise ValueError(f"env_id={env_id!r}: expected an environment with the render mode 'rgb_array'")
        self.env_id, self.env_kwargs, self.seed = env_id, env_kwargs, seed
        self.token_spec, self.noise = game.token_spec, game.num_noise
        self._env = game.make("rgb_array")
        self._range = ActionRange(self._env.action_space)
        self.reset(episode)

    def reset(self, episode: int) -> None:
        tokens, info = self._env.reset(seed=(self.seed + episode) % 2**31)
        self.episode, self.clock, self.total_return, self.done = episode, 0, 0.0, False
        self.tokens, self.signal_mask = tokens[None], info["signal_mask"]

    def step(self, actions: Array) -> None:
        tokens, reward, terminated, truncated, info = self._env.step(self._range(np.asarray(actions)[0]))
        self.clock += 1
        self.total_return += float(info.get("true_reward", reward))
        self.done = terminated or truncated
        self.tokens, self.signal_mask = tokens[None], info["signal_mask"]

    def baseline_actions(self, policy: str, generator: np.random.Generator) -> Array:
        space = self._env.action_space
        space.seed(int(generator.integers(2**31)))
        return self._range.inverse(space.sample())[None]

    def render(self, weights: Array | None = None, overlay: str = "attention") -> Picture:
        from noisy_envs.rendering.token_bars import add_bars

        with headless_pygame():
            picture: Any = self._env.render()
        tokens, spec = self.tokens[0], self.token_spec
        return add_bars(np.asarray(picture, np.uint8), weights, self.signal_mask, tokens, spec, overlay)

    def close(self) -> None:
        self._env.close()
