"""Record an episode as an MP4 with Gymnasium's own wrapper. Needs: pip install -e . moviepy.

    python examples/record_video.py [ENV_ID]      # writes videos/random-episode-0.mp4

For a GIF with halos, see examples/record_gif.py (signal) and `--record` of the agents (pooling weights).
"""

import sys

import gymnasium
from gymnasium.wrappers import RecordEpisodeStatistics, RecordVideo

import noisy_envs  # noqa: F401  registers the environments

env_id = sys.argv[1] if len(sys.argv) > 1 else "noisy_envs/SimpleCentroid-v0"
env = gymnasium.make(env_id, render_mode="rgb_array")
env = RecordEpisodeStatistics(RecordVideo(env, "videos", name_prefix="random"))
env.action_space.seed(0)
env.reset(seed=0)
ended = False
while not ended:
    _, _, terminated, truncated, info = env.step(env.action_space.sample())
    ended = terminated or truncated
env.close()  # writes the file
print(f"return {info['episode']['r']:.3f}: see videos/random-episode-0.mp4")
