"""The table of environment IDs, each a game with options, and their registration with Gymnasium."""

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
from noisy_envs.validation import build, check_choice, unexpected

# entry points, also for games of your own
SINGLE = "noisy_envs.interfaces.gymnasium_env:TokenEnv"
PICTURES = "noisy_envs.interfaces.gymnasium_env:PictureEnv"  # of games without the render mode "ansi"
VECTOR = "noisy_envs.interfaces.vector_env:TokenVectorEnv"

GAMES: dict[str, Any] = {game.name: game for game in (SimpleCentroid, SimpleTag, BoxWorld)}
GameLike = str | type  # a key of GAMES, "module:Class", or the class of a game

# noise with the role of signal, and starting states that do not depend on its number
UNLABELED = {"num_noise": 28, "noise_role": "signal", "noise_offset": 0.0, "spread": 2.5}

# Ids with sizes are experiments of the paper (section 4.3): agents-signal-noise or predators-prey-obstacles.
# So are BoxWorldEntities and BoxWorldPixels (section 4.4).
ENVIRONMENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "noisy_envs/SimpleCentroid-v0": ("simple_centroid", {}),
    "noisy_envs/SimpleCentroid-1v31v0-v0": ("simple_centroid", {"num_signal": 31, "num_noise": 0}),
    "noisy_envs/SimpleCentroid-1v15v16-v0": ("simple_centroid", {"num_signal": 15, "num_noise": 16}),
    "noisy_envs/SimpleCentroid-1v3v28-v0": ("simple_centroid", {"num_signal": 3, "num_noise": 28}),
    "noisy_envs/SimpleCentroid-1v1v30-v0": ("simple_centroid", {"num_signal": 1, "num_noise": 30}),
    "noisy_envs/SimpleCentroidStill-v0": ("simple_centroid", UNLABELED),
    "noisy_envs/SimpleCentroidOrbit-v0": ("simple_centroid", {**UNLABELED, "noise_motion": "orbit"}),
    "noisy_envs/SimpleCentroidFollow-v0": ("simple_centroid", {**UNLABELED, "noise_motion": "follow"}),
    "noisy_envs/SimpleCentroidAlike-v0": ("simple_centroid", {**UNLABELED, "noise_motion": "wander"}),
    "noisy_envs/SimpleTag-v0": ("simple_tag", {}),
    "noisy_envs/SimpleTag-1v3v0-v0": ("simple_tag", {"num_obstacles": 0}),
    "noisy_envs/SimpleTag-1v3v4-v0": ("simple_tag", {"num_obstacles": 4}),
    "noisy_envs/SimpleTag-1v3v12-v0": ("simple_tag", {"num_obstacles": 12}),
    "noisy_envs/SimpleTag-1v3v28-v0": ("simple_tag", {"num_obstacles": 28}),
    "noisy_envs/SimpleTagMPE-v0": ("simple_tag", MPE),
    "noisy_envs/SimpleTagDecoys-v0": ("simple_tag", {"num_obstacles": 0, "num_noise": 4, "noise_role": "signal"}),
    "noisy_envs/BoxWorld-v0": ("box_world", {}),
    "noisy_envs/BoxWorldEntities-v0": ("box_world", {"observation": "entities"}),
    "noisy_envs/BoxWorldPixels-v0": ("box_world", {"observation": "pixels"}),
    "noisy_envs/BoxWorldDecoys-v0": ("box_world", {"num_noise": 6, "noise_role": "signal"}),
    "noisy_envs/BoxWorldClutter-v0": (
        "box_world",
        {"observation": "pixels", "num_noise": 12, "noise_role": "signal", "noise_motion": "wander"},
    ),
}

OTHER = "other Gymnasium environments"  # the game of all IDs outside the table, see `training.gymnasium_envs`
PARALLEL = {"simple_centroid_v0": "noisy_envs/SimpleCentroid-v0", "simple_tag_v0": "noisy_envs/SimpleTag-v0"}


def find(env_id: str, setting: str = "env_id") -> tuple[str, dict[str, Any]]:
    """Return the game and the options of an environment ID; the game is OTHER if the table lacks the ID.

    Raises:
        ValueError: see `canonical_id`.
    """
    return ENVIRONMENTS.get(canonical_id(env_id, setting), (OTHER, {}))


def noise_option(env_id: str) -> str:
    """Return the option that sets the amount of noise: in SimpleTag the obstacles, as in the paper, or the decoys.

    Raises:
        ValueError: see `canonical_id`.
    """
    game, parameters = find(env_id)
    return "num_obstacles" if game == SimpleTag.name and "num_noise" not in parameters else "num_noise"


def canonical_id(env_id: str, setting: str = "env_id") -> str:
    """Return an ID as in the table, or unchanged if the table lacks it; import the module of `module:Id-v0`.

    Raises:
        ValueError: the import fails, or the ID is not registered; the message names the `setting`.
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
            raise ValueError(f"{reason}expected an ID that {module} registers") from None
        expected = "an ID that `python -m noisy_envs` lists, another Gymnasium ID, or module:Id-v0"
        raise ValueError(f"{reason}{_suggestion(name)}expected {expected}") from None
    return env_id


def short_name(env_id: str) -> str:
    """Return an ID without module and namespace, as a valid file name on every system."""
    return re.sub(r"[^\w.-]", "-", re.split("[/:]", env_id)[-1])


def join_names(games: Iterable[str]) -> str:
    """List games in a message by their class names: "SimpleCentroid, SimpleTag and BoxWorld"."""
    names = [GAMES[game].__name__ if game in GAMES else game for game in games]
    return " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)


def _import(module: str, argument: str) -> None:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = f"{module}.".startswith(f"{error.name}.")
        hint = "its folder must be on PYTHONPATH" if missing else f"{module} imports it"
        raise ValueError(f"{argument}: {one_line(error)}; {hint}") from None
    except Exception as error:  # the user's module may raise anything
        *_, last = traceback.extract_tb(error.__traceback__)
        # the message of a SyntaxError contains the place
        place = "" if isinstance(error, SyntaxError) else f" ({last.filename}, line {last.lineno})"
        reason = f"importing {module} failed with {type(error).__name__}: {one_line(error)}{place}"
        raise ValueError(f"{argument}: {reason}") from error


def one_line(error: Exception | str) -> str:
    """Return a message in one line, without a final full stop."""
    return " ".join(str(error).split()).rstrip(".")


def _suggestion(name: str) -> str:
    """Return a question with the known ID nearest to a name, which may lack namespace and version."""
    known: dict[str, str] = {}
    for env_id in ENVIRONMENTS:
        short = short_name(env_id)
        known |= dict.fromkeys((env_id, short, short.removesuffix("-v0")), env_id)
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {known[near[0]]!r}? " if near else ""


def game_class(game: GameLike) -> type:
    """Return the class of a game.

    Raises:
        ValueError: a name that is neither a key of GAMES nor "module:Class".
        ImportError, AttributeError: "module:Class" does not exist.
        TypeError: not the class of a dataclass.
    """
    found: Any = game
    if isinstance(game, str) and ":" in game:
        module, name = game.split(":", 1)
        found = getattr(importlib.import_module(module), name)
    elif isinstance(game, str):
        check_choice("game", game, tuple(GAMES))
        found = GAMES[game]
    if not isinstance(found, type) or not dataclasses.is_dataclass(found):
        raise unexpected("game", game, "the class of a frozen dataclass", TypeError)
    return found


def eval_levels(
    env_id: str, options: dict[str, Any] | None = None, trained: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the options with which an evaluation draws levels that training did not draw.

    They are {} for games without levels, and if the levels of `options` do not overlap those of `trained`, the options
    in training (by default the same). Otherwise levels start after the last training level.
    """
    game, parameters = find(env_id)
    if game != BoxWorld.name:
        return {}

    def levels(options: dict[str, Any] | None) -> range:
        merged = {"start_level": BoxWorld.start_level, "num_levels": BoxWorld.num_levels} | parameters | (options or {})
        return range(merged["start_level"], merged["start_level"] + merged["num_levels"])

    evaluation, training = levels(options), levels(options if trained is None else trained)
    overlap = evaluation.start < training.stop and training.start < evaluation.stop
    return {"start_level": training.stop} if overlap else {}


def fixed_start(env_id: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the option that keeps the distribution of starting states when the amount of noise changes.

    It is the `spread` of SimpleCentroid with the largest number of entities that `options` allow. In the other games
    noise does not affect where agents and signal start: {}.

    Raises:
        ValueError, TypeError: unknown option, or invalid value.
    """
    game, parameters = find(env_id)
    return {"spread": build(GAMES[game], parameters | options).largest_spread} if game == SimpleCentroid.name else {}


def same_start(env_id: str, options: dict[str, Any], like: tuple[str, dict[str, Any]] | None = None) -> dict[str, Any]:
    """Return what to add to `options` so that the amount of noise does not affect the starting states.

    These states are then those of `like`, an ID and its options, by default `env_id` and `options`. The result is {} if
    `options` set the spread, or if the starting states agree anyway.
    """
    start, own = fixed_start(*(like or (env_id, options))), fixed_start(env_id, options)
    if not own or "spread" in options:
        return {}
    game, parameters = find(env_id)
    return start if start != own or build(GAMES[game], parameters | options).padded else {}


def register() -> None:
    """Register all environment IDs with Gymnasium; safe to repeat."""
    for env_id, (game, parameters) in ENVIRONMENTS.items():
        if env_id not in gymnasium.registry:
            gymnasium.register(
                env_id,
                entry_point=SINGLE if "ansi" in GAMES[game].render_modes else PICTURES,
                vector_entry_point=VECTOR,
                kwargs={"game": game, **parameters},
            )
