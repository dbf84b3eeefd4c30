"""All environment ids, in one table: id -> game and parameters."""

from __future__ import annotations

import importlib
import re
from typing import Any

import gymnasium

from noisy_envs.cores.box_world import BoxWorld
from noisy_envs.cores.simple_centroid import SimpleCentroid
from noisy_envs.cores.simple_tag import MPE, SimpleTag
from noisy_envs.options import check_choice, did_you_mean

CORES: dict[str, type] = {core.name: core for core in (SimpleCentroid, SimpleTag, BoxWorld)}
Game = str | type  # a key of CORES, or a core's class, which may be a user's own, or where that is: "module:Class"

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

FOREIGN = "foreign environments"  # the game of an id that is not ours, see `noisy_envs.foreign`

# the options that dial noise, and that say how many agents share one network
NOISE = {"simple_centroid": "num_noise", "simple_tag": "num_obstacles", FOREIGN: "num_noise"}
LEARNERS = {"simple_centroid": "num_agents", "simple_tag": "num_predators"}
PARALLEL = {"simple_centroid_v0": "noisy_envs/SimpleCentroid-v0", "simple_tag_v0": "noisy_envs/SimpleTag-v0"}


def find(env_id: str, setting: str = "env_id") -> tuple[str, dict[str, Any]]:
    """Return game and parameters of an id of the table, and FOREIGN for any other that Gymnasium knows.

    Raises:
        ValueError: nobody knows it; the message names the `setting`.
    """
    if env_id in ENVIRONMENTS:
        return ENVIRONMENTS[env_id]
    try:
        gymnasium.spec(env_id)
    except (gymnasium.error.Error, ImportError) as error:
        hint = did_you_mean(env_id, ENVIRONMENTS)
        known = f"must be one of {', '.join(ENVIRONMENTS)}, or another id of Gymnasium"
        raise ValueError(f"{setting}={env_id!r}: {hint}{known} ({str(error).rstrip('.')})") from None
    return FOREIGN, {}


def short_name(env_id: str) -> str:
    """Return an id without module and namespace, of letters that the name of a file may have on any system."""
    return re.sub(r"[^\w.-]", "-", re.split("[/:]", env_id)[-1])


def core_class(game: Game) -> type:
    """Return the class of a game's rules.

    Raises:
        ValueError: it is neither one of ours nor "module:Class".
        ImportError: there is no such module.
        AttributeError: it has no such class.
    """
    if not isinstance(game, str):
        return game
    if ":" in game:
        module, name = game.split(":", 1)
        found: type = getattr(importlib.import_module(module), name)
        return found
    check_choice("game", game, tuple(CORES))
    return CORES[game]


def held_out(env_id: str, options: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the options with which to evaluate what an environment has taught, beside seeds of their own.

    Where training draws from a finite bank of levels, by the `options` it had, they are of the bank that follows.
    """
    game, parameters = find(env_id)
    if game != BoxWorld.name:
        return {}
    bank = {"start_level": BoxWorld.start_level, "num_levels": BoxWorld.num_levels} | parameters | (options or {})
    return {"start_level": bank["start_level"] + bank["num_levels"]}


def register() -> None:
    """Register every id with Gymnasium; again does no harm."""
    for env_id, (game, parameters) in ENVIRONMENTS.items():
        if env_id not in gymnasium.registry:
            gymnasium.register(
                env_id,
                entry_point="noisy_envs.shells.single:TokenEnv",
                vector_entry_point="noisy_envs.shells.vector:TokenVectorEnv",
                kwargs={"game": game, **parameters},
            )
