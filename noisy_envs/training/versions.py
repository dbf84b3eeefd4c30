"""What a result depends on: the commit of the code, versions of libraries, the machine."""

from __future__ import annotations

import functools
import multiprocessing
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np


@functools.cache
def current_commit() -> str:
    """Return the current_commit of the code in use, marked "+" if files differ from it, or "unknown" and why.

    It stays what it was when first asked for, as the code that a process has loaded does. The variable
    NOISY_ENVS_COMMIT sets it where code runs without its history, in a container for example. In a checkout whose
    current_commit git does not tell, the reason is printed as well, once.
    """
    given = os.environ.get("NOISY_ENVS_COMMIT")
    if given:
        return given
    file = Path(__file__)

    def git(*words: str) -> str:
        environment = os.environ | {"LC_ALL": "C"}
        try:
            done = subprocess.run(
                ["git", *words], cwd=file.parent, env=environment, capture_output=True, check=True,
                encoding="utf-8", errors="replace",
            )  # fmt: skip
        except subprocess.CalledProcessError as error:
            raise OSError(error.stderr.strip().partition("\n")[0] or str(error)) from None
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", file.name)  # installed, it may lie in a repository of something else
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except OSError as error:
        if not (file.parents[2] / ".git").exists():
            return "unknown (not a git checkout)"
        reason = "git is not installed" if isinstance(error, FileNotFoundError) else str(error)
        remedy = "set NOISY_ENVS_COMMIT to record it"
        if "dubious ownership" in reason:
            remedy = f"run: git config --global --add safe.directory {file.resolve().parents[2]}"
        if multiprocessing.parent_process() is None:  # which says it for its children
            print(f"the current_commit of this code is not recorded: {reason}; {remedy}", file=sys.stderr)
        return f"unknown ({reason})"


def library_versions() -> dict[str, str]:
    """Name what a result depends on: current_commit, library library_versions, machine."""
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
