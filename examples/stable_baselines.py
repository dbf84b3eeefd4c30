"""Train Stable-Baselines3's PPO on flat observations: python examples/stable_baselines.py [ENV_ID] [STEPS]."""

import sys

import gymnasium
from stable_baselines3 import PPO
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor

import noisy_envs  # noqa: F401  registers the ids
from noisy_envs.reference import reference_returns

env_id = sys.argv[1] if len(sys.argv) > 1 else "noisy_envs/SimpleTag-1v3v28-v0"
steps = int(sys.argv[2]) if len(sys.argv) > 2 else 2048
env = Monitor(gymnasium.wrappers.FlattenObservation(gymnasium.make(env_id)))  # an MLP takes no sets of tokens
agent = PPO("MlpPolicy", env, n_steps=1024, seed=0, device="cpu")
agent.learn(steps)
mean, std = evaluate_policy(agent, env, n_eval_episodes=10, deterministic=False)
print(f"{agent.num_timesteps} steps: return {mean:.1f} ± {std:.1f}, score {reference_returns(env_id).score(mean):.2f}")
