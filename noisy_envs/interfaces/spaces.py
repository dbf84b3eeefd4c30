"""What Gymnasium asks of an environment besides its steps: spaces for one agent or several, and the specification.

Each call returns a new space, since a space holds a random generator.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

from noisy_envs.games.game import Game
from noisy_envs.validation import plain


def observation_box(game: Game, agents: int | None = None) -> spaces.Box:
    """Return the finite space of one agent's observations, or of several with a leading axis."""
    lead = () if agents is None else (agents,)
    low, high = (np.broadcast_to(bound, (*lead, *bound.shape)).copy() for bound in game.observation_bounds)
    return spaces.Box(low, high, dtype=low.dtype.type)


def action_space(game: Game, agents: int | None = None) -> spaces.Space[Any]:
    """Return the space of one agent's actions, or of several with a leading axis."""
    if game.continuous_actions:
        return spaces.Box(0.0, 1.0, (*([] if agents is None else [agents]), game.num_actions), np.float32)
    if agents is None:
        return spaces.Discrete(game.num_actions)
    return spaces.MultiDiscrete([game.num_actions] * agents)


class TimeLimitSpec:
    """Base of environments that enforce their time limit and store it in Gymnasium's specification."""

    _spec: EnvSpec | None = None
    _spec_kwargs: dict[str, Any] = {}  # noqa: RUF012  arguments to add to the specification; none is changed here

    @property
    def max_steps(self) -> int:
        """Steps after which an episode is truncated."""
        raise NotImplementedError

    @property
    def spec(self) -> EnvSpec | None:
        """Gymnasium's specification; its `max_episode_steps` is `max_steps`."""
        return self._spec

    @spec.setter
    def spec(self, spec: EnvSpec | None) -> None:
        """Store the specification with the time limit."""
        if spec is not None:
            kwargs = {name: plain(value) for name, value in spec.kwargs.items()}  # JSON has no NumPy numbers
            spec = dataclasses.replace(spec, max_episode_steps=self.max_steps, kwargs=kwargs | self._spec_kwargs)
        self._spec = spec
