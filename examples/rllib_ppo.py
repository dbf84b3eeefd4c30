"""RLlib's PPO (new API stack) with AdaPool in an RLModule. Needs its own environment: pip install -e ".[rllib]".

python examples/rllib_ppo.py [ITERATIONS]
"""

import sys
from typing import Any

import gymnasium
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module import RLModuleSpec
from ray.rllib.core.rl_module.apis import ValueFunctionAPI
from ray.rllib.core.rl_module.torch import TorchRLModule
from ray.tune import register_env
from torch import Tensor, nn

from noisy_envs.nn.pooling import AdaPool

ENV_ID = "noisy_envs:noisy_envs/SimpleCentroid-v0"


class AdaPoolModule(TorchRLModule, ValueFunctionAPI):
    """Embeds each token, pools, and reads out actions and value: tokens (B, N, D)."""

    def setup(self) -> None:
        """Make the layers."""
        width = self.model_config["width"]
        self.embed = nn.Sequential(
            nn.Linear(self.observation_space.shape[1], width), nn.ReLU(), nn.Linear(width, width)
        )
        self.pool = AdaPool(width, num_heads=4, init_std=0.1)
        self.actor = nn.Sequential(nn.ReLU(), nn.Linear(width, self.action_space.n))
        self.critic = nn.Sequential(nn.ReLU(), nn.Linear(width, 1))

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        pooled = self.pool(self.embed(batch[Columns.OBS]))
        return {Columns.ACTION_DIST_INPUTS: self.actor(pooled), Columns.EMBEDDINGS: pooled}

    def compute_values(self, batch: dict[str, Any], embeddings: Tensor | None = None) -> Tensor:
        """Return the values (B,)."""
        if embeddings is None:
            embeddings = self.pool(self.embed(batch[Columns.OBS]))
        return self.critic(embeddings).squeeze(-1)


register_env("centroid", lambda config: gymnasium.make(ENV_ID, **config))
config = (
    PPOConfig()
    .environment("centroid", env_config={"continuous_actions": False})
    .env_runners(num_env_runners=0, num_envs_per_env_runner=16)
    .rl_module(rl_module_spec=RLModuleSpec(AdaPoolModule, model_config={"width": 64}))
    .training(train_batch_size_per_learner=2048, minibatch_size=512, num_epochs=10, lr=1e-3, use_kl_loss=False)
    .debugging(seed=0)
)
algorithm = config.build_algo()
for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 16):
    result = algorithm.train()
    runners = result["env_runners"]
    print(f"{runners['num_env_steps_sampled_lifetime']} steps: return {runners['episode_return_mean']:.2f}", flush=True)
algorithm.stop()
