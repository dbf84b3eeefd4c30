"""The command line: settings of a dataclass, read by tyro."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

Settings = TypeVar("Settings")


def parse_arguments(
    kind: type[Settings], argv: Sequence[str], default: Settings, description: str | None = None
) -> Settings:
    """Read a dataclass of settings from the command line with tyro; other settings are those of `default`.

    Raises:
        ValueError: a flag is followed by a value, or a path is not text; the message names it.
    """
    import tyro

    flags = {name.replace("_", "-") for name, value in vars(default).items() if isinstance(value, bool)}
    for argument, following in pairwise([*argv, ""]):
        flag, equals, value = argument.replace("_", "-").partition("=")
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
    """Raise ValueError unless a path is UTF-8 text: TensorBoard and CSV files can hold nothing else."""
    if re.search("[\0\ud800-\udfff]", str(path)):
        raise ValueError(f"{name}={str(path)!r}: expected a path in UTF-8")
