"""Baseline returns of each environment: mean returns of a random and an oracle policy, to normalise scores.

    score = (return − random) / (oracle − random)

A random policy scores 0, and the oracle, which sees the state, 1. `baseline_returns.json` stores both for each ID, so
that all scores are normalised alike; `tools/measure_baselines.py` writes it, with its seed and commit.
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
    """Mean episodic returns of the two baselines."""

    random: float
    oracle: float

    def normalized_score(self, episodic_return: Any) -> Any:
        """Normalise a return, or an array of returns: 0 for the random policy, 1 for the oracle."""
        return (episodic_return - self.random) / (self.oracle - self.random)


def baseline_returns(env_id: str, options: dict[str, Any] | None = None) -> BaselineReturns:
    """Return the baselines of an environment ID, stored or, if options change the game, measured in a few seconds.

    Raises:
        KeyError: the environment ID is not of this package.
        TypeError, ValueError: unknown option, or invalid value.
    """
    if env_id not in ENVIRONMENTS:
        raise KeyError(f"env_id={env_id!r}: expected one of {', '.join(ENVIRONMENTS)}")
    if not options:
        return BaselineReturns(**_table()[env_id])
    return BaselineReturns(
        *(float(play_baseline(env_id, name, options=options).mean()) for name in BaselineReturns._fields)
    )


def play_baseline(
    env_id: str, policy: str, episodes: int = 1000, seed: int = 0, options: dict[str, Any] | None = None
) -> np.ndarray:
    """Let a built-in policy control the first agent.

    Args:
        env_id: an environment ID of this package.
        policy: one of the game's `policies`.
        episodes: number of episodes, one in each environment.
        seed: of environment 0; environment i has seed + i.
        options: of the game; they override those of the ID.

    Returns:
        Episodic returns (episodes,).

    Raises:
        TypeError, ValueError: unknown option, or invalid value.
    """
    name, parameters = ENVIRONMENTS[env_id]
    options = {**parameters, **(options or {})}
    build(GAMES[name], options)  # refuses options of the vector environment, for example `num_envs`
    check_count("episodes", episodes, minimum=1, may_be_range=False)
    envs = TokenVectorEnv(name, episodes, **options)
    check_choice("policy", policy, envs.game.policies)
    envs.reset(seed=seed)
    random = np.random.default_rng(seed)
    shape = (episodes, 1, *(envs.single_action_space.shape or ()))
    returns, ended = np.zeros(episodes), np.zeros(episodes, bool)
    while not ended.all():
        u = random.random(shape, dtype=np.float32)
        _, reward, terminated, truncated, _ = envs.step(envs.game.policy(policy, envs.state, u, slice(0, 1))[:, 0])
        returns += reward * ~ended  # only the first episode counts
        ended |= terminated | truncated
    return returns


@cache
def _table() -> dict[str, dict[str, float]]:
    path = resources.files("noisy_envs").joinpath("baseline_returns.json")
    returns: dict[str, dict[str, float]] = json.loads(path.read_text(encoding="utf-8"))["returns"]
    return returns
