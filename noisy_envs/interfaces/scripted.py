"""The actions of agents that are not controlled: they follow scripted policies."""

from __future__ import annotations

from typing import Any

import numpy as np

from noisy_envs.arrays import Array, namespace
from noisy_envs.games.game import Game
from noisy_envs.validation import check_choice

# consecutive sets of agents (start, stop, policy), where the policy None stands for the controlled agents
PolicyAssignment = tuple[tuple[int, int, Any], ...]


def controlled_agents(game: Game, learners: str, choices: tuple[str, ...]) -> slice:
    """Return the agents of the team `learners`, or "first" the first agent alone; raise unless it is in `choices`."""
    check_choice("learners", learners, choices)
    return slice(0, 1) if learners == "first" else game.teams[learners]


def assign_policies(game: Game, learners: slice) -> PolicyAssignment:
    """Assign every agent to its scripted policy, or to None if it is controlled."""
    parts: list[tuple[int, int, Any]] = [(learners.start, learners.stop, None)]
    for team, policy in game.scripted_policies:
        parts.append((team.start, min(team.stop, learners.start), policy))
        parts.append((max(team.start, learners.stop), team.stop, policy))
    return tuple(sorted((part for part in parts if part[0] < part[1]), key=lambda part: part[0]))


def clip_action(game: Game, actions: Array) -> Array:
    """Return the nearest valid actions: floats in [0, 1], or integers from 0 to `num_actions` − 1."""
    return actions.clip(0, 1 if game.continuous_actions else game.num_actions - 1)


def complete_actions(game: Game, assignment: PolicyAssignment, state: Any, action: Array, randomness: Any) -> Array:
    """Complete the actions of the controlled agents (B, n, ...) to the joint action (B, A, ...).

    Continuous actions are clipped; discrete ones must be valid.
    """
    if game.continuous_actions:
        action = clip_action(game, action)
    if len(assignment) == 1:
        return action
    actions = []
    for start, stop, policy in assignment:
        u = randomness.policy[:, start:stop]
        if policy is None:
            actions.append(action)
        elif policy == "random":  # part of the randomness, which a single environment samples for many steps at once
            actions.append(randomness.random[:, start:stop])
        elif isinstance(policy, str):
            actions.append(game.policy(policy, state, u, slice(start, stop)))
        else:
            tokens = game.observe(state, slice(start, stop))
            own = [query_policy(game, policy, tokens[:, i], u[:, i]) for i in range(stop - start)]
            actions.append(namespace(action).stack(own, axis=1))
    return namespace(action).concat(actions, axis=1)


def query_policy(game: Game, policy: Any, tokens: Array, u: Array) -> Array:
    """Return the actions of a user's function for one agent, from tokens (B, N, D) and uniforms of the actions' shape.

    Continuous actions are clipped. Values are checked in NumPy only: on a GPU that would wait for the device.

    Raises:
        ValueError: the actions have another shape, dtype or library than `u`, or are invalid.
    """
    xp = namespace(u)
    actions = policy(tokens, u)
    if hasattr(actions, "detach"):  # or the autograd graph of a network would grow through the episode
        actions = actions.detach()
    kind = "real floating" if game.continuous_actions else "integral"
    shape, dtype = getattr(actions, "shape", None), getattr(actions, "dtype", None)
    if not isinstance(actions, type(u)) or shape != u.shape or not xp.isdtype(dtype, kind):
        got = type(actions).__name__ + ("" if dtype is None else f" {dtype} {tuple(actions.shape)}")
        expected = f"a {kind} {type(u).__name__} {tuple(u.shape)}"
        raise ValueError(f"policy {policy!r}: expected {expected}, got {got}")
    nearest = clip_action(game, actions)
    if xp is np and not (np.isfinite(actions) if game.continuous_actions else nearest == actions).all():
        expected = "finite numbers" if game.continuous_actions else f"0 to {game.num_actions - 1}"
        raise ValueError(f"policy {policy!r}: expected {expected}, got {actions}")
    return nearest
