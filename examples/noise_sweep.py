"""Compare a random policy with the oracle as noise grows: python examples/noise_sweep.py."""

from noisy_envs.baselines import play_baseline
from noisy_envs.registration import fixed_start

ENV_ID = "noisy_envs/SimpleCentroid-v0"

start = fixed_start(ENV_ID, {})  # otherwise more noise also moves agent and signal apart at the start
for num_noise in (0, 4, 12, 28, 60):
    options = {"num_noise": num_noise, **start}
    random, oracle = (
        play_baseline(ENV_ID, policy, episodes=200, options=options).mean() for policy in ("random", "oracle")
    )
    print(f"{num_noise:3d} noise entities: random {random:.3f}, oracle {oracle:.3f}")
