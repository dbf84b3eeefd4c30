"""Stable-Baselines3's PPO with AdaPool as features extractor. Needs: pip install -e ".[sb3]".

python examples/stable_baselines.py [ENV_ID] [STEPS]; ENV_ID is an environment ID of this package.
"""

import sys

import gymnasium
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from torch import Tensor, nn

import noisy_envs  # noqa: F401  registers the environments
from noisy_envs.baselines import baseline_returns
from noisy_envs.nn.pooling import AdaPool
from noisy_envs.tokens import TokenSpec


class AdaPoolExtractor(BaseFeaturesExtractor):
    """Embeds each token, and pools: tokens (B, N, D) to features (B, width)."""

    def __init__(self, space: gymnasium.spaces.Box, spec: TokenSpec, width: int = 64) -> None:
        """Make the layers."""
        super().__init__(space, width)
        self.spec = spec
        self.embed = nn.Sequential(nn.Linear(spec.num_features, width), nn.ReLU(), nn.Linear(width, width))
        self.pool = AdaPool(width, num_heads=4, query=spec.query_index, init_std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Pool what is not padding."""
        mask = self.spec.mask(tokens)
        return self.pool(self.embed(tokens.masked_fill(~mask.unsqueeze(2), 0)), mask)


env_id = sys.argv[1] if len(sys.argv) > 1 else "noisy_envs/SimpleCentroid-v0"
steps = int(sys.argv[2]) if len(sys.argv) > 2 else 24_576
envs = make_vec_env(env_id, n_envs=16, seed=0)
spec = envs.get_attr("token_spec")[0]
spec.check(envs.reset())  # VecNormalize would scale the roles too: give it norm_obs=False
agent = PPO(
    "MlpPolicy",
    envs,
    n_steps=128,
    batch_size=512,
    learning_rate=1e-3,
    policy_kwargs={"features_extractor_class": AdaPoolExtractor, "features_extractor_kwargs": {"spec": spec}},
    seed=0,
    device="cpu",
)
score = baseline_returns(env_id).normalized_score
for trained in (0, steps):
    agent.learn(trained)
    mean, std = evaluate_policy(agent, envs, n_eval_episodes=32, deterministic=False)
    print(f"{agent.num_timesteps} steps: return {mean:.2f} ± {std:.2f}, score {score(mean):.2f}", flush=True)
