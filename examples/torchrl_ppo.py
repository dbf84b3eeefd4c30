"""TorchRL's PPO with AdaPool on the native vector environment. Needs: pip install -e ".[torchrl]".

python examples/torchrl_ppo.py [STEPS]
"""

import sys

import gymnasium
import torch
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torch.distributions import Categorical
from torchrl.collectors import Collector
from torchrl.envs import GymWrapper
from torchrl.modules import ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

import noisy_envs  # noqa: F401  registers the environments
from noisy_envs.nn.pooling import AdaPool

NUM_ENVS, EPISODE = 64, 128  # steps of an episode


class Network(nn.Module):
    """Embeds each token, pools, and reads out: tokens (..., N, D) to (..., outputs)."""

    def __init__(self, features: int, outputs: int, width: int = 64) -> None:
        """Make the layers."""
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, width))
        self.pool = AdaPool(width, num_heads=4, init_std=0.1)
        self.readout = nn.Sequential(nn.ReLU(), nn.Linear(width, outputs))

    def forward(self, tokens: Tensor) -> Tensor:
        """Pool over N; all axes before it are batch axes."""
        pooled = self.pool(self.embed(tokens.flatten(end_dim=-3)))
        return self.readout(pooled).unflatten(0, tokens.shape[:-2])


steps = int(sys.argv[1]) if len(sys.argv) > 1 else 65_536
torch.manual_seed(0)  # TorchRL draws actions and weights from the global random state
worlds = gymnasium.make_vec(  # TorchRL resets them itself
    "noisy_envs/SimpleCentroid-v0", NUM_ENVS, autoreset_mode="Disabled", continuous_actions=False
)
envs = GymWrapper(worlds, categorical_action_encoding=True)
envs.set_seed(0)
features = envs.observation_spec["observation"].shape[-1]
logits = TensorDictModule(Network(features, 5), in_keys=["observation"], out_keys=["logits"])
actor = ProbabilisticActor(logits, in_keys=["logits"], distribution_class=Categorical, return_log_prob=True)
critic = ValueOperator(Network(features, 1), in_keys=["observation"])
advantages = GAE(gamma=0.99, lmbda=0.95, value_network=critic, average_gae=True)
loss = ClipPPOLoss(actor, critic, entropy_coeff=0.0)
optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3)
frames = NUM_ENVS * EPISODE  # one episode of each environment
for batch in Collector(envs, actor, frames_per_batch=frames, total_frames=steps, auto_register_policy_transforms=False):
    print(f"return {EPISODE * batch['next', 'reward'].mean():.2f}", flush=True)
    for _ in range(4):
        advantages(batch)
        rows = batch.flatten()
        for part in rows[torch.randperm(len(rows))].split(1024):
            losses = loss(part)
            optimizer.zero_grad()
            (losses["loss_objective"] + losses["loss_critic"]).backward()
            optimizer.step()
