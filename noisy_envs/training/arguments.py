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
