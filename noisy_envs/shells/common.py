"""What the shells share: spaces, seeds, checks of actions, and agents that follow a policy."""

from __future__ import annotations

import math
import secrets
from typing import Any

import numpy as np
from gymnasium import spaces

from noisy_envs.arrays import Array, namespace
from noisy_envs.cores import Core
from noisy_envs.options import check_count, is_int
from noisy_envs.randomness import MAX_SEED


def observation_box(core: Core) -> spaces.Box:
    """Return a new space of one agent's tokens, (N, D) float32, finite; new, since a space holds a generator."""
    rows = (core.token_spec.num_tokens, 1)
    low, high = (np.tile(np.array(bound, np.float32), rows) for bound in core.observation_bounds)
    return spaces.Box(low, high, dtype=np.float32)


def action_space(core: Core) -> spaces.Space[Any]:
    """Return a new action space of one agent; new, since a space holds a random generator."""
    if core.continuous_actions:
        return spaces.Box(0.0, 1.0, (core.num_actions,), np.float32)
    return spaces.Discrete(core.num_actions)


def check_action(core: Core, action: Any) -> np.ndarray:
    """Return one agent's action as an array without batch axis, or raise.

    Raises:
        ValueError: wrong shape, NaN or infinity, or no action of that number.
        TypeError: a discrete action that is not a whole number.
    """
    if core.continuous_actions:
        array = np.asarray(action, dtype=np.float32)
        if array.shape != (core.num_actions,) or not all(map(math.isfinite, array.tolist())):
            raise ValueError(f"action {action!r}: must be {core.num_actions} finite numbers")
        return array
    array = np.asarray(action)
    if array.shape != () or array.dtype.kind not in "iu":
        raise TypeError(f"action {action!r}: must be one integer from 0 to {core.num_actions - 1}")
    if not 0 <= array < core.num_actions:
        raise ValueError(f"action {action!r}: must be from 0 to {core.num_actions - 1}")
    return array


def fresh_seed() -> int:
    """Return a seed from the operating system's entropy."""
    return secrets.randbits(62)


def check_seed(seed: Any) -> int:
    """Return a seed as an int, or raise unless it is one from 0 to 2**63 − 1."""
    if not is_int(seed):
        raise TypeError(f"seed={seed!r}: must be an integer from 0 to {MAX_SEED}")
    if not 0 <= seed <= MAX_SEED:
        raise ValueError(f"seed={seed!r}: must be from 0 to {MAX_SEED}")
    return int(seed)


def check_episode(number: Any) -> int | None:
    """Return the option `episode`, a number from 0, or None where it is not given."""
    if number is None:
        return None
    check_count("episode", number, minimum=0, may_be_range=False)
    return int(number)


def follow(core: Core, state: Any, action: Array, u: Array) -> Array:
    """Complete the first agent's action (B, 1, ...) with those of the others, who follow `other_policy`.

    A function gets the tokens (B, N, D) of one agent and uniforms (B, ...) of the shape of its actions.
    """
    if core.num_agents == 1:
        return action
    xp = namespace(action)
    if isinstance(core.other_policy, str):
        others = core.policy(core.other_policy, state, u)[:, 1:]
    else:
        acts = [core.other_policy(core.observation(state, i), u[:, i]) for i in range(1, core.num_agents)]
        others = xp.stack(acts, axis=1)
    return xp.concat([action, others], axis=1)
