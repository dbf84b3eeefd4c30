"""Floor and ceiling of each environment: mean returns of a random and of an oracle policy, to normalise scores.

    score = (return − random) / (oracle − random)

0 is a policy that acts at random, 1 one that sees the signal alone. `baseline_returns.json` holds both for each
id of the package, so that everyone normalises alike; `tools/measure_baselines.py` writes it, and names itself,
seed and commit at its head.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

import numpy as np

from noisy_envs.interfaces.vector_env import TokenVectorEnv
from noisy_envs.registration import ENVIRONMENTS, GAMES
from noisy_envs.validation import build, check_choice, check_count


class BaselineReturns(NamedTuple):
    """Mean returns of an episode."""

    random: float
    oracle: float

    def normalized_score(self, episodic_return: Any) -> Any:
        """Normalise returns, a number or an array: 0 for random play, 1 for the oracle's."""
        return (episodic_return - self.random) / (self.oracle - self.random)


def baseline_returns(env_id: str, options: dict[str, Any] | None = None) -> BaselineReturns:
    """Return the references of an id: from the table, or measured (seconds) where options change the game.

    Raises:
        KeyError: an id that is not of this package.
        TypeError, ValueError: naming an option that the game does not have, or a value that it does not allow.
    """
    if env_id not in ENVIRONMENTS:
        raise KeyError(f"{env_id!r} must be one of {', '.join(ENVIRONMENTS)}")
    if not options:
        return BaselineReturns(**_table()[env_id])
    return BaselineReturns(
        *(float(play_baseline(env_id, name, options=options).mean()) for name in BaselineReturns._fields)
    )


def play_baseline(
    env_id: str, policy: str, episodes: int = 1000, seed: int = 0, options: dict[str, Any] | None = None
) -> np.ndarray:
    """Let a reference policy play the first agent.

    Args:
        env_id: an id of this package.
        policy: one of the game's `game.policies`.
        episodes: how many, one in each world.
        seed: of world 0; world i has seed + i.
        options: of the game, beside the id's own.

    Returns:
        Returns (episodes,).

    Raises:
        TypeError, ValueError: naming an option that the game does not have, or a value that is not allowed.
    """
    game, parameters = ENVIRONMENTS[env_id]
    asked = {**parameters, **(options or {})}
    build(GAMES[game], asked)  # the vector's own options, as `num_envs`, are none of the game
    check_count("episodes", episodes, minimum=1, may_be_range=False)
    envs = TokenVectorEnv(game, episodes, **asked)
    check_choice("policy", policy, envs.game.policies)
    envs.reset(seed=seed)
    random = np.random.default_rng(seed)
    shape = (episodes, 1, *(envs.single_action_space.shape or ()))
    total, ended = np.zeros(episodes), np.zeros(episodes, bool)
    while not ended.all():
        u = random.random(shape, dtype=np.float32)
        _, reward, terminated, truncated, _ = envs.step(envs.game.policy(policy, envs.state, u, slice(0, 1))[:, 0])
        total += reward * ~ended  # worlds that have ended play on, uncounted
        ended |= terminated | truncated
    return total


@cache
def _table() -> dict[str, dict[str, float]]:
    return json.loads(resources.files("noisy_envs").joinpath("baseline_returns.json").read_text(encoding="utf-8"))[
        "returns"
    ]
