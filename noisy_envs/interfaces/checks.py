"""What the interfaces check of a game and of their caller: actions, seeds, options of a reset."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from noisy_envs.arrays import Array, as_numpy, namespace
from noisy_envs.games.game import Game
from noisy_envs.randomness import MAX_SEED, uniforms
from noisy_envs.registration import GAMES
from noisy_envs.validation import check_choice, check_count, is_int

LAST_EPISODE = 2**62 - 1  # that a reset may ask for


def check_action(game: Game, action: Any) -> np.ndarray:
    """Return one agent's action as an array without batch axis, or raise.

    Raises:
        ValueError: wrong shape, NaN or infinity, or no action of that number.
        TypeError: a discrete action that is not a whole number.
    """
    if game.continuous_actions:
        array = np.asarray(action, dtype=np.float32)
        if array.shape != (game.num_actions,) or not all(map(math.isfinite, array.tolist())):
            raise ValueError(f"action {action!r}: must be {game.num_actions} finite numbers")
        return array
    array = np.asarray(action)
    if array.shape != () or array.dtype.kind not in "iu":
        raise TypeError(f"action {action!r}: must be one integer from 0 to {game.num_actions - 1}")
    number = int(array)
    if not 0 <= number < game.num_actions:
        raise ValueError(f"action {action!r}: must be from 0 to {game.num_actions - 1}")
    return np.array(number)  # int64: arithmetic with uint64 would end in floats


def random_seed() -> int:
    """Return a seed from the operating system's entropy."""
    return secrets.randbits(62)


def check_seed(seed: Any) -> int:
    """Return a seed as an int, or raise unless it is one from 0 to 2**63 − 1."""
    if not is_int(seed):
        raise TypeError(f"seed={seed!r}: must be an integer from 0 to {MAX_SEED}")
    if not 0 <= seed <= MAX_SEED:
        raise ValueError(f"seed={seed!r}: must be from 0 to {MAX_SEED}")
    return int(seed)


def seeds_as_list(seed: Any) -> Any:
    """Return seeds (B,) that are an array or a tensor as a list, and all else as it is."""
    return as_numpy(seed).tolist() if hasattr(seed, "ndim") else seed


def check_options(options: Any) -> dict[str, Any]:
    """Return the options of a reset, of which there may be none, as a dictionary; raise TypeError on what is none."""
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise TypeError(f"options={options!r}: must be a dictionary, such as {{'episode': 0}}")
    return dict(options)


def requested_state(game: Game, options: dict[str, Any], batch: tuple[int, ...]) -> Any:
    """Return the states (B, ...) that the options of a reset ask for, or None; raise on what the game does not take."""
    chosen = {name: options[name] for name in game.reset_options if options.get(name) is not None}
    state = options.get("state")
    if state is not None and chosen:
        raise ValueError(f"options: state and {', '.join(chosen)} given, must be one of them")
    given = chosen or state
    return None if given is None else game.validate_state(given, batch)


def check_render_mode(game: Game, mode: Any, modes: tuple[str, ...]) -> None:
    """Raise ValueError unless `mode` is None or one of the `modes` of the shell that the game has."""
    allowed = (None, *(one for one in modes if one in game.render_modes))
    try:
        check_choice("render_mode", mode, allowed)
    except ValueError as error:
        needs = "; rendering needs `render_modes` and a method `render_scene`, see noisy_envs.games.game.Game"
        hint = "" if game.render_modes else needs
        raise ValueError(f"{error}{hint}") from None


def check_initial_state(game: Game, state: Any, seeds: Array, numbers: Array) -> None:
    """Raise ValueError if a starting state that the game itself drew, of B worlds, is over; one that is given may be.

    On a GPU it waits for the device.
    """
    if not game.terminates:
        return
    over = as_numpy(game.terminated(state))
    if over.any():
        world = int(over.argmax())
        raise ValueError(
            f"{game.name}: episode {int(numbers[world])} of seed {int(seeds[world])} is over before its first step: "
            "`initial` must draw states that are not `terminated`"
        )


def check_game(game: Game, state: Any, learners: slice, key: Array) -> None:
    """Raise ValueError, naming what does not fit, unless a game gives what the shells take.

    The rules of a user are tried for one step, which is then dropped; ours are tested, and only what they show is
    looked at. On a GPU it waits for the device.

    Args:
        game: the game.
        state: of B worlds that begin.
        learners: the n agents that are driven.
        key: (B, 2) keys of the episodes.
    """
    lead = len(key), learners.stop - learners.start
    own = type(game) not in GAMES.values()
    if own:
        _check_start_state(game, state, key)
    seen = game.observe(state, learners)
    _check_seen(game, seen, lead, key)
    if not own:
        return
    before = [as_numpy(field).tobytes() for field in state]
    after = _last_action_played(game, state, key)
    _check_next_state(game, after, state)
    if before != [as_numpy(field).tobytes() for field in state]:
        raise ValueError(f"{game.name}: `transition` changed the state that it was given: must return new arrays")
    later = game.observe(after, learners)
    _check_seen(game, later, lead, key)
    if _share_memory(seen, later) and not any(_share_memory(field, later) for field in after):
        raise ValueError(f"{game.name}: `observe` gave the array of its last call: must return a new one")
    _check_given(game, "`reward` gave ", game.reward(after, learners), key, "numbers", lead, ", of worlds and agents")
    if game.terminates:
        for member in ("terminated", "success"):
            _check_given(game, f"`{member}` gave ", getattr(game, member)(after), key, "bool", lead[:1], ", of worlds")
    if hasattr(game, "token_spec"):  # pictures have none
        for member in ("signal_mask", "token_mask"):
            given, wanted = getattr(game, member)(later), tuple(later.shape[:-1])
            _check_given(game, f"`{member}` gave ", given, key, "bool", wanted, ", of the tokens that it got")


def _last_action_played(game: Game, state: Any, key: Array) -> Any:
    """Return the state after a first step in which all agents take the last action, or the highest numbers."""
    xp, agents = namespace(key), (len(key), len(game.agents))
    if game.continuous_actions:
        action = xp.ones((*agents, game.num_actions), dtype=xp.float32, device=key.device)
    else:
        action = xp.full(agents, game.num_actions - 1, dtype=xp.int64, device=key.device)
    return game.transition(
        state, action, game.sample_randomness(uniforms(key, xp.ones_like(key[:, 0]), game.num_step_uniforms))
    )


def _share_memory(one: Array, other: Array) -> bool:
    """Tell whether arrays may lie in the same memory; on a GPU that is not seen."""
    return np.may_share_memory(as_numpy(one), as_numpy(other))


def _check_start_state(game: Game, state: Any, like: Array) -> None:
    if not hasattr(state, "_fields"):
        raise ValueError(f"{game.name}: `initial` gave {_described(state)}: must be a NamedTuple of arrays (B, ...)")
    for name, field in zip(state._fields, state, strict=True):
        if type(field) is not type(like) or tuple(field.shape[:1]) != (len(like),):
            wanted = f"must be an array ({len(like)}, ...), of worlds"
            raise ValueError(f"{game.name}: `initial` gave {name}={_described(field)}: {wanted}")


def _check_next_state(game: Game, state: Any, before: Any) -> None:
    if type(state) is not type(before):
        raise ValueError(f"{game.name}: `transition` gave {_described(state)}: must be {type(before).__name__}")
    for name, field, old in zip(before._fields, state, before, strict=True):
        _check_given(game, f"`transition` gave {name}=", field, old, _dtype(old), tuple(old.shape), ", as before")


def _check_seen(game: Game, seen: Any, lead: tuple[int, int], like: Array) -> None:
    low, _ = game.observation_bounds
    of = ", of worlds, agents and `observation_bounds`"
    _check_given(game, "`observe` gave ", seen, like, _dtype(low), (*lead, *low.shape), of)
    spec = getattr(game, "token_spec", None)  # pictures have none
    if spec is not None and (spec.num_tokens, spec.num_features) != low.shape:
        raise ValueError(
            f"{game.name}: `token_spec` has {spec.num_tokens} tokens of {spec.num_features} features: must be those of "
            f"`observe`, {low.shape}"
        )


def _check_given(game: Game, told: str, given: Any, like: Array, kind: str, shape: tuple[int, ...], axes: str) -> None:
    """Raise ValueError unless an array has a shape, a dtype, or "numbers" of any, and the library of `like`."""
    if type(given) is type(like) and tuple(given.shape) == shape:
        numbers = kind == "numbers" and namespace(like).isdtype(given.dtype, ("integral", "real floating"))
        if numbers or _dtype(given) == kind:
            return
    library = "" if type(given) is type(like) else f" in a {type(like).__name__}"
    raise ValueError(f"{game.name}: {told}{_described(given)}: must be {kind} {shape}{library}{axes}")


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
        fresh = np.array([random_seed() if one is None else check_seed(one) for one in seed])
    else:
        base = random_seed() if seed is None else check_seed(seed)
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
