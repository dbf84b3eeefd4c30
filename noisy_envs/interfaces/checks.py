"""Checks of what callers pass to an interface (actions, seeds, options of a reset) and of what a game returns."""

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
from noisy_envs.validation import check_choice, check_count, is_int, unexpected

MAX_EPISODE = 2**62 - 1  # as an option of a reset; leaves room for the following episodes


def check_action(game: Game, action: Any) -> np.ndarray:
    """Return one agent's action as an array without batch axis, or raise.

    Raises:
        ValueError: wrong shape, NaN or infinity, or out of range.
        TypeError: a discrete action that is not an integer.
    """
    if game.continuous_actions:
        array = np.asarray(action, dtype=np.float32)
        if array.shape != (game.num_actions,) or not all(map(math.isfinite, array.tolist())):
            raise unexpected("action", action, f"{game.num_actions} finite numbers")
        return array
    array = np.asarray(action)
    if array.shape != () or array.dtype.kind not in "iu":
        raise unexpected("action", action, f"an integer from 0 to {game.num_actions - 1}", TypeError)
    number = int(array)
    if not 0 <= number < game.num_actions:
        raise unexpected("action", action, f"0 to {game.num_actions - 1}")
    return np.array(number)  # int64: arithmetic with uint64 would give floats


def random_seed() -> int:
    """Return a seed from the operating system's entropy."""
    return secrets.randbits(62)


def check_seed(seed: Any) -> int:
    """Return a seed as an int, or raise unless it is an integer from 0 to 2**63 − 1."""
    if not is_int(seed):
        raise unexpected("seed", seed, f"an integer from 0 to {MAX_SEED}", TypeError)
    if not 0 <= seed <= MAX_SEED:
        raise unexpected("seed", seed, f"0 to {MAX_SEED}")
    return int(seed)


def seeds_as_list(seed: Any) -> Any:
    """Return an array or tensor of seeds (B,) as a list, and anything else unchanged."""
    return as_numpy(seed).tolist() if hasattr(seed, "ndim") else seed


def check_options(options: Any) -> dict[str, Any]:
    """Return the options of a reset as a dictionary; raise TypeError unless they are None or a mapping."""
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise unexpected("options", options, "a dictionary, for example {'episode': 0}", TypeError)
    return dict(options)


def requested_state(game: Game, options: dict[str, Any], batch: tuple[int, ...]) -> Any:
    """Return the validated starting states (B, ...) that the options of a reset ask for, or None."""
    own = {name: options[name] for name in game.reset_options if options.get(name) is not None}
    state = options.get("state")
    if state is not None and own:
        raise ValueError(f"options: expected either state or {', '.join(own)}, got both")
    given = own or state
    return None if given is None else game.validate_state(given, batch)


def check_render_mode(game: Game, mode: Any, modes: tuple[str, ...]) -> None:
    """Raise ValueError unless `mode` is None, or one of `modes` that the game supports."""
    allowed = (None, *(each for each in modes if each in game.render_modes))
    try:
        check_choice("render_mode", mode, allowed)
    except ValueError as error:
        needs = "; rendering needs `render_modes` and a method `render_scene`, see noisy_envs.games.game.Game"
        raise ValueError(f"{error}{'' if game.render_modes else needs}") from None


def check_initial_state(game: Game, state: Any, seeds: Array, numbers: Array) -> None:
    """Raise ValueError if `initial` drew a terminal state; waits for a GPU."""
    if not game.terminates:
        return
    terminal = as_numpy(game.terminated(state))
    if terminal.any():
        i = int(terminal.argmax())
        episode = f"episode {int(numbers[i])} of seed {int(seeds[i])}"
        raise ValueError(f"{game.name}: {episode} starts in a terminal state, which `initial` must not return")


def check_game(game: Game, state: Any, learners: slice, key: Array) -> None:
    """Raise ValueError unless a game returns what the interfaces expect; waits for a GPU.

    A user's game is tried for one step, which is then discarded. Games of this package have tests, and only their first
    observation is checked.

    Args:
        game: the game.
        state: B starting states.
        learners: the n controlled agents.
        key: (B, 2) keys of the episodes.
    """
    lead = len(key), learners.stop - learners.start
    builtin = type(game) in GAMES.values()
    if not builtin:
        _check_start(game, state, key)
    first = game.observe(state, learners)
    _check_observation(game, first, lead, key)
    if builtin:
        return
    before = [as_numpy(field).tobytes() for field in state]
    after = _play_last_action(game, state, key)
    _check_next(game, after, state)
    if before != [as_numpy(field).tobytes() for field in state]:
        raise ValueError(f"{game.name}: `transition` must return new arrays, but it changed its argument `state`")
    second = game.observe(after, learners)
    _check_observation(game, second, lead, key)
    if _share_memory(first, second) and not any(_share_memory(field, second) for field in after):
        raise ValueError(f"{game.name}: `observe` must return a new array, but it returned that of its last call")
    _check_array(game, "`reward`", game.reward(after, learners), key, "numbers", lead, "(B, n) = ")
    if game.terminates:
        for member in ("terminated", "success"):
            _check_array(game, f"`{member}`", getattr(game, member)(after), key, "bool", lead[:1], "(B,) = ")
    if hasattr(game, "token_spec"):  # pictures have none
        masks = {"signal_mask": game.signal_mask(second, after), "token_mask": game.token_mask(second)}
        for member, mask in masks.items():
            shape = tuple(second.shape[:-1])
            _check_array(game, f"`{member}`", mask, key, "bool", shape, "(B, n, N) = ")


def _play_last_action(game: Game, state: Any, key: Array) -> Any:
    """Return the state after a first step in which all agents take the last action, or all ones."""
    xp, agents = namespace(key), (len(key), len(game.agents))
    if game.continuous_actions:
        action = xp.ones((*agents, game.num_actions), dtype=xp.float32, device=key.device)
    else:
        action = xp.full(agents, game.num_actions - 1, dtype=xp.int64, device=key.device)
    u = uniforms(key, xp.ones_like(key[:, 0]), game.num_step_uniforms)
    return game.transition(state, action, game.sample_randomness(u))


def _share_memory(one: Array, other: Array) -> bool:
    """Tell whether two arrays may share memory; False on a GPU."""
    return np.may_share_memory(as_numpy(one), as_numpy(other))


def _check_start(game: Game, state: Any, like: Array) -> None:
    if not hasattr(state, "_fields"):
        raise ValueError(f"{game.name}: `initial`: expected a NamedTuple of arrays, got {_description(state)}")
    for name, field in zip(state._fields, state, strict=True):
        if type(field) is not type(like) or tuple(field.shape[:1]) != (len(like),):
            expected = f"{type(like).__name__} (B, ...) = ({len(like)}, ...)"
            raise ValueError(f"{game.name}: `initial` {name}: expected {expected}, got {_description(field)}")


def _check_next(game: Game, state: Any, before: Any) -> None:
    if type(state) is not type(before):
        expected = type(before).__name__
        raise ValueError(f"{game.name}: `transition`: expected {expected}, got {_description(state)}")
    for name, field, old in zip(before._fields, state, before, strict=True):
        _check_array(game, f"`transition` {name}", field, old, _dtype(old), tuple(old.shape))


def _check_observation(game: Game, observation: Any, lead: tuple[int, int], like: Array) -> None:
    low, _ = game.observation_bounds
    _check_array(game, "`observe`", observation, like, _dtype(low), (*lead, *low.shape), "(B, n, ...) = ")
    spec = getattr(game, "token_spec", None)  # pictures have none
    if spec is not None and (spec.num_tokens, spec.num_features) != low.shape:
        got = f"{spec.num_tokens} tokens of {spec.num_features} features"
        raise ValueError(f"{game.name}: `token_spec`: expected the shape of observations, {low.shape}, got {got}")


def _check_array(
    game: Game, name: str, array: Any, like: Array, dtype: str, shape: tuple[int, ...], axes: str = ""
) -> None:
    """Raise ValueError unless an array has the library of `like`, a dtype (or any of "numbers") and a shape."""
    if type(array) is type(like) and tuple(array.shape) == shape:
        numbers = dtype == "numbers" and namespace(like).isdtype(array.dtype, ("integral", "real floating"))
        if numbers or _dtype(array) == dtype:
            return
    expected = f"{type(like).__name__} {dtype} {axes}{shape}"
    raise ValueError(f"{game.name}: {name}: expected {expected}, got {_description(array)}")


def _description(value: Any) -> str:
    name = type(value).__name__
    return f"{name} {_dtype(value)} {tuple(value.shape)}" if hasattr(value, "dtype") else name


def _dtype(array: Array) -> str:
    return str(array.dtype).removeprefix("torch.")


def check_episode(number: Any) -> int | None:
    """Return the option `episode`, a number of 62 bits, or None if it is missing."""
    if number is None:
        return None
    check_count("episode", number, minimum=0, may_be_range=False, maximum=MAX_EPISODE)
    return int(number)


def next_episodes(
    seed: int | Sequence[int | None] | None, number: int | None, old_seeds: np.ndarray, old_numbers: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return seeds and numbers (B,) of the episodes that a reset of B environments starts.

    Args:
        seed: of environment 0, where environment i has seed + i, or a list of B seeds. Environments without a seed
            keep theirs and play the next episode.
        number: of the episodes; by default it follows from the seeds.
        old_seeds: (B,) previous seeds, negative if there is none.
        old_numbers: (B,) numbers of the previous episodes.
    """
    num_envs = len(old_seeds)
    if isinstance(seed, Sequence):
        if len(seed) != num_envs:
            raise ValueError(f"seed: expected {num_envs} seeds, one for each environment, got {len(seed)}")
        given = np.array([each is not None for each in seed])
        seeds = np.array([random_seed() if each is None else check_seed(each) for each in seed])
    else:
        base = random_seed() if seed is None else check_seed(seed)
        if base > MAX_SEED - num_envs:
            raise unexpected("seed", seed, f"at most {MAX_SEED - num_envs} for {num_envs} environments")
        given = np.full(num_envs, seed is not None)
        seeds = base + np.arange(num_envs)
    reseeded = given | (old_seeds < 0)
    numbers = np.where(reseeded, 0, old_numbers + 1) if number is None else np.full(num_envs, number)
    return np.where(reseeded, seeds, old_seeds), numbers


def check_reset_mask(mask: Any, num_envs: int) -> np.ndarray | None:
    """Return the option `reset_mask`, bool (B,), True for environments to reset, or None if it is missing."""
    if mask is None:
        return None
    array = as_numpy(mask)
    if array.shape != (num_envs,) or array.dtype != np.bool_ or not array.any():
        raise unexpected("reset_mask", mask, f"bool ({num_envs},) with at least one True")
    return array
