"""Train PPO of Stable-Baselines3 on an environment without tokens, as a reference for the agents here.

    python benchmarks/plain_control.py [--env-id CartPole-v1] [--total-timesteps 65536] [--seeds 1 2 3]
    pip install stable-baselines3

Prints, for each seed, mean return and standard deviation over 100 episodes with seeds that training does not use.
"""

from __future__ import annotations

import argparse

import numpy as np
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy

EPISODES = 100


def main() -> None:
    """Train and evaluate one model per seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env-id", default="CartPole-v1")
    parser.add_argument("--total-timesteps", type=int, default=65536)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    args = parser.parse_args()
    for seed in args.seeds:
        envs = make_vec_env(args.env_id, n_envs=16, seed=seed)
        model = PPO("MlpPolicy", envs, n_steps=128, batch_size=512, seed=seed, device="cpu")
        model.learn(args.total_timesteps)
        unseen = make_vec_env(args.env_id, n_envs=16, seed=10**6 + seed)
        returns, _ = evaluate_policy(model, unseen, EPISODES, return_episode_rewards=True)
        print(f"{args.env_id} seed {seed}: return {np.mean(returns):.1f}, standard deviation {np.std(returns):.1f}")


if __name__ == "__main__":
    main()
