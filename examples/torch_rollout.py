"""Train a policy by gradients through the environments, on a CPU or a GPU. Needs: pip install -e ".[agents]".

    python examples/torch_rollout.py [--device cuda] [--num-envs 64] [--updates 128]

`pure_step` steps all environments and starts the next episode of those that ended, without asking the host, so a GPU
never waits. It consists of PyTorch operations, so gradients flow from rewards back to continuous actions through time.
"""

import argparse
from typing import Any

import gymnasium
import torch
from torch import Tensor, nn

import noisy_envs  # noqa: F401  registers the environments
from noisy_envs.nn.pooling import AdaPool

STEPS, EPISODE = 16, 128  # steps of backpropagation; steps of an episode
REPORT = 2 * EPISODE // STEPS  # updates in two episodes


class Policy(nn.Module):
    """Embeds each token, pools, and reads out: tokens (B, N, D) to actions (B, 5) from 0 to 1."""

    def __init__(self, features: int, width: int = 32) -> None:
        """Make the layers."""
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, width))
        self.pool = AdaPool(width, num_heads=4, init_std=0.1)
        self.readout = nn.Sequential(nn.ReLU(), nn.Linear(width, 5), nn.Sigmoid())

    def forward(self, tokens: Tensor) -> Tensor:
        """Act."""
        return self.readout(self.pool(self.embed(tokens)))


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--device", default="cpu")
parser.add_argument("--num-envs", type=int, default=64)
parser.add_argument("--updates", type=int, default=128)
args = parser.parse_args()
envs: Any = gymnasium.make_vec("noisy_envs/SimpleCentroid-v0", args.num_envs, backend="torch", device=args.device)
tokens, _ = envs.reset(seed=0)  # (B, N, D)
worlds, pure_step = envs.batch_state, envs.pure_step
with torch.random.fork_rng():  # PyTorch's layers draw from the global random state
    torch.manual_seed(0)
    policy = Policy(tokens.shape[2]).to(args.device)
optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
means: list[Tensor] = []  # mean rewards, on the device
for update in range(1, args.updates + 1):
    rewards = []
    for _ in range(STEPS):
        worlds, seen = pure_step(worlds, policy(tokens))
        tokens = seen.tokens
        rewards.append(seen.reward)
    mean = torch.stack(rewards).mean()
    optimizer.zero_grad()
    (-mean).backward()
    optimizer.step()
    means.append(mean.detach())
    worlds = worlds._replace(state=type(worlds.state)._make(x.detach() for x in worlds.state))  # gradients end here
    tokens = tokens.detach()
    if update % REPORT == 0:  # the only synchronisation with the host
        episodic_return = EPISODE * torch.stack(means[-REPORT:]).mean()
        print(f"{update * STEPS * args.num_envs} steps: return {episodic_return:.2f}", flush=True)
