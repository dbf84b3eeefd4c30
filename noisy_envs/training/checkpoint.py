"""Checkpoints of runs, and their summaries: found, written atomically, read without running code."""

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
    """Return the checkpoint of a run's folder, or of the only run in a folder, or the one that is given itself.

    Raises:
        ValueError: several runs are in the folder.
    """
    if given.suffix and not given.is_dir():
        return given
    own = given / "checkpoint.pt"
    found = [own] if own.exists() else sorted(given.glob("*/checkpoint.pt"))
    if len(found) > 1:
        raise ValueError(f"{given} holds several runs, name one of them: {', '.join(x.parent.name for x in found)}")
    return found[0] if found else own


def only_runs(paths: Sequence[Path]) -> list[Path]:
    """Return the paths of runs, and name the folders that are none, which `runs/*` holds too.

    If none is a run, all are returned: to load them names what is missing, as it does for a run without a checkpoint.
    """
    found = [
        path for path in paths if not path.is_dir() or (path / "metrics.csv").exists() or checkpoint_path(path).exists()
    ]
    if found and len(found) < len(paths):
        others = ", ".join(str(path) for path in paths if path not in found)
        print(f"no runs, not evaluated: {others}", file=sys.stderr)
    return found or list(paths)


def save_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Save tensors, numbers and texts, atomically."""
    import torch

    buffer = io.BytesIO()
    torch.save(content, buffer)
    write_atomically(path, buffer.getvalue())


def to_tuples(tensors: Any) -> Any:
    """Turn named tuples of tensors into plain ones of copies, which a checkpoint may hold."""
    return tuple(map(to_tuples, tensors)) if isinstance(tensors, tuple) else tensors.clone()


def from_tuples(like: Any, saved: Any) -> Any:
    """Turn plain tuples of tensors back into the named ones of `like`, on its device."""
    if not isinstance(like, tuple):
        return saved.to(like.device)
    return type(like)(*map(from_tuples, like, saved))


def agent_name(path: Path, content: Any) -> str:
    """Return the name of the agent's file that wrote the checkpoint at `path`, whose `content` has been read.

    Raises:
        ValueError: it names none.
    """
    name = content.get("file") if isinstance(content, dict) else None
    if not isinstance(name, str) or not name or Path(name).name != name:  # no path, which would lead elsewhere
        raise ValueError(f"{path} is no checkpoint of agents/ppo_*.py: it names no agent")
    return name


@contextlib.contextmanager
def checkpoint_errors(path: Path) -> Iterator[None]:
    """Let a file that lacks parts, or holds strange ones, end as ValueError that names it."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, RuntimeError, ValueError) as error:
        if str(path) in str(error):  # which tells already what is wrong
            raise
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{path} is not what this program wrote ({type(error).__name__}: {reason}); take another, or begin anew"
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
        with zipfile.ZipFile(path) as archive:  # torch compresses nothing, and a small file could fill the memory
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise ValueError("it is compressed")
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises half a dozen types for a damaged file
        raise ValueError(
            f"{path} is no checkpoint of an agent, or damaged ({type(error).__name__}); take another, or begin anew"
        ) from error
    return content


def _plain(value: Any) -> Any:
    """Replace what JSON lacks, in containers too: NaN and infinity become None, paths become texts."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


def write_summary(path: Path, content: dict[str, Any]) -> None:
    """Write a summary as JSON; what JSON lacks, NaN and infinity, becomes null."""
    write_atomically(path, json.dumps(_plain(content), indent=2, default=str) + "\n")


def read_summary(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object, as `write_summary` writes it.

    Raises:
        ValueError: it is damaged, or something else, naming it.
        OSError: it cannot be read.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # of bytes that are no text, too
        raise ValueError(f"{path} is damaged ({error}): delete it, and it is written again") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged (it holds no object): delete it, and it is written again")
    return found
