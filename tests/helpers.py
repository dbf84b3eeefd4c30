"""What tests share to make, play and compare environments, and to train agents."""

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from noisy_envs.arrays import as_numpy

ROOT = Path(__file__).parents[1]


def with_path(*folders: Path) -> dict[str, str]:
    """Return the environment of a process that looks for modules in these folders first."""
    known = os.environ.get("PYTHONPATH", "")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, folders), *([known] if known else [])])}


def make(env_id: str, **options: Any) -> gymnasium.Env:
    """Make a single environment without wrappers."""
    return gymnasium.make(env_id, **options).unwrapped


def module(game: str) -> Any:
    """Import the PettingZoo module of a game."""
    return importlib.import_module(f"noisy_envs.{game}_v0")


def load_agent(head: str) -> Any:
    """Import the agent of a head, which is in no package, under its file's name."""
    from noisy_envs.rendering.agent_policy import load_file  # needs torch

    return load_file(f"ppo_{head}", ROOT / "agents")


def load_supervised(name: str) -> Any:
    """Import a module of supervised/, which is no package: it and the siblings it imports go by their files' names."""
    folder = str(ROOT / "supervised")
    sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(folder)


TINY = ["--num-envs", "4", "--num-steps", "16", "--minibatch-size", "32", "--update-epochs", "1"]
TINY += ["--no-anneal-lr", "--eval-episodes", "3", "--no-capture-video"]


def train_tiny(agent: Any, folder: Path, *words: str) -> tuple[dict[str, Any], Path]:
    """Train for two updates or as long as asked, in a new folder: the run's summary and folder."""
    from noisy_envs.training.main import main

    length = [] if "--total-timesteps" in words else ["--total-timesteps", "128"]
    summary = main(agent, [*TINY, *length, "--run-dir", str(folder), *words])
    (run,) = folder.iterdir()
    return summary, run


def draw_actions(space: gymnasium.Space, count: int, seed: int = 0) -> list[Any]:
    """Sample actions; the space's own generator is left as it was new."""
    space.seed(seed)
    return [space.sample() for _ in range(count)]


def still(space: gymnasium.Space) -> Any:
    """Return the action of zeros."""
    return space.sample() * 0


def to_backend(array: np.ndarray, backend: str) -> Any:
    """Return an array as the backend's."""
    if backend == "numpy":
        return array
    import torch

    return torch.from_numpy(np.array(array))


def play(env: Any, actions: list[Any], **reset: Any) -> list[Any]:
    """Reset (if keywords are given) and step a single or a vector environment: all that it returned.

    A single environment is reset, without seed, when its episode ends.
    """
    seen: list[Any] = [env.reset(**reset)] if reset else []
    for action in actions:
        seen.append(env.step(action))
        if not isinstance(env, gymnasium.vector.VectorEnv) and (seen[-1][2] or seen[-1][3]):
            seen.append(env.reset())
    return seen


def play_parallel(env: Any, actions: list[Any], **reset: Any) -> list[Any]:
    """Do the same with PettingZoo's parallel view: `actions` are dictionaries."""
    seen: list[Any] = [env.reset(**reset)] if reset else []
    for action in actions:
        seen.append(env.step(action))
        if not env.agents:
            seen.append(env.reset())
    return seen


def assert_same(a: Any, b: Any, where: str = "result") -> None:
    """Demand equality to the bit, in nested containers too: types, keys, dtypes, shapes and values."""
    assert type(a) is type(b), f"{where}: {type(a)} and {type(b)}"
    if isinstance(a, dict):
        assert a.keys() == b.keys(), f"{where}: keys {sorted(a)} and {sorted(b)}"
        for key in a:
            assert_same(a[key], b[key], f"{where}[{key!r}]")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), f"{where}: lengths {len(a)} and {len(b)}"
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}[{i}]")
    elif type(a).__module__ in ("numpy", "torch"):
        assert a.dtype == b.dtype, f"{where}: {a.dtype} and {b.dtype}"
        a, b = as_numpy(a), as_numpy(b)
        assert a.shape == b.shape, f"{where}: shapes {a.shape} and {b.shape}"
        if a.dtype == object:
            assert_same(a.tolist(), b.tolist(), where)
        elif not (a == b).all():  # NumPy's own check, which takes NaN for equal, is slow
            np.testing.assert_array_equal(a, b, err_msg=where)
    else:
        assert a == b, f"{where}: {a} and {b}"
