"""Settings of a run: the command line, seeds, what a device can hold."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

Settings = TypeVar("Settings")


def parse_arguments(
    kind: type[Settings], argv: Sequence[str], default: Settings, description: str | None = None
) -> Settings:
    """Read the settings of a dataclass from the command line, by tyro; all else is as in `default`.

    Raises:
        ValueError: a flag has a value, or a path is not text, naming it.
    """
    import tyro

    flags = {name.replace("_", "-") for name, value in vars(default).items() if isinstance(value, bool)}
    for word, following in pairwise([*argv, ""]):
        flag, equals, value = word.replace("_", "-").partition("=")
        name = flag.removeprefix("--").removeprefix("no-")
        if flag.startswith("--") and name in flags and (equals or (following and not following.startswith("-"))):
            raise ValueError(f"{flag} {value or following}: expected the flag alone, --{name} or --no-{name}")
    args = tyro.cli(kind, args=argv, default=default, description=description)
    for name, value in vars(args).items():
        for path in value if isinstance(value, tuple) else (value,):
            if isinstance(path, Path):
                check_path(name, path)
    return args


def check_path(name: str, path: Path) -> None:
    """Raise ValueError unless a path is text: TensorBoard and tables cannot hold bytes that are no UTF-8."""
    if re.search("[\0\ud800-\udfff]", str(path)):
        raise ValueError(f"{name}={str(path)!r}: expected a path of UTF-8 text")


def derive_seed(seed: int, purpose: str) -> int:
    """Hash a run's seed and a purpose ("train", "evaluate") to a seed of environments.

    World i takes this seed + i: runs seeded 1, 2, 3 would share worlds if they used their seeds as they are.
    """
    digest = hashlib.blake2b(f"{seed} {purpose}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2


def use_deterministic(on: bool) -> None:
    """Let torch use only kernels that give the same bits each time, or any again. Call it before a GPU is used.

    Sets the environment's CUBLAS_WORKSPACE_CONFIG, which cuBLAS reads when it starts, unless it is set.
    """
    import torch

    if on:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(on)


def check_memory(needs: Mapping[str, int], device: str) -> None:
    """Raise ValueError if a device cannot hold one of `needs`: float32 numbers, by the settings that ask for them.

    Linux grants more memory than there is, and kills the process that uses it.
    """
    import torch

    if torch.device(device).type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
    elif hasattr(os, "sysconf"):
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:  # Windows grants what there is
        return
    for settings, numbers in needs.items():
        if 4 * numbers > total:
            asked, there = (f"{number / 2**30:,.1f} GiB" for number in (4 * numbers, total))
            raise ValueError(f"not enough memory: {settings} need at least {asked}, {device} has {there}")
