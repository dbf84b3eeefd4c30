"""PPO with a transformer over tokens and adaptive pooling, in one file.

    python agents/ppo_adapool.py                                                # the demo: minutes on a CPU
    python agents/ppo_adapool.py --env-id noisy_envs/SimpleCentroid-1v3v28-v0   # the paper's network and settings
    python agents/ppo_adapool.py --env-id noisy_envs/SimpleTag-v0               # a predator among obstacles
    python agents/ppo_adapool.py --env-id noisy_envs/BoxWorldEntities-v0 --preset fast    # our settings for it
    python agents/ppo_adapool.py --device cuda                                  # worlds and network on a GPU
    python agents/ppo_adapool.py --resume runs/NAME                             # go on with a run that was stopped

The encoder turns N tokens into N embeddings; the pooling head makes one of them (Brothers 2025, section 3.5), and
two small networks turn that into an action and a value. PPO follows Schulman et al. 2017, generalised advantages
Schulman et al. 2016. `B` worlds, `T` steps, `N` tokens, `D` features, `H` width of an embedding.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import gymnasium
import numpy as np
import torch
import tyro
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from noisy_envs import ENVIRONMENTS, runs
from noisy_envs.reference import reference_returns
from noisy_envs.registry import held_out
from noisy_envs.tokens import TokenSpec


@dataclass
class Args:
    """Settings of a run. The defaults shown are those of the chosen `--env-id` and `--preset`."""

    env_id: str = "noisy_envs/SimpleCentroid-v0"
    """the environment"""
    preset: Literal["paper", "fast"] = "fast"
    """where the other defaults come from: the paper's appendix, by default for the ids of its experiments, or settings
    of ours that learn within minutes on a CPU, BoxWorld's within an hour"""
    seed: int = 1
    """of weights, worlds, actions and minibatches"""
    device: str = "cpu"
    """where worlds and network live: cpu, cuda, cuda:1, …"""
    threads: int = 1
    """torch's CPU threads; two are faster on idle cores, but far slower where others use them too"""
    total_timesteps: int = 262_144
    """steps to train for, in all worlds together"""
    num_envs: int = 64
    """worlds that play at once"""
    num_steps: int = 128
    """steps that each world plays between two updates"""
    run_dir: Path = Path("runs")
    """folder in which the run makes its own"""
    resume: Path | None = None
    """folder of a run to continue; its settings apply, and all others are ignored"""
    save_every: int = 10
    """updates between two checkpoints"""
    eval_episodes: int = 100
    """episodes of the evaluation at the end, on seeds that training never uses"""
    eval_actions: Literal["best", "sampled"] = "best"
    """whether the evaluation takes the mean or most probable actions, or draws them as training does"""
    gif: bool = True
    """whether to draw an episode at the end"""

    num_layers: int = 2
    """layers of the encoder"""
    num_heads: int = 4
    """attention heads, in the encoder and in the pooling"""
    hidden_dim: int = 32
    """width of an embedding, H"""
    feedforward_dim: int = 64
    """width inside a feed-forward block"""
    mlp_dim: int = 32
    """width of the actor's and critic's hidden layers"""
    type_dim: int = 4
    """features learned for each role"""
    dropout: float = 0.0
    """dropout after each feed-forward block, in updates only"""
    init_std: float = 0.1
    """standard deviation of the initial weights"""
    attention_scale: str = "head"
    """divide scores by the root of the width of a "head", or of the "hidden" layer, as the paper's code does"""
    log_std_min: float = -2.0
    """lowest log standard deviation of a continuous action"""
    log_std_max: float = 0.5
    """highest log standard deviation of a continuous action"""

    learning_rate: float = 4e-3
    """of Adam, at the start"""
    anneal_lr: bool = True
    """whether the learning rate falls linearly to zero"""
    gamma: float = 0.9
    """discount"""
    gae_lambda: float = 0.9
    """lambda of the generalised advantage"""
    update_epochs: int = 6
    """passes over the data of an update"""
    minibatch_size: int = 2048
    """samples in a gradient step"""
    clip_coef: float = 0.2
    """PPO clips the ratio of probabilities to 1 ± this"""
    ent_coef: float = 0.0
    """weight of the entropy"""
    vf_coef: float = 0.5
    """weight of the value loss"""
    kl_coef: float = 0.0
    """weight of the KL penalty at the start; it then doubles or halves to keep the KL near its target"""
    kl_target: float = 0.01
    """target of the KL divergence of an update; used when kl_coef is not 0"""
    max_grad_norm: float = 1.0
    """gradients are scaled down to this norm"""


# Settings of the paper's experiments (appendix, "MPE Simple Centroid").
PAPER_CENTROID = Args(
    total_timesteps=4_000_000, num_envs=64, num_steps=128,
    num_layers=3, num_heads=8, hidden_dim=8, feedforward_dim=32, mlp_dim=32, dropout=0.1,
    init_std=0.2, attention_scale="hidden", log_std_min=-1.0, log_std_max=1.0,
    learning_rate=2.5e-3, anneal_lr=False, gamma=0.99, gae_lambda=0.95, update_epochs=16, minibatch_size=8192,
    clip_coef=0.2, ent_coef=0.0, vf_coef=0.05, kl_coef=0.0, max_grad_norm=10.0,
)  # fmt: skip
# The appendix, "MPE Simple Tag + Noise".
PAPER_TAG = dataclasses.replace(
    PAPER_CENTROID,
    num_layers=6, num_heads=3, hidden_dim=3, feedforward_dim=12,
    vf_coef=0.0005, ent_coef=0.005, kl_coef=0.5, kl_target=0.01,
)  # fmt: skip
# Not the paper's: a wider network without dropout, which learns SimpleTag within minutes on a CPU.
TAG = Args(
    total_timesteps=524_288, learning_rate=2.5e-3, anneal_lr=False, gamma=0.99, gae_lambda=0.95, update_epochs=8,
    vf_coef=0.0005, ent_coef=0.005, max_grad_norm=10.0,
)  # fmt: skip
# The appendix, "BoxWorld".
PAPER_BOX = dataclasses.replace(
    PAPER_CENTROID,
    total_timesteps=40_000_000, num_envs=480, num_steps=30, minibatch_size=14_400, update_epochs=32,
    num_layers=6, num_heads=6, hidden_dim=6, feedforward_dim=24, init_std=0.02, vf_coef=0.01,
)  # fmt: skip
# Not the paper's either, for BoxWorld: larger batches, a short horizon, and entropy against early habits. The most
# probable actions of a policy that has not learned all run in circles, so those that are evaluated are drawn.
BOX = Args(
    total_timesteps=3_145_728, num_envs=512, num_steps=32, eval_actions="sampled", learning_rate=4e-3,
    anneal_lr=False, gamma=0.95, update_epochs=8, minibatch_size=4096, vf_coef=0.05, ent_coef=0.02,
)  # fmt: skip
FAST = {"simple_centroid": Args(), "simple_tag": TAG, "box_world": BOX}
PAPER = {"simple_centroid": PAPER_CENTROID, "simple_tag": PAPER_TAG, "box_world": PAPER_BOX}
GENERAL = ("SimpleCentroid-v0", "SimpleTag-v0", "SimpleTagMPE-v0", "BoxWorld-v0")  # no experiments of the paper


# lowest and highest value of the settings that are not whole numbers from 1
LIMITS = {
    "learning_rate": (0, 1e6), "gamma": (0, 1), "gae_lambda": (0, 1), "clip_coef": (0, math.inf), "dropout": (0, 0.99),
    "ent_coef": (0, math.inf), "vf_coef": (0, math.inf), "kl_coef": (0, math.inf), "kl_target": (1e-9, math.inf),
    "max_grad_norm": (1e-9, math.inf), "init_std": (0, math.inf), "log_std_min": (-20, 20), "log_std_max": (-20, 20),
}  # fmt: skip


class Dropout(nn.Module):
    """Dropout that draws from its own generator, so that a run can be resumed and repeated."""

    def __init__(self, p: float, generator: torch.Generator) -> None:
        """Drop each number with probability `p`."""
        super().__init__()
        self.p, self.generator = p, generator

    def forward(self, x: Tensor) -> Tensor:
        """Return x with some numbers zeroed and the others scaled up, in training; else x."""
        if not self.training or self.p == 0:
            return x
        kept = torch.rand(x.shape, device=x.device, generator=self.generator) >= self.p
        return x * kept / (1 - self.p)


class Block(nn.Module):
    """A pre-norm transformer layer: attention without bias, then a feed-forward block, both residual."""

    def __init__(self, args: Args, generator: torch.Generator) -> None:
        """Make the layer; `Agent` draws its weights."""
        super().__init__()
        dim, self.num_heads = args.hidden_dim, args.num_heads
        self.scale = 1 / math.sqrt(dim / args.num_heads if args.attention_scale == "head" else dim)
        self.norm_attention, self.norm_feedforward = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.query_key_value = nn.Linear(dim, 3 * dim, bias=False)
        self.output = nn.Linear(dim, dim, bias=False)
        self.feedforward = nn.Sequential(
            nn.Linear(dim, args.feedforward_dim),
            nn.GELU(),
            nn.Linear(args.feedforward_dim, dim),
            Dropout(args.dropout, generator),
        )

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Embed tokens (B, N, H) under a mask (B, N) to (B, N, H)."""
        heads = self.query_key_value(self.norm_attention(x)).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each (B, heads, N, H / heads)
        allowed = None if mask is None else mask[:, None, None]
        mixed = F.scaled_dot_product_attention(query, key, value, allowed, scale=self.scale)
        x = x + self.output(mixed.transpose(1, 2).flatten(2))
        return x + self.feedforward(self.norm_feedforward(x))


# pooling head: the class of noisy_envs/pooling.py, word for word
class AdaPool(nn.Module):
    """Global adaptive pooling: cross-attention with one query (Definition 3.9, equations 6 and 7).

    AdaPool(X) = sum_i w_i x_i W_V with w = softmax(r) and r_i = x_q W_Q W_K' x_i' * scale, in each of
    `num_heads` slices of the features (Appendix B.2); an output projection follows, and `residual` adds x_q.
    AvgPool and MaxPool are special cases (Corollaries 3.10 and 3.11). Where the tokens named by `query` stand
    matters; the order of the others changes nothing.

    Args:
        dim: D, a multiple of num_heads.
        num_heads: how many sets of weights.
        query: what x_q is: the token at an index (0, the agent's own), the mean of those at several, "mean"
            of all, or "learned", a parameter as in the Set Transformer. A mean is over real tokens; if there
            is none at those indices, x_q is zero and the weights are uniform.
        residual: whether x_q is added to the output.
        scale: of the scores r. None is the usual 1/sqrt(dim / num_heads); the paper's code has 1/sqrt(dim).
        init_std: of the weights, drawn from Normal(0, init_std).
        output_std: that of the output projection, if another.
        generator: a CPU generator that draws the weights; None stands for a fresh one seeded with 0. The
            global random state is neither read nor changed.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 1,
        query: int | Sequence[int] | str = 0,
        residual: bool = True,
        scale: float | None = None,
        init_std: float = 0.02,
        output_std: float | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        """Check the options and draw the weights."""
        super().__init__()
        if dim < 1 or num_heads < 1 or dim % num_heads:
            raise ValueError(f"dim must be a multiple of num_heads, got dim={dim} and num_heads={num_heads}")
        places = (query,) if isinstance(query, int) else query
        valid = isinstance(places, Sequence) and places and all(type(i) is int and i >= 0 for i in places)
        if not valid and query not in ("mean", "learned"):
            raise ValueError(f"query must be an index >= 0, several, 'mean' or 'learned', got {query!r}")
        self.places = places if isinstance(places, str) else tuple(places)
        self.num_heads = num_heads
        self.residual = residual
        self.scale = 1 / math.sqrt(dim / num_heads) if scale is None else scale
        # Made on "meta", then allocated: Linear would draw its weights from the global generator.
        self.query, self.key, self.value, self.output = (
            nn.Linear(dim, dim, bias=False, device="meta").to_empty(device="cpu") for _ in range(4)
        )
        generator = generator or torch.Generator().manual_seed(0)
        for linear in (self.query, self.key, self.value):
            nn.init.normal_(linear.weight, 0.0, init_std, generator)
        nn.init.normal_(self.output.weight, 0.0, init_std if output_std is None else output_std, generator)
        if query == "learned":
            self.learned = nn.Parameter(torch.empty(dim, device="cpu"))
            nn.init.normal_(self.learned, 0.0, init_std, generator)

    def extend(self, tokens: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the encoder's input, here the arguments: tokens (B, N, D) and mask (B, N)."""
        return tokens, mask

    def weights(self, embeddings: Tensor, mask: Tensor | None = None, attention: Tensor | None = None) -> Tensor:
        """Return the tokens' weights in each head (B, heads, N), summing to 1; `attention` is not used."""
        return self._attend(embeddings, mask)[2]

    def forward(self, embeddings: Tensor, mask: Tensor | None = None) -> Tensor:
        """Pool embeddings (B, N, D) under a mask (B, N) to (B, D)."""
        embeddings, query, weights = self._attend(embeddings, mask)
        # sum_i w_i (x_i W_V) = (sum_i w_i x_i) W_V: a set is projected once, not token by token.
        value = self.value.weight.view(self.num_heads, -1, embeddings.shape[2])
        heads = torch.einsum("bhd,hed->bhe", weights @ embeddings, value)
        output: Tensor = self.output(heads.flatten(1))
        return output + query if self.residual else output

    def _attend(self, embeddings: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the embeddings, masked ones zeroed, the query (B, D) and the weights (B, heads, N)."""
        self._check(embeddings, mask)
        if mask is None:
            mask = torch.ones(embeddings.shape[:2], dtype=torch.bool, device=embeddings.device)
        else:
            embeddings = embeddings.masked_fill(~mask.unsqueeze(2), 0)
        empty = ~mask.any(dim=1, keepdim=True)  # (B, 1)
        query = self._query(embeddings, mask).masked_fill(empty, 0)
        # (x_q W_Q W_K') x_i', taken from the left, spares the keys: D * heads products a token, not D * D.
        key = self.key.weight.view(self.num_heads, -1, embeddings.shape[2])
        heads = (self.query(query) * self.scale).unflatten(1, (self.num_heads, -1))
        scores = torch.einsum("bhe,hed->bhd", heads, key) @ embeddings.mT  # (B, heads, N)
        # An empty set attends to its zeros: the softmax of nothing but -inf, and its gradient, are NaN.
        scores = scores.masked_fill(~(mask | empty).unsqueeze(1), -math.inf)
        return embeddings, query, scores.softmax(dim=2).masked_fill(empty.unsqueeze(2), 0)

    def _query(self, embeddings: Tensor, mask: Tensor) -> Tensor:
        """Return x_q (B, D), given embeddings of which the masked are zero."""
        if self.places == "learned":
            return self.learned.expand(len(embeddings), -1)
        if isinstance(self.places, tuple):  # slices: a list as index is copied to the device at every call
            embeddings = torch.stack([embeddings[:, place] for place in self.places], dim=1)
            mask = torch.stack([mask[:, place] for place in self.places], dim=1)
        weights = mask.to(embeddings.dtype) / mask.sum(dim=1, keepdim=True).clamp(min=1)
        return (weights.unsqueeze(2) * embeddings).sum(dim=1)

    def _check(self, embeddings: Tensor, mask: Tensor | None) -> None:
        shape, dim = tuple(embeddings.shape), self.query.in_features
        if len(shape) != 3 or shape[1] == 0 or shape[2] != dim:
            raise ValueError(f"embeddings must be (B, N, {dim}) with N >= 1, got {shape}")
        if mask is not None and (mask.shape != shape[:2] or mask.dtype != torch.bool):
            raise ValueError(f"mask must be torch.bool {shape[:2]}, got {mask.dtype} {tuple(mask.shape)}")
        if isinstance(self.places, tuple) and max(self.places) >= shape[1]:
            raise ValueError(f"query {max(self.places)} must be below {shape[1]}, the number of tokens")


# end of pooling head


def mlp(dim: int, hidden: int, out: int) -> nn.Sequential:
    """Return a network of three layers."""
    return nn.Sequential(
        nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, out)
    )


class Agent(nn.Module):
    """Encoder, pooling head, actor and critic.

    All weights but the head's are drawn first, from one generator, so that agents that differ only in the head
    start alike.
    """

    def __init__(self, args: Args, spec: TokenSpec, action_space: Any, generator: torch.Generator) -> None:
        """Make the network for tokens of `spec` and actions of a Box or Discrete space."""
        super().__init__()
        self.spec, self.log_std_range = spec, (args.log_std_min, args.log_std_max)
        self.continuous = isinstance(action_space, gymnasium.spaces.Box)
        dim, features = args.hidden_dim, spec.num_features
        self.dropout_generator = torch.Generator(args.device)
        if spec.roles:  # the role, a number of a kind, becomes a learned vector
            self.role = nn.Embedding(1 + max(spec.roles.values()), args.type_dim)
            features += args.type_dim - 1
        self.project = nn.Sequential(nn.Linear(features, dim), nn.GELU())
        self.blocks = nn.ModuleList(Block(args, self.dropout_generator) for _ in range(args.num_layers))
        actions = 2 * math.prod(action_space.shape or ()) if self.continuous else int(action_space.n)
        self.actor, self.critic = mlp(dim, args.mlp_dim, actions), mlp(dim, args.mlp_dim, 1)
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                last_of_residual = name.endswith("output.weight")
                std = args.init_std / (math.sqrt(2 * args.num_layers) if last_of_residual else 1)
                nn.init.normal_(weight, 0.0, std, generator)
            elif name.endswith("bias"):
                nn.init.zeros_(weight)
        self.pool = AdaPool(
            dim,
            args.num_heads,
            query=spec.query,
            scale=None if args.attention_scale == "head" else 1 / math.sqrt(dim),
            init_std=args.init_std,
            output_std=args.init_std / math.sqrt(2 * args.num_layers),
            generator=torch.Generator().manual_seed(args.seed),
        )

    def encode(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """Embed tokens (B, N, D): embeddings (B, N, H) and the mask of real ones (B, N)."""
        mask = self.spec.mask(tokens)
        if self.spec.roles:
            role = self.role(tokens[..., self.spec.marker].long().clamp(min=0))
            tokens = torch.cat([tokens[..., : self.spec.marker], role], dim=-1)
        x, extended = self.pool.extend(self.project(tokens), mask)
        for block in self.blocks:
            x = block(x, extended)
        return x, extended

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the parameters of the action distribution (B, ...) and the values (B,)."""
        pooled = self.pool(*self.encode(tokens))
        return self.actor(pooled), self.critic(pooled).squeeze(-1)

    def distribution(self, parameters: Tensor) -> torch.distributions.Distribution:
        """Return the distribution of actions: independent normals, or categorical."""
        if not self.continuous:
            return torch.distributions.Categorical(logits=parameters, validate_args=False)
        mean, log_std = parameters.chunk(2, dim=-1)
        std = log_std.clamp(*self.log_std_range).exp()
        return torch.distributions.Independent(torch.distributions.Normal(mean, std, False), 1, False)

    def sample(self, parameters: Tensor, generator: torch.Generator) -> Tensor:
        """Draw actions."""
        if not self.continuous:
            return torch.multinomial(parameters.softmax(-1), 1, generator=generator).squeeze(-1)
        mean, log_std = parameters.chunk(2, dim=-1)
        noise = torch.randn(mean.shape, device=mean.device, generator=generator)
        return mean + noise * log_std.clamp(*self.log_std_range).exp()

    def best(self, parameters: Tensor) -> Tensor:
        """Return the mean or most probable actions."""
        return parameters.chunk(2, dim=-1)[0] if self.continuous else parameters.argmax(-1)


@dataclass
class Batch:
    """What one rollout saw, (T, B, ...) each."""

    tokens: Tensor
    actions: Tensor
    parameters: Tensor  # of the distribution that drew the actions
    rewards: Tensor
    values: Tensor
    next_values: Tensor  # of the state after the step, before any reset; 0 where the episode terminated
    ended: Tensor  # whether the episode ended with the step, by termination or truncation


def rollout(
    agent: Agent, envs: Any, tokens: Tensor, returns: Tensor, num_steps: int, generator: torch.Generator
) -> tuple[Batch, Tensor, Tensor]:
    """Play `num_steps` steps in all worlds.

    Args:
        agent: in evaluation mode.
        envs: a vector environment in SAME_STEP mode.
        tokens: (B, N, D) what the worlds show now.
        returns: (B,) returns of their episodes so far, updated in place.
        num_steps: steps, T.
        generator: draws the actions.

    Returns:
        The batch, the tokens after it, and the returns (E,) of the episodes that ended.
    """
    steps: list[tuple[Tensor, ...]] = []
    finished = []
    with torch.inference_mode():
        parameters, values = agent(tokens)
        for _ in range(num_steps):
            actions = agent.sample(parameters, generator)
            seen, played, valued = tokens, parameters, values
            tokens, rewards, terminated, truncated, info = envs.step(actions)
            ended = terminated | truncated
            parameters, values = agent(tokens)
            next_values = values
            returns += rewards
            if "final_obs" in info:  # a truncated episode goes on in principle: its last state has a value
                next_values = torch.where(truncated & ~terminated, agent(info["final_obs"])[1], next_values)
                next_values = next_values * ~terminated
                finished.append(returns[ended])
                returns[ended] = 0.0
            steps.append((seen, actions, played, rewards, valued, next_values, ended))
    batch = Batch(*(torch.stack(column) for column in zip(*steps, strict=True)))
    return batch, tokens, torch.cat(finished) if finished else rewards[:0]


def advantages(
    rewards: Tensor, values: Tensor, next_values: Tensor, ended: Tensor, gamma: float, gae_lambda: float
) -> Tensor:
    """Estimate generalised advantages; all arguments and the result are (T, B).

    `next_values` bootstraps: the value of the state that the step led to, also where a time limit cut the episode,
    and 0 where it terminated. Nothing flows back over the end of an episode.
    """
    result, later = torch.empty_like(rewards), torch.zeros_like(rewards[0])
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * next_values[t] - values[t]
        later = delta + gamma * gae_lambda * ~ended[t] * later
        result[t] = later
    return result


def update(
    agent: Agent,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    args: Args,
    kl_coef: float,
    generator: torch.Generator,
) -> dict[str, float]:
    """Improve the agent on a batch by PPO; returns the means of its losses.

    Raises:
        FloatingPointError: the loss is no longer finite.
    """
    gains = advantages(batch.rewards, batch.values, batch.next_values, batch.ended, args.gamma, args.gae_lambda)
    targets = (gains + batch.values).flatten()
    gains = gains.flatten()
    gains = (gains - gains.mean()) / (gains.std() + 1e-8)
    tokens, actions, parameters = (x.flatten(0, 1) for x in (batch.tokens, batch.actions, batch.parameters))
    with torch.no_grad():
        old = agent.distribution(parameters).log_prob(actions)
    sums: dict[str, Tensor] = {}
    size = len(gains)
    pieces = args.update_epochs * math.ceil(size / args.minibatch_size)
    for _ in range(args.update_epochs):
        order = torch.randperm(size, generator=generator, device=gains.device)
        for rows in order.split(args.minibatch_size):
            new_parameters, values = agent(tokens[rows])
            new = agent.distribution(new_parameters)
            log_ratio = new.log_prob(actions[rows]) - old[rows]
            ratio = log_ratio.exp()
            clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
            policy_loss = -torch.min(gains[rows] * ratio, gains[rows] * clipped).mean()
            value_loss = F.mse_loss(values, targets[rows])
            entropy = new.entropy().mean()
            kl = torch.distributions.kl_divergence(agent.distribution(parameters[rows]), new).mean()
            loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy + kl_coef * kl
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
            optimizer.step()
            seen = {
                "losses/policy_loss": policy_loss,
                "losses/value_loss": value_loss,
                "losses/entropy": entropy,
                "losses/approx_kl": kl,
                "losses/clipfrac": (ratio != clipped).float().mean(),
                "losses/grad_norm": norm,
            }
            for name, value in seen.items():
                sums[name] = sums.get(name, 0) + value.detach() / pieces
    losses = {name: float(value) for name, value in sums.items()}
    losses["losses/explained_variance"] = float(1 - (targets - batch.values.flatten()).var() / targets.var())
    if not math.isfinite(losses["losses/grad_norm"] + losses["losses/policy_loss"] + losses["losses/value_loss"]):
        raise FloatingPointError(f"the losses are no longer finite: {losses}")
    return losses


def make_envs(args: Args, num_envs: int, purpose: str) -> tuple[Any, Tensor]:
    """Make worlds and reset them to seeds that belong to this run and purpose alone."""
    envs = gymnasium.make_vec(
        args.env_id,
        num_envs,
        backend="torch",
        device=args.device,
        autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP,
        **(held_out(args.env_id) if purpose == "evaluate" else {}),
    )
    tokens, _ = envs.reset(seed=runs.environment_seed(args.seed, purpose))
    return envs, tokens


def decide(agent: Agent, tokens: Tensor, args: Args, generator: torch.Generator) -> Tensor:
    """Return the actions that an evaluation takes."""
    parameters, _ = agent(tokens)
    return agent.best(parameters) if args.eval_actions == "best" else agent.sample(parameters, generator)


def evaluate(agent: Agent, args: Args, episodes: int) -> np.ndarray:
    """Play one episode in each of `episodes` worlds that training never sees: returns (E,)."""
    envs, tokens = make_envs(args, episodes, "evaluate")
    generator = torch.Generator(args.device).manual_seed(args.seed)
    total = torch.zeros(episodes, device=args.device)
    running = torch.ones(episodes, dtype=torch.bool, device=args.device)
    agent.eval()
    with torch.inference_mode():
        while running.any():
            tokens, rewards, terminated, truncated, _ = envs.step(decide(agent, tokens, args, generator))
            total += rewards * running
            running &= ~(terminated | truncated)
    return total.cpu().numpy()


def film(agent: Agent, args: Args) -> list[np.ndarray]:
    """Draw an episode of the evaluation, each token with a halo as strong as its weight in the pooling."""
    env: Any = gymnasium.make(args.env_id, render_mode="rgb_array", **held_out(args.env_id)).unwrapped
    tokens, _ = env.reset(seed=runs.environment_seed(args.seed, "evaluate"))
    generator = torch.Generator(args.device).manual_seed(args.seed)
    frames, ended = [], False
    agent.eval()
    with torch.inference_mode():
        while not ended:
            seen = torch.from_numpy(tokens).to(args.device)[None]
            weights = agent.pool.weights(*agent.encode(seen)).mean(dim=1)[0]  # mean over heads, (N,)
            frames.append(env.render(weights=weights.cpu().numpy()))
            action = decide(agent, seen, args, generator)[0].cpu().numpy()
            tokens, _, terminated, truncated, _ = env.step(action)
            ended = terminated or truncated
        frames.append(env.render())
    env.close()
    return frames


def parse(argv: Sequence[str]) -> Args:
    """Read the settings; `--env-id` and `--preset` pick the defaults of the others, and `--resume` those of the run."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--env-id", "--env_id", default=Args.env_id)
    first.add_argument("--preset")
    chosen = first.parse_known_args(argv)[0]
    game, _ = ENVIRONMENTS.get(chosen.env_id, ("simple_centroid", {}))
    preset = chosen.preset or ("fast" if chosen.env_id.removeprefix("noisy_envs/") in GENERAL else "paper")
    defaults = (PAPER if preset == "paper" else FAST)[game]
    defaults = dataclasses.replace(defaults, env_id=chosen.env_id, preset="paper" if preset == "paper" else "fast")
    args = tyro.cli(Args, args=argv, default=defaults)
    if args.resume is not None:
        saved = runs.load_checkpoint(args.resume / "checkpoint.pt")["args"]
        paths = {"run_dir": Path(saved["run_dir"]), "resume": args.resume}
        return Args(**{**saved, **paths})
    check(args)
    return args


def check(args: Args) -> None:
    """Raise ValueError, naming the setting, its value and what is allowed."""
    if args.env_id not in ENVIRONMENTS:
        raise ValueError(f"env_id={args.env_id!r}: must be one of {', '.join(ENVIRONMENTS)}")
    for field in dataclasses.fields(Args):
        value = getattr(args, field.name)
        lowest, highest = LIMITS.get(field.name, (0 if field.name == "seed" else 1, math.inf))
        if type(value) in (int, float) and not lowest <= value <= highest:  # NaN fails too
            raise ValueError(f"{field.name}={value}: must be from {lowest} to {highest}")
    if args.total_timesteps < args.num_envs * args.num_steps:
        raise ValueError(f"total_timesteps={args.total_timesteps}: less than one update, num_envs * num_steps")
    if not 2 <= args.minibatch_size <= args.num_envs * args.num_steps:
        most = args.num_envs * args.num_steps
        raise ValueError(f"minibatch_size={args.minibatch_size}: must be from 2 to num_envs * num_steps = {most}")
    if args.hidden_dim % args.num_heads:
        raise ValueError(f"hidden_dim={args.hidden_dim}: must be a multiple of num_heads={args.num_heads}")
    if args.attention_scale not in ("head", "hidden"):
        raise ValueError(f"attention_scale={args.attention_scale!r}: must be 'head' or 'hidden'")
    try:
        torch.empty(0, device=args.device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device={args.device!r}: {str(error).splitlines()[0]}") from None


class Trainer:
    """A run: what learns, what it plays, and what must be saved so that it can go on exactly."""

    def __init__(self, args: Args) -> None:
        """Start a run in a folder of its own, or continue the one in `args.resume`."""
        self.args = args
        self.references = reference_returns(args.env_id)
        self.envs, self.tokens = make_envs(args, args.num_envs, "train")
        weights = torch.Generator().manual_seed(args.seed)
        with torch.random.fork_rng(devices=[]):  # torch's layers draw from the global state, before ours replace it
            self.agent = Agent(args, self.envs.token_spec, self.envs.single_action_space, weights).to(args.device)
        self.optimizer = torch.optim.Adam(self.agent.parameters(), args.learning_rate, eps=1e-5)
        self.generator = torch.Generator(args.device).manual_seed(args.seed)
        self.agent.dropout_generator.manual_seed(args.seed)
        self.returns = torch.zeros(args.num_envs, device=args.device)
        self.step, self.updates, self.seconds, self.kl_coef = 0, 0, 0.0, args.kl_coef
        if args.resume is None:
            name = f"{args.env_id.split('/')[-1]}__{Path(__file__).stem}__{args.seed}__{runs.stamp()}"
            self.folder = runs.new_folder(args.run_dir, name)
        else:
            self.folder = args.resume
            self.load(self.folder / "checkpoint.pt")

    def save(self) -> None:
        """Write the checkpoint."""
        content = {
            "args": {name: str(x) if isinstance(x, Path) else x for name, x in vars(self.args).items()},
            "versions": runs.versions(),
            "agent": self.agent.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generators": [self.generator.get_state(), self.agent.dropout_generator.get_state()],
            "envs": self.envs.snapshot(),
            "tokens": self.tokens,
            "returns": self.returns,
            "progress": [self.step, self.updates, self.seconds, self.kl_coef],
        }
        runs.save_checkpoint(self.folder / "checkpoint.pt", content)

    def load(self, path: Path) -> None:
        """Take up what `save` wrote."""
        content = runs.load_checkpoint(path)
        self.agent.load_state_dict(content["agent"])
        self.optimizer.load_state_dict(content["optimizer"])
        for generator, state in zip((self.generator, self.agent.dropout_generator), content["generators"], strict=True):
            generator.set_state(state)
        self.envs.restore(content["envs"])
        self.tokens, self.returns = (content[name].to(self.args.device) for name in ("tokens", "returns"))
        self.step, self.updates, self.seconds, self.kl_coef = content["progress"]

    def iterate(self) -> dict[str, float]:
        """Play and learn once; returns what to log."""
        args, start = self.args, time.perf_counter()
        size = args.num_envs * args.num_steps
        if args.anneal_lr:
            rate = args.learning_rate * (1 - self.updates / (args.total_timesteps // size))
            self.optimizer.param_groups[0]["lr"] = rate
        self.agent.eval()
        batch, self.tokens, finished = rollout(
            self.agent, self.envs, self.tokens, self.returns, args.num_steps, self.generator
        )
        if not bool(torch.isfinite(batch.tokens).all()):
            raise FloatingPointError(f"{args.env_id} showed an observation that is not finite")
        self.agent.train()
        losses = update(self.agent, self.optimizer, batch, args, self.kl_coef, self.generator)
        if self.kl_coef:  # adapt the penalty towards its target, as in the PPO paper
            kl = losses["losses/approx_kl"]
            self.kl_coef *= 1.5 if kl > 2 * args.kl_target else 0.5 if kl < args.kl_target / 2 else 1.0
        self.step += size
        self.updates += 1
        spent = time.perf_counter() - start
        self.seconds += spent
        mean = float(finished.mean()) if len(finished) else math.nan
        return {
            "charts/episodic_return": mean,
            "charts/normalized_score": self.references.score(mean),
            "charts/SPS": size / spent,
            "charts/learning_rate": self.optimizer.param_groups[0]["lr"],
            **losses,
        }

    def train(self) -> list[dict[str, float]]:
        """Play and learn until the end, saving on the way. Returns the log.

        Raises:
            KeyboardInterrupt: after Ctrl-C, once the update in hand is done and saved; a second one stops at once.
        """
        args, size = self.args, self.args.num_envs * self.args.num_steps
        metrics, stopping = None, False

        def stop(*_: Any) -> None:
            nonlocal stopping
            stopping = True
            signal.signal(signal.SIGINT, before)

        before = signal.signal(signal.SIGINT, stop)
        bar = tqdm(
            total=args.total_timesteps, initial=self.step, unit=" steps", unit_scale=True, desc="training",
            mininterval=0.5 if sys.stderr.isatty() else 15, dynamic_ncols=True,
        )  # fmt: skip
        try:
            while self.step + size <= args.total_timesteps and not stopping:
                log = self.iterate()
                if metrics is None:
                    metrics = runs.Metrics(self.folder, tuple(log), resume_at=self.step - size or None)
                    metrics.note("settings", vars(args) | runs.versions())
                metrics.add(self.step, log)
                bar.set_postfix_str(
                    f"return {log['charts/episodic_return']:.3f}, score {log['charts/normalized_score']:.2f}", False
                )
                bar.update(size)
                if self.updates % args.save_every == 0:
                    self.save()
        finally:
            signal.signal(signal.SIGINT, before)
            bar.close()
            if metrics is not None:
                metrics.close()
        self.save()
        if stopping:
            raise KeyboardInterrupt
        return metrics.rows if metrics is not None else runs.read_metrics(self.folder / "metrics.csv")

    def finish(self, rows: list[dict[str, float]]) -> dict[str, Any]:
        """Evaluate, draw and sum up."""
        args, start = self.args, time.perf_counter()
        returns = evaluate(self.agent, args, args.eval_episodes)
        low, high = runs.bootstrap_interval(returns, args.seed)
        random, oracle = self.references
        runs.plot_curve(self.folder / "curve.png", rows, random, oracle, f"{args.env_id}, {Path(__file__).stem}")
        summary = {
            "env_id": args.env_id,
            "agent": Path(__file__).stem,
            "seed": args.seed,
            "steps": self.step,
            "score": self.references.score(float(returns.mean())),
            "score_95": [self.references.score(low), self.references.score(high)],
            "return": float(returns.mean()),
            "return_random": random,
            "return_oracle": oracle,
            "eval_episodes": args.eval_episodes,
            "parameters": sum(weight.numel() for weight in self.agent.parameters()),
            "train_seconds": self.seconds,
            "finish_seconds": time.perf_counter() - start,
            "versions": runs.versions(),
            "settings": vars(args),
        }
        runs.write_summary(self.folder / "summary.json", summary)
        if args.gif:  # last: an error in drawing must not cost the result
            runs.write_gif(self.folder / "episode.gif", film(self.agent, args), fps=10)
        return summary


def main(argv: Sequence[str]) -> dict[str, Any]:
    """Train, evaluate and leave everything in the run's folder."""
    try:
        args = parse(argv)
    except (ValueError, FileNotFoundError) as error:
        raise SystemExit(f"error: {error}") from None
    torch.set_num_threads(args.threads)
    trainer = Trainer(args)
    print(f"run: {trainer.folder}, {args.total_timesteps:,} steps by the preset {args.preset!r}")
    try:
        rows = trainer.train()
    except KeyboardInterrupt:
        raise SystemExit(f"stopped; go on with: python {sys.argv[0]} --resume {trainer.folder}") from None
    except FloatingPointError as error:
        raise SystemExit(f"error: {error}") from None
    summary = trainer.finish(rows)
    low, high = summary["score_95"]
    print(
        f"score {summary['score']:.3f} (95 % interval {low:.3f} to {high:.3f}; 0 random, 1 oracle), return "
        f"{summary['return']:.3f} over {args.eval_episodes} unseen episodes, trained in {trainer.seconds:.0f} s\n"
        f"see curve.png, {'episode.gif, ' if args.gif else ''}metrics.csv and summary.json in {trainer.folder}"
    )
    return summary


if __name__ == "__main__":
    main(sys.argv[1:])
