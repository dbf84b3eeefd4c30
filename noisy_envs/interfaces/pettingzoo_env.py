"""PettingZoo's parallel interface: several agents are controlled, each with its own observation."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv

from noisy_envs.interfaces.checks import check_action
from noisy_envs.interfaces.episode import RENDER_FPS, RENDER_MODES, Episode
from noisy_envs.interfaces.scripted import assign_policies, complete_actions, controlled_agents
from noisy_envs.interfaces.spaces import action_space, observation_box
from noisy_envs.registration import GameLike, game_class
from noisy_envs.tokens import TokenSpec
from noisy_envs.validation import build


class ParallelTokenEnv(ParallelEnv[str, np.ndarray, Any]):
    """A game in which all agents, or a team, are controlled; each observes tokens (N, D).

    Args:
        game: a key of `noisy_envs.registration.GAMES`, a class that follows `noisy_envs.games.game.Game`, or
            "module:Class". The class docstring describes the game and its options.
        render_mode: None, "human" or "rgb_array".
        learners: the controlled agents, a key of `game.teams`, for example "all", or "first"; the others follow their
            scripted policies.
        options: of the game; unknown ones raise TypeError.

    Options of `reset` and `info` are those of `noisy_envs.interfaces.gymnasium_env.TokenEnv`.
    """

    metadata: dict[str, Any] = {  # noqa: RUF012  PettingZoo declares it an instance variable
        "render_modes": list(RENDER_MODES),
        "render_fps": RENDER_FPS,
        "is_parallelizable": True,
    }

    def __init__(self, game: GameLike, render_mode: str | None = None, learners: str = "all", **options: Any) -> None:
        """Make the environment; see the class."""
        self.game = build(game_class(game), options)
        self.render_mode = render_mode
        modes = list(self.game.render_modes)
        self.metadata = {**type(self).metadata, "name": f"{self.game.name}_v0", "render_modes": modes}
        self._learners = controlled_agents(self.game, learners, ("first", *self.game.teams))
        self._assignment = assign_policies(self.game, self._learners)
        self.possible_agents = list(self.game.agents[self._learners])
        self.agents: list[str] = []
        self.observation_spaces = {agent: observation_box(self.game) for agent in self.possible_agents}
        self.action_spaces = {agent: action_space(self.game) for agent in self.possible_agents}
        self.state_space = observation_box(self.game)
        self._episode = Episode(self.game, self._learners, render_mode)

    @property
    def token_spec(self) -> TokenSpec:
        """Meaning of an observation; AttributeError if it is not a set of tokens."""
        return self.game.token_spec

    def observation_space(self, agent: str) -> spaces.Space[np.ndarray]:
        """Return the space of an agent's observations, always the same object."""
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> spaces.Space[Any]:
        """Return the space of an agent's actions, always the same object."""
        return self.action_spaces[agent]

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, dict[str, Any]]]:
        """Start the next episode, or the first one of `seed`."""
        self._episode.begin(seed, options)
        self.agents = self.possible_agents.copy()
        observations = self._observe()
        if self.render_mode == "human":
            self.render()
        infos = self._make_info(observations)
        if self._episode.ended:  # the given state is terminal
            self.agents = []
        return observations, infos

    def step(
        self, actions: dict[str, Any]
    ) -> tuple[dict[str, np.ndarray], dict[str, float], dict[str, bool], dict[str, bool], dict[str, dict[str, Any]]]:
        """Play one action of each live agent; after the end of an episode do nothing."""
        episode = self._episode
        episode.check_playing()
        if not self.agents:
            return {}, {}, {}, {}, {}
        missing, unknown = set(self.agents) - set(actions), set(actions) - set(self.possible_agents)
        if missing or unknown:
            raise ValueError(
                f"actions: missing agents {sorted(missing)}, unknown agents {sorted(unknown)}; expected {self.agents}"
            )
        own = np.stack([check_action(self.game, actions[agent]) for agent in self.agents])[None]
        randomness = episode.step_randomness()
        joint = complete_actions(self.game, self._assignment, episode.state, own, randomness)
        rewards = dict(zip(self.agents, episode.advance(joint, randomness), strict=True))
        if self.render_mode == "human":
            self.render()
        observations = self._observe()
        terminated = dict.fromkeys(self.agents, episode.terminated)
        truncated = dict.fromkeys(self.agents, episode.truncated)
        infos = self._make_info(observations)
        if episode.ended:
            self.agents = []
        return observations, rewards, terminated, truncated, infos

    def state(self) -> np.ndarray:
        """Return all entities (N, D) in absolute coordinates, agents first, for a centralised critic."""
        self._episode.check_playing()
        return self.game.world_tokens(self._episode.state)[0]

    def render(self, weights: np.ndarray | None = None) -> np.ndarray | str | None:
        """Render as `TokenEnv` does; return and `weights` (N,) are those of the first controlled agent."""
        return self._episode.draw(weights)

    def close(self) -> None:
        """Close the window; the environment cannot be used any more."""
        self._episode.close()

    def _observe(self) -> dict[str, np.ndarray]:
        tokens = self.game.observe(self._episode.state, self._learners)[0]
        return dict(zip(self.agents, tokens, strict=True))

    def _make_info(self, observations: dict[str, np.ndarray]) -> dict[str, dict[str, Any]]:
        return {agent: self._episode.make_info(tokens) for agent, tokens in observations.items()}
