"""Measure the mean returns of the reference policies in each environment: python tools/measure_baselines.py."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from noisy_envs import ENVIRONMENTS
from noisy_envs.baselines import BaselineReturns, play_baseline
from noisy_envs.training.files import write_atomically
from noisy_envs.training.versions import current_commit

EPISODES, SEED = 4096, 10**6
TABLE = Path(__file__).parents[1] / "noisy_envs" / "baseline_returns.json"


def main() -> None:
    """Play the episodes, print the returns and write the table."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    returns, errors = {}, {}
    for env_id in ENVIRONMENTS:
        played = {name: play_baseline(env_id, name, EPISODES, SEED) for name in BaselineReturns._fields}
        returns[env_id] = {name: round(float(x.mean()), 4) for name, x in played.items()}
        errors[env_id] = {name: round(float(x.std() / np.sqrt(EPISODES)), 4) for name, x in played.items()}
        print(f"{env_id:40s} {returns[env_id]}  standard errors {errors[env_id]}")
    metadata = {"script": "tools/measure_baselines.py", "seed": SEED, "episodes": EPISODES, "commit": current_commit()}
    write_atomically(TABLE, json.dumps({**metadata, "returns": returns, "standard_errors": errors}, indent=2) + "\n")


if __name__ == "__main__":
    main()
