"""All environment ids, in one table: id -> game and parameters."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import re
import traceback
from collections.abc import Iterable
from typing import Any

import gymnasium

from noisy_envs.games.box_world import BoxWorld
from noisy_envs.games.simple_centroid import SimpleCentroid
from noisy_envs.games.simple_tag import MPE, SimpleTag
from noisy_envs.validation import build, check_choice

SINGLE = "noisy_envs.interfaces.gymnasium_env:TokenEnv"  # entry points, for a game of your own too
PICTURES = "noisy_envs.interfaces.gymnasium_env:PictureEnv"  # of a game that has no render mode "ansi"
VECTOR = "noisy_envs.interfaces.vector_env:TokenVectorEnv"

GAMES: dict[str, Any] = {game.name: game for game in (SimpleCentroid, SimpleTag, BoxWorld)}
GameLike = str | type  # a key of GAMES, or a core's class, which may be a user's own, or where that is: "module:Class"

# The ids with sizes are the paper's experiments (section 4.3), named as there: agents-signal-noise, and
# predators-prey-obstacles; so are BoxWorldEntities and BoxWorldPixels (section 4.4).
ENVIRONMENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "noisy_envs/SimpleCentroid-v0": ("simple_centroid", {}),
    "noisy_envs/SimpleCentroid-1v31v0-v0": ("simple_centroid", {"num_signal": 31, "num_noise": 0}),
    "noisy_envs/SimpleCentroid-1v15v16-v0": ("simple_centroid", {"num_signal": 15, "num_noise": 16}),
    "noisy_envs/SimpleCentroid-1v3v28-v0": ("simple_centroid", {"num_signal": 3, "num_noise": 28}),
    "noisy_envs/SimpleCentroid-1v1v30-v0": ("simple_centroid", {"num_signal": 1, "num_noise": 30}),
    "noisy_envs/SimpleTag-v0": ("simple_tag", {}),
    "noisy_envs/SimpleTag-1v3v0-v0": ("simple_tag", {"num_obstacles": 0}),
    "noisy_envs/SimpleTag-1v3v4-v0": ("simple_tag", {"num_obstacles": 4}),
    "noisy_envs/SimpleTag-1v3v12-v0": ("simple_tag", {"num_obstacles": 12}),
    "noisy_envs/SimpleTag-1v3v28-v0": ("simple_tag", {"num_obstacles": 28}),
    "noisy_envs/SimpleTagMPE-v0": ("simple_tag", MPE),
    "noisy_envs/BoxWorld-v0": ("box_world", {}),
    "noisy_envs/BoxWorldEntities-v0": ("box_world", {"observation": "entities"}),
    "noisy_envs/BoxWorldPixels-v0": ("box_world", {"observation": "pixels"}),
}

OTHER = "environments of others"  # the game of an id that is not ours, see `noisy_envs.training.gymnasium_envs`

# the options that dial noise, and that say how many agents share one network
NOISE = {"simple_centroid": "num_noise", "simple_tag": "num_obstacles", OTHER: "num_noise"}
LEARNERS = {"simple_centroid": "num_agents", "simple_tag": "num_predators"}
PARALLEL = {"simple_centroid_v0": "noisy_envs/SimpleCentroid-v0", "simple_tag_v0": "noisy_envs/SimpleTag-v0"}


def find(env_id: str, setting: str = "env_id") -> tuple[str, dict[str, Any]]:
    """Return game and parameters of an id of the table, and FOREIGN for any other that Gymnasium knows.

    Raises:
        ValueError: see `canonical`.
    """
    return ENVIRONMENTS.get(canonical_id(env_id, setting), (OTHER, {}))


def canonical_id(env_id: str, setting: str = "env_id") -> str:
    """Return an id as the table has it, or as it is given if it is not ours; of `module:Id-v0` import the module.

    Raises:
        ValueError: the module cannot be imported, or nobody knows the id; the message names the `setting`.
    """
    module, _, name = env_id.rpartition(":")
    if module:
        _import(module, f"{setting}={env_id!r}")
    if name in ENVIRONMENTS:
        return name
    try:
        gymnasium.spec(name)
    except (gymnasium.error.Error, ImportError) as error:
        reason = f"{setting}={env_id!r}: {one_line(error)}; ".replace("?; ", "? ")
        if module:
            raise ValueError(f"{reason}must be registered by {module}") from None
        allowed = "one that `python -m noisy_envs` lists, or another id of Gymnasium, module:Id-v0 to import first"
        raise ValueError(f"{reason}{_near(name)}must be {allowed}") from None
    return env_id


def short_name(env_id: str) -> str:
    """Return an id without module and namespace, of letters that the name of a file may have on any system."""
    return re.sub(r"[^\w.-]", "-", re.split("[/:]", env_id)[-1])


def join_names(games: Iterable[str]) -> str:
    """Name games in a message, as the table of environments does."""
    named = [GAMES[game].__name__ if game in GAMES else game for game in games]
    return " and ".join([", ".join(named[:-1]), named[-1]] if named[1:] else named)


def _import(module: str, told: str) -> None:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        own = f"{module}.".startswith(f"{error.name}.")
        hint = "the folder that holds it must be on PYTHONPATH" if own else f"{module} imports it"
        raise ValueError(f"{told}: {one_line(error)}; {hint}") from None
    except Exception as error:  # whatever the user's module raises
        *_, last = traceback.extract_tb(error.__traceback__)
        place = "" if isinstance(error, SyntaxError) else f" ({last.filename}, line {last.lineno})"  # it tells its own
        raise ValueError(
            f"{told}: importing {module} failed with {type(error).__name__}: {one_line(error)}{place}"
        ) from error


def one_line(error: Exception | str) -> str:
    """Return a message without line breaks and without a full stop at its end."""
    return " ".join(str(error).split()).rstrip(".")


def _near(name: str) -> str:
    """Ask for the id of the table that is nearest to a name, which may lack namespace and version."""
    known = {
        word: env_id
        for env_id in ENVIRONMENTS
        for word in (env_id, short_name(env_id), short_name(env_id)[: -len("-v0")])
    }
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {known[near[0]]!r}? " if near else ""


def game_class(game: GameLike) -> type:
    """Return the class of a game's rules.

    Raises:
        ValueError: it is neither one of ours nor "module:Class".
        ImportError: there is no such module.
        AttributeError: it has no such class.
        TypeError: it is no class, or no dataclass.
    """
    found: Any = game
    if isinstance(game, str) and ":" in game:
        module, name = game.split(":", 1)
        found = getattr(importlib.import_module(module), name)
    elif isinstance(game, str):
        check_choice("game", game, tuple(GAMES))
        found = GAMES[game]
    if not isinstance(found, type) or not dataclasses.is_dataclass(found):
        raise TypeError(f"game={game!r}: must be a frozen dataclass, the class itself")
    return found


def eval_levels(
    env_id: str, options: dict[str, Any] | None = None, trained: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return what to add to the `options` of an evaluation, beside seeds of its own.

    Where an environment draws from a bank of levels, and training drew any of these, by the options `trained` that it
    had (by default the same), it is the first level after training's bank.
    """
    game, parameters = find(env_id)
    if game != BoxWorld.name:
        return {}

    def bank(options: dict[str, Any] | None) -> range:
        own = {"start_level": BoxWorld.start_level, "num_levels": BoxWorld.num_levels} | parameters | (options or {})
        return range(own["start_level"], own["start_level"] + own["num_levels"])

    asked, known = bank(options), bank(options if trained is None else trained)
    return {"start_level": known.stop} if asked.start < known.stop and known.start < asked.stop else {}


def start_of(env_id: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the option by which other worlds start as those of an id with its options, at their largest numbers.

    That is SimpleCentroid's `spread`; in all other games noise moves neither agents nor signal, and it is {}.

    Raises:
        ValueError, TypeError: an option that the game does not take.
    """
    game, parameters = find(env_id)
    return {"spread": build(GAMES[game], parameters | options).largest_spread} if game == SimpleCentroid.name else {}


def same_start(env_id: str, options: dict[str, Any], like: tuple[str, dict[str, Any]] | None = None) -> dict[str, Any]:
    """Return what to add to the `options` of an id, so that another noise changes the noise alone, see `start_of`.

    It is nothing where they say it themselves, or worlds start alike without. `like` are an id and options to start
    as; without, ranges among `options` start as their largest numbers do, so that a start tells no number.
    """
    start, own = start_of(*(like or (env_id, options))), start_of(env_id, options)
    if not own or "spread" in options:
        return {}
    game, parameters = find(env_id)
    return start if start != own or build(GAMES[game], parameters | options).padded else {}


def register() -> None:
    """Register every id with Gymnasium; again does no harm."""
    for env_id, (game, parameters) in ENVIRONMENTS.items():
        if env_id not in gymnasium.registry:
            gymnasium.register(
                env_id,
                entry_point=SINGLE if "ansi" in GAMES[game].render_modes else PICTURES,
                vector_entry_point=VECTOR,
                kwargs={"game": game, **parameters},
            )
