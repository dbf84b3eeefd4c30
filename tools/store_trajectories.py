"""Store a trajectory of each new environment ID: python tools/store_trajectories.py. Existing files do not change.

tests/data/trajectories/NAME.npz holds an episode of seed 0: `actions` (T, ...), tokens or images `seen` (T + 1, ...),
`rewards` (T,), and `words` (5,), the first random numbers of the episode as integers. Do not replace the file of an ID
whose episodes have changed: raise the ID's version instead, so that published results stay valid.
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from noisy_envs import ENVIRONMENTS
from noisy_envs.randomness import episode_key, uniforms
from noisy_envs.training.files import write_atomically

FOLDER = Path(__file__).parents[1] / "tests" / "data" / "trajectories"
STEPS = 40


def path_of(env_id: str) -> Path:
    """Return the file of an environment ID."""
    return FOLDER / f"{env_id.split('/')[1]}.npz"


def first_draws() -> np.ndarray:
    """Return the first random numbers (5,) of episode 0 of seed 0, as integers below 2**24."""
    (drawn,) = uniforms(episode_key(np.zeros(1, np.int64), np.zeros(1, np.int64)), np.zeros(1, np.int64), (5,))
    return np.asarray(drawn[0] * 2**24, np.int64)


def play(env_id: str) -> dict[str, np.ndarray]:
    """Play at most `STEPS` random steps of the episode of seed 0."""
    env = gymnasium.make(env_id)
    env.action_space.seed(0)
    seen, actions, rewards = [env.reset(seed=0)[0]], [], []
    for _ in range(STEPS):
        actions.append(env.action_space.sample())
        observation, reward, terminated, truncated, _ = env.step(actions[-1])
        seen.append(observation)
        rewards.append(reward)
        if terminated or truncated:
            break
    env.close()
    return {"actions": np.array(actions), "seen": np.array(seen), "rewards": np.array(rewards), "words": first_draws()}


def store(path: Path, arrays: dict[str, Any]) -> None:
    """Write an archive atomically."""
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)
    write_atomically(path, content.getvalue())


def main() -> None:
    """Store the missing trajectories."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    FOLDER.mkdir(exist_ok=True)
    for env_id in ENVIRONMENTS:
        path = path_of(env_id)
        if not path.exists():
            store(path, play(env_id))
            print(f"stored {path.name}, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
