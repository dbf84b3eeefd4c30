"""Observation and action spaces of a game, for one agent or several.

Each call returns a new space, since a space holds a random generator.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from noisy_envs.games.game import Game


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
