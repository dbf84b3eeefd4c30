"""Files of runs, one JSON line each: `tools/collect_runs.py` writes them, `tools/make_results.py` reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from noisy_envs import registration

BINS = 40  # of a curve, equal parts of the steps


def level_of(run: dict[str, Any]) -> str:
    """Return the name of a run's environment with its options, such as "SimpleCentroid-1v3v28"."""
    options = [f"{name}={value}" for name, value in run["env_kwargs"].items()]
    return " ".join([registration.short_name(run["env_id"]).removesuffix("-v0"), *options])


def name_of(run: dict[str, Any]) -> str:
    """Return the name of a run, which no other run has: environment, agent, settings, seed."""
    settings = [f"{name}={value}" for name, value in sorted(run["settings"].items())]
    return " ".join([level_of(run), run["agent"], run["preset"], *settings, f"seed {run['seed']}"])


def read_lines(path: Path) -> dict[str, dict[str, Any]]:
    """Read the runs in a file, by name.

    Raises:
        ValueError: naming a line that is no run, or repeats one.
    """
    runs: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            run = json.loads(line)
            name = name_of(run)
        except (ValueError, LookupError, TypeError, AttributeError):
            raise ValueError(f"{path}, line {number}: expected a run as tools/collect_runs.py writes it") from None
        if name in runs:
            raise ValueError(f"{path}, line {number}: expected each run once, got {name} again")
        runs[name] = run
    return runs
