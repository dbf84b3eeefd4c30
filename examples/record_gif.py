"""Record the oracle as a GIF, with halos on the signal: python examples/record_gif.py [ENV_ID] [FILE.gif].

ENV_ID is an environment ID of this package.
"""

import argparse
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

import noisy_envs  # noqa: F401  registers the environments
from noisy_envs.rendering.video import write_gif

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("env_id", nargs="?", default="noisy_envs/SimpleCentroid-v0")
parser.add_argument("file", nargs="?", type=Path, default=Path("oracle.gif"))
args = parser.parse_args()
env: Any = gymnasium.make(args.env_id, render_mode="rgb_array").unwrapped
if "oracle" not in getattr(getattr(env, "game", None), "policies", ()):
    parser.error(f"{args.env_id}: expected an ID of this package, whose game has an oracle")
_, info = env.reset(seed=1)
frames, ended = [], False
while not ended:
    frames.append(env.render(weights=info["signal_mask"].astype(float)))
    worlds = type(env.state)._make(field[None] for field in env.state)  # a batch of one
    u = np.zeros((1, 1, *env.action_space.shape), np.float32)  # the oracle is deterministic
    action = env.game.policy("oracle", worlds, u, slice(0, 1))[0, 0]
    _, _, terminated, truncated, info = env.step(action)
    ended = terminated or truncated
frames.append(env.render())
env.close()
write_gif(args.file, frames, fps=10)
print(f"see {args.file}")
