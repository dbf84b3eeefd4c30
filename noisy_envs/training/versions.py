"""Versions that a result depends on: the commit of the code, libraries, the machine."""

from __future__ import annotations

import functools
import multiprocessing
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np


@functools.cache
def current_commit() -> str:
    """Return the commit of the code in use, with "+" if files differ from it, or "unknown" and the reason.

    The first result is kept, because a process keeps the code that it has loaded. The environment variable
    NOISY_ENVS_COMMIT overrides it where code runs without its history, in a container for example. If git fails in a
    checkout, the reason is also printed, once.
    """
    override = os.environ.get("NOISY_ENVS_COMMIT")
    if override:
        return override
    file = Path(__file__)

    def git(*arguments: str) -> str:
        environment = os.environ | {"LC_ALL": "C"}
        try:
            process = subprocess.run(
                ["git", *arguments], cwd=file.parent, env=environment, capture_output=True, check=True,
                encoding="utf-8", errors="replace",
            )  # fmt: skip
        except subprocess.CalledProcessError as error:
            raise OSError(error.stderr.strip().partition("\n")[0] or str(error)) from None
        return process.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", file.name)  # an installed file may lie in another project's repository
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except OSError as error:
        if not (file.parents[2] / ".git").exists():
            return "unknown (not a git checkout)"
        reason = "git is not installed" if isinstance(error, FileNotFoundError) else str(error)
        remedy = "set NOISY_ENVS_COMMIT to record it"
        if "dubious ownership" in reason:
            remedy = f"run: git config --global --add safe.directory {file.resolve().parents[2]}"
        if multiprocessing.parent_process() is None:  # the parent prints it for its children
            print(f"the commit of this code is not recorded: {reason}; {remedy}", file=sys.stderr)
        return f"unknown ({reason})"


def library_versions() -> dict[str, str]:
    """Return what a result depends on: commit, versions of libraries, machine."""
    import gymnasium
    import torch

    import noisy_envs

    return {
        "commit": current_commit(),
        "noisy_envs": noisy_envs.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": str(torch.__version__),
        "gymnasium": gymnasium.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, {torch.get_num_threads()} torch threads",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }


def merge_versions(summaries: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return the versions of several runs' summaries, different ones separated by commas."""
    merged: dict[str, dict[str, None]] = {}
    for summary in summaries:
        for name, version in summary["versions"].items():
            merged.setdefault(name, {})[version] = None
    return {name: ", ".join(versions) for name, versions in merged.items()}
