"""Who acts for the agents that are not controlled."""

from __future__ import annotations

from typing import Any

import numpy as np

from noisy_envs.arrays import Array, namespace
from noisy_envs.games.game import Game
from noisy_envs.validation import check_choice

PolicyAssignment = tuple[tuple[int, int, Any], ...]


def controlled_agents(game: Game, learners: str, choices: tuple[str, ...]) -> slice:
    """Return the agents of the team `learners`, or of the first agent alone; raise on what is not in `choices`."""
    check_choice("learners", learners, choices)
    return slice(0, 1) if learners == "first" else game.teams[learners]


def assign_policies(game: Game, learners: slice) -> PolicyAssignment:
    """Tell who acts how, agent after agent: (first, end, policy), where None stands for the driven `learners`."""
    assignment: list[tuple[int, int, Any]] = []
    for team, policy in game.scripted_policies:
        assignment.append((team.start, min(team.stop, learners.start), policy))
        assignment.append((max(team.start, learners.stop), team.stop, policy))
    assignment.append((learners.start, learners.stop, None))
    return tuple(sorted((part for part in assignment if part[0] < part[1]), key=lambda part: part[0]))


def complete_actions(game: Game, assignment: PolicyAssignment, state: Any, action: Array, randomness: Any) -> Array:
    """Complete the actions of the driven agents (B, n, ...) with those of the others, who follow their policies.

    Floats are clipped to 0 … 1. A function gets the tokens (B, N, D) of one agent and uniforms (B, ...) of the shape of
    its actions.
    """
    if game.continuous_actions:  # integers are checked or clipped before
        action = clip_action(game, action)
    if len(assignment) == 1:
        return action
    actions = []
    for first, end, policy in assignment:
        u = randomness.policy[:, first:end]
        if policy is None:
            actions.append(action)
        elif policy == "random":  # drawn with the rest of the chance: a single world draws many steps in one call
            actions.append(randomness.random[:, first:end])
        elif isinstance(policy, str):
            actions.append(game.policy(policy, state, u, slice(first, end)))
        else:
            seen = game.observe(state, slice(first, end))
            acts = [query_policy(game, policy, seen[:, i], u[:, i]) for i in range(end - first)]
            actions.append(namespace(action).stack(acts, axis=1))
    return namespace(action).concat(actions, axis=1)


def query_policy(game: Game, policy: Any, tokens: Array, u: Array) -> Array:
    """Return the actions of a user's function, or raise unless they are actions of the shape and library of `u`.

    Floats are clipped to 0 … 1. Values are checked on NumPy only: on a GPU that would wait for the device.
    """
    xp = namespace(u)
    actions = policy(tokens, u)
    if hasattr(actions, "detach"):  # a network's answer must not drag its graph of gradients through the episode
        actions = actions.detach()
    kind = "real floating" if game.continuous_actions else "integral"
    shape, dtype = getattr(actions, "shape", None), getattr(actions, "dtype", None)
    if not isinstance(actions, type(u)) or shape != u.shape or not xp.isdtype(dtype, kind):
        got = type(actions).__name__ + ("" if dtype is None else f" {dtype} {tuple(actions.shape)}")
        raise ValueError(f"policy {policy!r} gave {got}: must be {kind} {tuple(u.shape)}, a {type(u).__name__}")
    nearest = clip_action(game, actions)
    if xp is np and not (np.isfinite(actions) if game.continuous_actions else nearest == actions).all():
        allowed = "finite numbers" if game.continuous_actions else f"from 0 to {game.num_actions - 1}"
        raise ValueError(f"policy {policy!r} gave {actions}: must be {allowed}")
    return nearest


def clip_action(game: Game, actions: Array) -> Array:
    """Return actions, each replaced by the nearest that is one: floats in 0 … 1, or integers below `num_actions`."""
    return actions.clip(0, 1 if game.continuous_actions else game.num_actions - 1)
