"""What the shells share: spaces, seeds, checks of actions, and agents that follow a policy."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from noisy_envs.arrays import Array, as_numpy, namespace
from noisy_envs.games.game import Core
from noisy_envs.randomness import MAX_SEED, uniforms
from noisy_envs.registration import CORES
from noisy_envs.validation import check_choice, check_count, is_int

LAST_EPISODE = 2**62 - 1  # that a reset may ask for
Casting = tuple[tuple[int, int, Any], ...]


def observation_box(core: Core, agents: int | None = None) -> spaces.Box:
    """Return a new space of what one agent sees, finite, or of (agents, ...); new, since a space holds a generator."""
    lead = () if agents is None else (agents,)
    low, high = (np.broadcast_to(bound, (*lead, *bound.shape)).copy() for bound in core.observation_bounds)
    return spaces.Box(low, high, dtype=low.dtype.type)


def action_space(core: Core, agents: int | None = None) -> spaces.Space[Any]:
    """Return a new space of actions, of one agent or of several; new, since a space holds a random generator."""
    if core.continuous_actions:
        return spaces.Box(0.0, 1.0, (*([] if agents is None else [agents]), core.num_actions), np.float32)
    if agents is None:
        return spaces.Discrete(core.num_actions)
    return spaces.MultiDiscrete([core.num_actions] * agents)


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
    number = int(array)
    if not 0 <= number < core.num_actions:
        raise ValueError(f"action {action!r}: must be from 0 to {core.num_actions - 1}")
    return np.array(number)  # int64: arithmetic with uint64 would end in floats


def legal(core: Core, actions: Array) -> Array:
    """Return actions, each replaced by the nearest that is one: floats in 0 … 1, or integers below `num_actions`."""
    return actions.clip(0, 1 if core.continuous_actions else core.num_actions - 1)


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


def listed(seed: Any) -> Any:
    """Return seeds (B,) that are an array or a tensor as a list, and all else as it is."""
    return as_numpy(seed).tolist() if hasattr(seed, "ndim") else seed


def check_options(options: Any) -> dict[str, Any]:
    """Return the options of a reset, of which there may be none, as a dictionary; raise TypeError on what is none."""
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise TypeError(f"options={options!r}: must be a dictionary, such as {{'episode': 0}}")
    return dict(options)


def check_start(core: Core, options: dict[str, Any], batch: tuple[int, ...]) -> Any:
    """Return the states (B, ...) that the options of a reset ask for, or None; raise on what the game does not take."""
    chosen = {name: options[name] for name in core.start_options if options.get(name) is not None}
    state = options.get("state")
    if state is not None and chosen:
        raise ValueError(f"options: state and {', '.join(chosen)} given, must be one of them")
    given = chosen or state
    return None if given is None else core.admit(given, batch)


def check_render_mode(core: Core, mode: Any, modes: tuple[str, ...]) -> None:
    """Raise ValueError unless `mode` is None or one of the `modes` of the shell that the game has."""
    allowed = (None, *(one for one in modes if one in core.render_modes))
    try:
        check_choice("render_mode", mode, allowed)
    except ValueError as error:
        needs = (
            f"; to be drawn {core.name} must have `render_modes` and a method `scene`, see noisy_envs.games.game.Core"
        )
        hint = "" if core.render_modes else needs
        raise ValueError(f"{error}{hint}") from None


def check_drawn(core: Core, state: Any, seeds: Array, numbers: Array) -> None:
    """Raise ValueError if a starting state that the game itself drew, of B worlds, is over; one that is given may be.

    On a GPU it waits for the device.
    """
    if not core.terminates:
        return
    over = as_numpy(core.terminated(state))
    if over.any():
        world = int(over.argmax())
        raise ValueError(
            f"{core.name}: episode {int(numbers[world])} of seed {int(seeds[world])} is over before its first step: "
            "`initial` must draw states that are not `terminated`"
        )


def check_rules(core: Core, state: Any, learners: slice, key: Array) -> None:
    """Raise ValueError, naming what does not fit, unless a game gives what the shells take.

    The rules of a user are tried for one step, which is then dropped; ours are tested, and only what they show is
    looked at. On a GPU it waits for the device.

    Args:
        core: the game.
        state: of B worlds that begin.
        learners: the n agents that are driven.
        key: (B, 2) keys of the episodes.
    """
    lead = len(key), learners.stop - learners.start
    own = type(core) not in CORES.values()
    if own:
        _check_start_state(core, state, key)
    seen = core.observe(state, learners)
    _check_seen(core, seen, lead, key)
    if not own:
        return
    before = [as_numpy(field).tobytes() for field in state]
    after = _last_action_played(core, state, key)
    _check_next_state(core, after, state)
    if before != [as_numpy(field).tobytes() for field in state]:
        raise ValueError(f"{core.name}: `transition` changed the state that it was given: must return new arrays")
    later = core.observe(after, learners)
    _check_seen(core, later, lead, key)
    if _share_memory(seen, later) and not any(_share_memory(field, later) for field in after):
        raise ValueError(f"{core.name}: `observe` gave the array of its last call: must return a new one")
    _check_given(core, "`reward` gave ", core.reward(after, learners), key, "numbers", lead, ", of worlds and agents")
    if core.terminates:
        for member in ("terminated", "success"):
            _check_given(core, f"`{member}` gave ", getattr(core, member)(after), key, "bool", lead[:1], ", of worlds")
    if hasattr(core, "token_spec"):  # pictures have none
        for member in ("signal_mask", "token_mask"):
            given, wanted = getattr(core, member)(later), tuple(later.shape[:-1])
            _check_given(core, f"`{member}` gave ", given, key, "bool", wanted, ", of the tokens that it got")


def _last_action_played(core: Core, state: Any, key: Array) -> Any:
    """Return the state after a first step in which all agents take the last action, or the highest numbers."""
    xp, agents = namespace(key), (len(key), len(core.agents))
    if core.continuous_actions:
        action = xp.ones((*agents, core.num_actions), dtype=xp.float32, device=key.device)
    else:
        action = xp.full(agents, core.num_actions - 1, dtype=xp.int64, device=key.device)
    return core.transition(state, action, core.chance(uniforms(key, xp.ones_like(key[:, 0]), core.step_draws)))


def _share_memory(one: Array, other: Array) -> bool:
    """Tell whether arrays may lie in the same memory; on a GPU that is not seen."""
    return np.may_share_memory(as_numpy(one), as_numpy(other))


def _check_start_state(core: Core, state: Any, like: Array) -> None:
    if not hasattr(state, "_fields"):
        raise ValueError(f"{core.name}: `initial` gave {_described(state)}: must be a NamedTuple of arrays (B, ...)")
    for name, field in zip(state._fields, state, strict=True):
        if type(field) is not type(like) or tuple(field.shape[:1]) != (len(like),):
            wanted = f"must be an array ({len(like)}, ...), of worlds"
            raise ValueError(f"{core.name}: `initial` gave {name}={_described(field)}: {wanted}")


def _check_next_state(core: Core, state: Any, before: Any) -> None:
    if type(state) is not type(before):
        raise ValueError(f"{core.name}: `transition` gave {_described(state)}: must be {type(before).__name__}")
    for name, field, old in zip(before._fields, state, before, strict=True):
        _check_given(core, f"`transition` gave {name}=", field, old, _dtype(old), tuple(old.shape), ", as before")


def _check_seen(core: Core, seen: Any, lead: tuple[int, int], like: Array) -> None:
    low, _ = core.observation_bounds
    of = ", of worlds, agents and `observation_bounds`"
    _check_given(core, "`observe` gave ", seen, like, _dtype(low), (*lead, *low.shape), of)
    spec = getattr(core, "token_spec", None)  # pictures have none
    if spec is not None and (spec.num_tokens, spec.num_features) != low.shape:
        raise ValueError(
            f"{core.name}: `token_spec` has {spec.num_tokens} tokens of {spec.num_features} features: must be those of "
            f"`observe`, {low.shape}"
        )


def _check_given(core: Core, told: str, given: Any, like: Array, kind: str, shape: tuple[int, ...], axes: str) -> None:
    """Raise ValueError unless an array has a shape, a dtype, or "numbers" of any, and the library of `like`."""
    if type(given) is type(like) and tuple(given.shape) == shape:
        numbers = kind == "numbers" and namespace(like).isdtype(given.dtype, ("integral", "real floating"))
        if numbers or _dtype(given) == kind:
            return
    library = "" if type(given) is type(like) else f" in a {type(like).__name__}"
    raise ValueError(f"{core.name}: {told}{_described(given)}: must be {kind} {shape}{library}{axes}")


def _described(given: Any) -> str:
    return f"{_dtype(given)} {tuple(given.shape)}" if hasattr(given, "dtype") else type(given).__name__


def _dtype(array: Array) -> str:
    return str(array.dtype).removeprefix("torch.")


def check_episode(number: Any) -> int | None:
    """Return the option `episode`, a number of 62 bits, which leaves room to play on, or None where it is not given."""
    if number is None:
        return None
    check_count("episode", number, minimum=0, may_be_range=False, maximum=LAST_EPISODE)
    return int(number)


def next_episodes(
    seed: int | Sequence[int | None] | None, number: int | None, old_seeds: np.ndarray, old_numbers: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return seeds and numbers (B,) of the episodes that a reset of B worlds begins.

    Args:
        seed: of world 0, and world i takes seed + i; or one for each world. Worlds without go on with their own.
        number: of the episodes, if it is not to follow from the seeds.
        old_seeds: (B,) seeds so far, below 0 where there is none.
        old_numbers: (B,) numbers of the last episodes.
    """
    num_envs = len(old_seeds)
    if isinstance(seed, Sequence):
        if len(seed) != num_envs:
            raise ValueError(f"seed: {len(seed)} seeds given, must be num_envs={num_envs}")
        given = np.array([one is not None for one in seed])
        fresh = np.array([fresh_seed() if one is None else check_seed(one) for one in seed])
    else:
        base = fresh_seed() if seed is None else check_seed(seed)
        if base > MAX_SEED - num_envs:
            raise ValueError(f"seed={seed}: must be at most {MAX_SEED - num_envs} for {num_envs} worlds")
        given = np.full(num_envs, seed is not None)
        fresh = base + np.arange(num_envs)
    anew = given | (old_seeds < 0)
    numbers = np.where(anew, 0, old_numbers + 1) if number is None else np.full(num_envs, number)
    return np.where(anew, fresh, old_seeds), numbers


def check_reset_mask(mask: Any, num_envs: int) -> np.ndarray | None:
    """Return the option `reset_mask`, bool (B,), which worlds to reset, or None where it is not given."""
    if mask is None:
        return None
    array = as_numpy(mask)
    if array.shape != (num_envs,) or array.dtype != np.bool_ or not array.any():
        raise ValueError(f"reset_mask={mask!r}: must be bool ({num_envs},) with at least one True")
    return array


def driven(core: Core, learners: str, choices: tuple[str, ...]) -> slice:
    """Return the agents of the team `learners`, or of the first agent alone; raise on what is not in `choices`."""
    check_choice("learners", learners, choices)
    return slice(0, 1) if learners == "first" else core.teams[learners]


def casting(core: Core, learners: slice) -> Casting:
    """Tell who acts how, agent after agent: (first, end, policy), where None stands for the driven `learners`."""
    cast: list[tuple[int, int, Any]] = []
    for team, policy in core.scripts:
        cast.append((team.start, min(team.stop, learners.start), policy))
        cast.append((max(team.start, learners.stop), team.stop, policy))
    cast.append((learners.start, learners.stop, None))
    return tuple(sorted((part for part in cast if part[0] < part[1]), key=lambda part: part[0]))


def follow(core: Core, cast: Casting, state: Any, action: Array, chance: Any) -> Array:
    """Complete the actions of the driven agents (B, n, ...) with those of the others, who follow their policies.

    Floats are clipped to 0 … 1. A function gets the tokens (B, N, D) of one agent and uniforms (B, ...) of the shape of
    its actions.
    """
    if core.continuous_actions:  # integers are checked or clipped before
        action = legal(core, action)
    if len(cast) == 1:
        return action
    actions = []
    for first, end, policy in cast:
        u = chance.policy[:, first:end]
        if policy is None:
            actions.append(action)
        elif policy == "random":  # drawn with the rest of the chance: a single world draws many steps in one call
            actions.append(chance.random[:, first:end])
        elif isinstance(policy, str):
            actions.append(core.policy(policy, state, u, slice(first, end)))
        else:
            seen = core.observe(state, slice(first, end))
            acts = [ask(core, policy, seen[:, i], u[:, i]) for i in range(end - first)]
            actions.append(namespace(action).stack(acts, axis=1))
    return namespace(action).concat(actions, axis=1)


def ask(core: Core, policy: Any, tokens: Array, u: Array) -> Array:
    """Return the actions of a user's function, or raise unless they are actions of the shape and library of `u`.

    Floats are clipped to 0 … 1. Values are checked on NumPy only: on a GPU that would wait for the device.
    """
    xp = namespace(u)
    actions = policy(tokens, u)
    if hasattr(actions, "detach"):  # a network's answer must not drag its graph of gradients through the episode
        actions = actions.detach()
    kind = "real floating" if core.continuous_actions else "integral"
    shape, dtype = getattr(actions, "shape", None), getattr(actions, "dtype", None)
    if not isinstance(actions, type(u)) or shape != u.shape or not xp.isdtype(dtype, kind):
        got = type(actions).__name__ + ("" if dtype is None else f" {dtype} {tuple(actions.shape)}")
        raise ValueError(f"policy {policy!r} gave {got}: must be {kind} {tuple(u.shape)}, a {type(u).__name__}")
    nearest = legal(core, actions)
    if xp is np and not (np.isfinite(actions) if core.continuous_actions else nearest == actions).all():
        allowed = "finite numbers" if core.continuous_actions else f"from 0 to {core.num_actions - 1}"
        raise ValueError(f"policy {policy!r} gave {actions}: must be {allowed}")
    return nearest
