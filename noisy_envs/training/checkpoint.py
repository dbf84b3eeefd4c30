"""Checkpoints and summaries of runs: found, written atomically, and read without running code from them."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from noisy_envs.training.files import write_atomically


def checkpoint_path(given: Path) -> Path:
    """Return the checkpoint in a run's folder, or of the only run in a folder; a file is returned as it is.

    Raises:
        ValueError: the folder holds several runs.
    """
    if given.suffix and not given.is_dir():
        return given
    path = given / "checkpoint.pt"
    paths = [path] if path.exists() else sorted(given.glob("*/checkpoint.pt"))
    if len(paths) > 1:
        raise ValueError(f"{given} holds several runs, name one of them: {', '.join(x.parent.name for x in paths)}")
    return paths[0] if paths else path


def only_runs(paths: Sequence[Path]) -> list[Path]:
    """Return the paths that are runs, and print the other folders, which `runs/*` includes too.

    If none is a run, all are returned, and loading them reports what is missing.
    """
    found = [
        path for path in paths if not path.is_dir() or (path / "metrics.csv").exists() or checkpoint_path(path).exists()
    ]
    if found and len(found) < len(paths):
        others = ", ".join(str(path) for path in paths if path not in found)
        print(f"not evaluated, because they are not runs: {others}", file=sys.stderr)
    return found or list(paths)


def save_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Save tensors, numbers and strings atomically."""
    import torch

    buffer = io.BytesIO()
    torch.save(content, buffer)
    write_atomically(path, buffer.getvalue())


def to_tuples(tensors: Any) -> Any:
    """Return named tuples of tensors as plain tuples of copies, which a checkpoint may hold."""
    return tuple(map(to_tuples, tensors)) if isinstance(tensors, tuple) else tensors.clone()


def from_tuples(like: Any, saved: Any) -> Any:
    """Return plain tuples of tensors as the named tuples of `like`, on its device."""
    if not isinstance(like, tuple):
        return saved.to(like.device)
    return type(like)(*map(from_tuples, like, saved))


def join_states(saved: dict[str, Any]) -> dict[str, Any]:
    """Return the state of Adam that an older checkpoint holds for each weight, as that of all weights (W,)."""
    import torch

    (group,), states = saved["param_groups"], list(saved["state"].values())
    parts = {name: [state[name].flatten() for state in states] for name in states[0] if name != "step"}
    joined = {name: torch.cat(part) for name, part in parts.items()} | {"step": states[0]["step"]}
    return {"state": {0: joined}, "param_groups": [{**group, "params": [0]}]}


def agent_name(path: Path, content: Any) -> str:
    """Return the name of the agent's file that wrote the checkpoint at `path`, whose `content` has been read.

    Raises:
        ValueError: the checkpoint names no agent.
    """
    name = content.get("file") if isinstance(content, dict) else None
    if not isinstance(name, str) or not name or Path(name).name != name:  # a path could lead elsewhere
        raise ValueError(f"{path} is not a checkpoint of agents/ppo_*.py: it names no agent")
    return name


@contextlib.contextmanager
def checkpoint_errors(path: Path) -> Iterator[None]:
    """Convert errors that a malformed file causes into a ValueError that names the file."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, RuntimeError, ValueError) as error:
        if str(path) in str(error):  # it names the problem already
            raise
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{path} was not written by this program ({type(error).__name__}: {reason}); use another or start a new run"
        ) from error


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Load a checkpoint onto the CPU, without running code from it.

    Raises:
        FileNotFoundError, ValueError: naming the path.
    """
    import torch

    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}")
    try:
        with zipfile.ZipFile(path) as archive:  # torch never compresses; a small compressed file could fill the memory
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise ValueError("it is compressed")
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises half a dozen types for a damaged file
        raise ValueError(
            f"{path} is not a checkpoint of an agent, or is damaged ({type(error).__name__}); "
            "use another or start a new run"
        ) from error
    return content


def to_json(value: Any) -> Any:
    """Return a value, or a container of values, as JSON can hold it: NaN and infinity as None, paths as strings."""
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


def write_summary(path: Path, content: dict[str, Any]) -> None:
    """Write a summary as JSON; NaN and infinity become null."""
    write_atomically(path, json.dumps(to_json(content), indent=2, default=str) + "\n")


def read_summary(path: Path) -> dict[str, Any]:
    """Read a summary.

    Raises:
        ValueError: the file is damaged, or holds no object.
        OSError: the file cannot be read.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # ValueError: also for bytes that are no text
        raise ValueError(f"{path} is damaged ({error}): delete it, and it will be written again") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged (it holds no object): delete it, and it will be written again")
    return content
