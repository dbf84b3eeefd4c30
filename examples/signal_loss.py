"""Measure how much signal a pooling head loses as noise grows. Needs: pip install -e ".[agents]".

The signal loss (`noisy_envs.nn.theory`) is the squared error of the pooled vector, averaged over the signal tokens that
`info["signal_mask"]` marks. Their centroid has the lowest. AdaPool is trained on some environments, and all heads are
measured on others.
"""

import gymnasium
import torch
from torch import Tensor
from torch.nn.functional import one_hot

import noisy_envs  # noqa: F401  registers the environments
from noisy_envs.nn.pooling import AdaPool, AvgPool, MaxPool
from noisy_envs.nn.theory import optimal_pool, signal_loss


def worlds(num_noise: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return the first tokens of 1,024 environments, (B, N, 8) with one-hot roles, and the signal mask (B, N)."""
    envs = gymnasium.make_vec("noisy_envs/SimpleCentroid-v0", 1024, num_noise=num_noise, spread=2.0)  # at any noise
    tokens, info = envs.reset(seed=seed)
    rows, signal = torch.from_numpy(tokens), torch.from_numpy(info["signal_mask"])
    return torch.cat([rows[..., :4], one_hot(rows[..., 4].long(), 4)], dim=2), signal


print("noise     SNR     avg     max     ada   least")
for num_noise in (0, 4, 28, 124):
    tokens, signal = worlds(num_noise, seed=0)
    ada = AdaPool(dim=8, query="learned", init_std=0.3)
    optimizer = torch.optim.Adam(ada.parameters(), lr=0.02)
    for _ in range(200):
        optimizer.zero_grad()
        signal_loss(tokens, signal, ada(tokens)).mean().backward()
        optimizer.step()
    tokens, signal = worlds(num_noise, seed=1_000_000)
    pools = (AvgPool()(tokens), MaxPool()(tokens), ada(tokens).detach(), optimal_pool(tokens, signal))
    losses = "".join(f"{signal_loss(tokens, signal, pool).mean():8.3f}" for pool in pools)
    print(f"{num_noise:5d}{signal.float().mean():8.2f}{losses}")
