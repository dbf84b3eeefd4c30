"""Store how each id plays: python tools/store_trajectories.py adds the ids that are new, and changes none.

tests/data/trajectories/NAME.npz holds, of an episode of seed 0: the actions (T, ...), tokens or pictures (T + 1, ...),
rewards (T,), and `words` (5,), the integers of the random numbers drawn at the start of that episode, first of all. An
id whose file no longer fits must not be stored anew: its version rises, so that published results keep their meaning.
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
    """Return the file of an id."""
    return FOLDER / f"{env_id.split('/')[1]}.npz"


def words() -> np.ndarray:
    """Return the first random numbers (5,) of episode 0 of seed 0, as integers below 2**24."""
    (drawn,) = uniforms(episode_key(np.zeros(1, np.int64), np.zeros(1, np.int64)), np.zeros(1, np.int64), (5,))
    return np.asarray(drawn[0] * 2**24, np.int64)


def play(env_id: str) -> dict[str, np.ndarray]:
    """Play an episode of seed 0 by random actions, or as far as it goes in T steps."""
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
    return {"actions": np.array(actions), "seen": np.array(seen), "rewards": np.array(rewards), "words": words()}


def store(path: Path, arrays: dict[str, Any]) -> None:
    """Write an archive atomically."""
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)
    write_atomically(path, content.getvalue())


def main() -> None:
    """Store what is missing."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    FOLDER.mkdir(exist_ok=True)
    for env_id in ENVIRONMENTS:
        path = path_of(env_id)
        if not path.exists():
            store(path, play(env_id))
            print(f"stored {path.name}, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
