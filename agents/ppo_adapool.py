"""PPO with a transformer over tokens and one pooling head, in one file.

    python agents/ppo_adapool.py                                                # the demo: minutes on a CPU
    python agents/ppo_adapool.py --env-id noisy_envs/SimpleCentroid-1v3v28-v0   # the paper's network and settings
    python agents/ppo_adapool.py --env-id noisy_envs/SimpleTag-v0 --num-noise 28    # a predator among obstacles
    python agents/ppo_adapool.py --env-id noisy_envs/BoxWorldEntities-v0 --preset fast    # our settings for it
    python agents/ppo_adapool.py --env-id CartPole-v1 --num-noise 28    # any environment of Gymnasium, made noisy
    python agents/ppo_adapool.py --parallel-env simple_centroid_v0 --num-agents 3   # one network, three learners
    python agents/ppo_adapool.py --device cuda                                  # worlds and network on a GPU
    torchrun --nproc-per-node 2 agents/ppo_adapool.py --device cuda             # one run on several GPUs
    python agents/ppo_adapool.py --resume runs/NAME                             # go on with a run that was stopped
    python agents/ppo_adapool.py --evaluate runs/NAME --num-noise 0 4 28 60 --record episode.mp4

`ppo_avgpool.py`, `ppo_maxpool.py`, `ppo_clstoken.py` and `ppo_adapool.py` differ in the marked block alone. The encoder
turns N tokens into N embeddings; the pooling head makes one of them (Brothers 2025, section 3), and two small networks
turn that into an action and a value. PPO follows Schulman et al. 2017, generalised advantages Schulman et al. 2016.

Shapes: `T` steps, `R` learners in all worlds together, `N` tokens, `D` features, `H` width of embeddings, `A` actions.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import math
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import gymnasium
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from noisy_envs import registration
from noisy_envs.baselines import BaselineReturns, baseline_returns
from noisy_envs.interfaces.pettingzoo_env import ParallelTokenEnv
from noisy_envs.nn.attention import narrow_attention
from noisy_envs.nn.cuda_graph import Recorded
from noisy_envs.rendering.video import check_video_path, write_gif, write_video
from noisy_envs.tokens import TokenSpec
from noisy_envs.training import gymnasium_envs
from noisy_envs.training.checkpoint import (
    checkpoint_errors,
    checkpoint_path,
    from_tuples,
    load_checkpoint,
    only_runs,
    read_summary,
    save_checkpoint,
    to_tuples,
    write_summary,
)
from noisy_envs.training.files import lock_folder, new_folder
from noisy_envs.training.metrics import ColumnMismatch, MetricsLogger, import_wandb, read_metrics, start_wandb
from noisy_envs.training.plots import plot_curve, plot_scores
from noisy_envs.training.process import (
    EXIT_INTERRUPTED,
    ignore_broken_pipe,
    memory_errors,
    on_stop_signal,
    timestamp,
    write_stderr,
)
from noisy_envs.training.settings import check_memory, derive_seed, parse_arguments, use_deterministic
from noisy_envs.training.statistics import bootstrap_interval
from noisy_envs.training.versions import library_versions
from noisy_envs.validation import build


@dataclass
class Args:
    """Settings of a run. The defaults shown are those of the chosen `--env-id` and `--preset`."""

    env_id: str = "noisy_envs/SimpleCentroid-v0"
    """the environment"""
    preset: Literal["paper", "fast"] = "fast"
    """where the other defaults come from: the paper's appendix, by default for the ids of its experiments, or settings
    of ours that learn within minutes on a CPU, BoxWorld's within an hour"""
    num_noise: tuple[int, ...] = ()
    """noise entities (SimpleCentroid), obstacles (SimpleTag) or tokens (an id that is not ours): one number to train
    with, several to evaluate with"""
    options: tuple[str, ...] = ()
    """other options of the environment, such as num_signal=5 or num_noise=(0,28)"""
    parallel_env: Literal["", "simple_centroid_v0", "simple_tag_v0"] = ""
    """a PettingZoo environment instead of an id: all of its agents learn"""
    num_agents: int = 1
    """agents (SimpleCentroid) or predators (SimpleTag) that learn, one network for all, each from what it sees"""
    seed: int = 1
    """of weights, worlds, actions and minibatches"""
    device: str = "cpu"
    """where worlds and network live: cpu, cuda, cuda:1, …"""
    threads: int = 1
    """torch's CPU threads; two are faster on idle cores, but far slower where others use them too"""
    compile: bool = False
    """compile network and worlds, a minute at the start: by default on a GPU, and for the paper's narrow networks"""
    cuda_graphs: bool = True
    """on a GPU, record rollout and gradient, and play the records"""
    deterministic: bool = False
    """use only kernels that give the same bits each time, as torch knows them"""
    total_timesteps: int = 262_144
    """steps to train for, of all learners together"""
    num_envs: int = 64
    """worlds that play at once"""
    num_steps: int = 128
    """steps that each world plays between two updates"""
    run_dir: Path = Path("runs")
    """folder in which the run makes its own"""
    resume: Path | None = None
    """folder of a run to continue with its settings; what does not change the course of learning may be given anew,
    and --total-timesteps be longer only where the rate is not annealed, as at the paper's ids"""
    save_every: int = 10
    """updates between two checkpoints; there is one after the first update, too"""
    track: bool = False
    """send the log to Weights & Biases"""
    wandb_project: str = "noisy-envs"
    """its project there"""
    evaluate: tuple[Path, ...] = ()
    """checkpoints, or folders of runs, to evaluate without training, at each `--num-noise`"""
    record: Path | None = None
    """GIF or MP4 (by the suffix) of an episode, with the weights of the pooling head: of the first run that is
    evaluated, at the first noise"""
    eval_episodes: int = 100
    """episodes of an evaluation, on seeds that training never uses"""
    eval_actions: Literal["best", "sampled"] = "best"
    """whether an evaluation takes the mean or most probable actions, or draws them as training does"""
    gif: bool = True
    """whether to draw an episode at the end of training"""

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
    """divide scores by the root of the width of a "head", or of the "hidden" layer, as the authors' code does now"""
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
    """samples in a gradient step, a whole part of those of an update"""
    clip_coef: float = 0.2
    """PPO clips the ratio of probabilities to 1 ± this"""
    ent_coef: float = 0.0
    """weight of the entropy"""
    vf_coef: float = 0.5
    """weight of the value loss"""
    kl_coef: float = 0.0
    """weight of the KL penalty at the start; it then grows by half or halves, to keep the KL near its target"""
    kl_target: float = 0.01
    """target of the KL divergence of an update; used when kl_coef is not 0"""
    max_grad_norm: float = 1.0
    """gradients are scaled down to this norm"""


# Settings of the paper's experiments (appendix, "MPE Simple Centroid").
PAPER_CENTROID = Args(
    total_timesteps=4_000_000, num_envs=64, num_steps=128,
    compile=True, num_layers=3, num_heads=8, hidden_dim=8, feedforward_dim=32, mlp_dim=32, dropout=0.1,
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
# For ids of others, chosen on CartPole: returns of hundreds need a small weight of the value loss.
OTHER = Args(
    total_timesteps=131_072, num_envs=16, learning_rate=2.5e-3, gamma=0.99, gae_lambda=0.95, minibatch_size=512,
    vf_coef=0.001, ent_coef=0.005, max_grad_norm=10.0,
)  # fmt: skip
FAST = {"simple_centroid": Args(), "simple_tag": TAG, "box_world": BOX, registration.OTHER: OTHER}
PAPER = {"simple_centroid": PAPER_CENTROID, "simple_tag": PAPER_TAG, "box_world": PAPER_BOX}
GENERAL = ("SimpleCentroid-v0", "SimpleTag-v0", "SimpleTagMPE-v0", "BoxWorld-v0")  # no experiments of the paper


# lowest and highest value of the settings that are not any whole numbers from 1
LIMITS = {
    "learning_rate": (0, 1e6), "gamma": (0, 1), "gae_lambda": (0, 1), "clip_coef": (0, math.inf), "dropout": (0, 0.99),
    "ent_coef": (0, 1e6), "vf_coef": (0, 1e6), "kl_coef": (0, 1e6), "kl_target": (1e-9, math.inf),
    "max_grad_norm": (1e-9, math.inf), "init_std": (0, 100), "log_std_min": (-20, 20), "log_std_max": (-20, 20),
    "seed": (0, 2**63 - 1), "threads": (1, 1024), "eval_episodes": (1, 10**6), "num_layers": (1, 1000),
    "hidden_dim": (1, 2**14), "feedforward_dim": (1, 2**14), "mlp_dim": (1, 2**14), "type_dim": (1, 2**14),
}  # fmt: skip
# what may be changed when a run goes on, beside its length: no setting that learning depends on
KEPT_FREE = {
    "resume", "total_timesteps", "device", "threads", "compile", "cuda_graphs", "deterministic", "run_dir",
    "save_every", "track", "wandb_project", "eval_episodes", "eval_actions", "gif",
}  # fmt: skip


class Block(nn.Module):
    """A pre-norm transformer layer: attention without bias, then a feed-forward block, both residual."""

    def __init__(self, args: Args) -> None:
        """Make the layer; `Agent` draws its weights."""
        super().__init__()
        dim, self.num_heads, self.keep = args.hidden_dim, args.num_heads, 1 - args.dropout
        self.scale = 1 / math.sqrt(dim / args.num_heads if args.attention_scale == "head" else dim)
        self.narrow = args.compile and args.num_heads == dim
        self.token_axis = 0 if self.narrow and torch.device(args.device).type == "cpu" else 1  # see `narrow_attention`
        self.norm_attention, self.norm_feedforward = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.query_key_value = nn.Linear(dim, 3 * dim, bias=False)
        self.output = nn.Linear(dim, dim, bias=False)
        self.feedforward = nn.Sequential(
            nn.Linear(dim, args.feedforward_dim), nn.GELU(), nn.Linear(args.feedforward_dim, dim)
        )

    def forward(self, x: Tensor, mask: Tensor | None, kept: Tensor | None) -> Tensor:
        """Embed tokens (R, N, H) under a mask (R, N) to (R, N, H); dropout keeps the numbers `kept` (R, N, H).

        Where `token_axis` is 0, N comes before R in all of them.
        """
        if self.narrow:
            normed, weight = self.norm_attention(x), self.query_key_value.weight
            mixed = narrow_attention(normed, weight, mask, self.scale, self.token_axis)
        else:
            query, key, value = self.project(x)
            allowed = None if mask is None else mask[:, None, None]
            mixed = F.scaled_dot_product_attention(query, key, value, allowed, scale=self.scale)
            mixed = mixed.transpose(1, 2).flatten(2)
        x = x + self.output(mixed)
        change = self.feedforward(self.norm_feedforward(x))
        return x + (change if kept is None else change * kept / self.keep)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of tokens (R, N, H), each (R, heads, N, H / heads)."""
        heads = self.query_key_value(self.norm_attention(x)).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        return query, key, value

    def attention(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Return the weights (R, heads, N, N) by which tokens (R, N, H) look at each other."""
        query, key, _ = self.project(x)
        scores = query @ key.mT * self.scale
        return (scores if mask is None else scores.masked_fill(~mask[:, None, None], -math.inf)).softmax(-1)


# pooling head: the class of noisy_envs/nn/pooling.py, word for word
class AdaPool(nn.Module):
    """Global adaptive pooling: cross-attention with one query (Definition 3.9, equations 6 and 7).

    AdaPool(X) = sum_i w_i x_i W_V with w = softmax(r) and r_i = x_q W_Q W_K' x_i' * scale, in each of
    `num_heads` slices of the features (Appendix B.2); an output projection follows, and `residual` adds x_q.
    AvgPool and MaxPool are special cases (Corollaries 3.10 and 3.11). Where the tokens named by `query` stand
    matters; the order of the others changes nothing. No token is projected by itself: of `key` and `value` only
    the weights are used, so that hooks on these two never fire.

    Args:
        dim: D, a multiple of num_heads.
        num_heads: how many sets of weights.
        query: what x_q is: the token at an index (0, the agent's own), the mean of those at several, "mean"
            of all, or "learned", a parameter as in the Set Transformer. A mean is over real tokens; if there
            is none at those indices, x_q is zero and the weights are uniform.
        residual: whether x_q is added to the output.
        scale: of the scores r. None is the usual 1/sqrt(dim / num_heads); the authors' code has 1/sqrt(dim)
            since February 2025.
        init_std: of the weights, drawn from Normal(0, init_std).
        output_std: that of the output projection, if another.
        generator: a CPU generator that draws the weights; None stands for a fresh one seeded with 0. The
            global random state is neither read nor changed.
    """

    token_axis = 2  # of the weights

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
        places = query.tolist() if hasattr(query, "tolist") else query  # NumPy's numbers become Python's
        places = (places,) if isinstance(places, int) else places
        if isinstance(places, Sequence) and not isinstance(places, str):
            places = tuple(i.tolist() if hasattr(i, "tolist") else i for i in places)
        several = isinstance(places, tuple) and places and all(type(i) is int and i >= 0 for i in places)
        if not several and places not in ("mean", "learned"):
            raise ValueError(f"query must be an index >= 0, several, 'mean' or 'learned', got {query!r}")
        output_std = init_std if output_std is None else output_std
        for name, value in (("init_std", init_std), ("output_std", output_std)):
            if not 0 <= value <= 1e18:  # what float32 can square; NaN fails too
                raise ValueError(f"{name} must be from 0 to 1e18, got {value}")
        if scale is not None and not abs(scale) <= 1e18:
            raise ValueError(f"scale must be from -1e18 to 1e18, got {scale}")
        self.places = places
        self.num_heads = num_heads
        self.residual = residual
        self.scale = 1 / math.sqrt(dim / num_heads) if scale is None else scale
        # Made on "meta", then allocated: Linear would draw its weights from the global generator.
        read = nn.modules.linear.NonDynamicallyQuantizableLinear  # stays as it is: only its weights are used
        self.query, self.key, self.value, self.output = (
            kind(dim, dim, bias=False, device="meta").to_empty(device="cpu")
            for kind in (nn.Linear, read, read, nn.Linear)
        )
        generator = generator or torch.Generator().manual_seed(0)
        for linear in (self.query, self.key, self.value):
            nn.init.normal_(linear.weight, 0.0, init_std, generator)
        nn.init.normal_(self.output.weight, 0.0, output_std, generator)
        if self.places == "learned":
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
            return self.learned.expand(embeddings.shape[0], -1)
        if isinstance(self.places, tuple):  # slices: a list as index is copied to the device at every call
            embeddings = torch.stack([embeddings[:, place] for place in self.places], dim=1)
            mask = torch.stack([mask[:, place] for place in self.places], dim=1)
        wide = torch.promote_types(embeddings.dtype, torch.float32)  # float16 cannot count beyond 65,504
        weights = (mask.to(wide) / mask.sum(dim=1, keepdim=True).clamp(min=1)).to(embeddings.dtype)
        return (weights.unsqueeze(2) * embeddings).sum(dim=1)

    def _check(self, embeddings: Tensor, mask: Tensor | None) -> None:
        shape, dim = tuple(embeddings.shape), self.query.in_features
        if len(shape) != 3 or shape[1] == 0 or shape[2] != dim:
            raise ValueError(f"embeddings must be (B, N, {dim}) with N >= 1, got {shape}")
        if mask is not None and (mask.shape != shape[:2] or mask.dtype != torch.bool):
            raise ValueError(f"mask must be torch.bool {shape[:2]}, got {mask.dtype} {tuple(mask.shape)}")
        if isinstance(self.places, tuple) and max(self.places) >= shape[1]:
            raise ValueError(f"query {max(self.places)} must be below {shape[1]}, the number of tokens")


def make_pool(args: Args, query: int, generator: torch.Generator) -> AdaPool:
    """Make the head for embeddings (R, N, H), of which the one at `query` is the learner's own."""
    return AdaPool(
        args.hidden_dim,
        args.num_heads,
        query=query,
        scale=None if args.attention_scale == "head" else 1 / math.sqrt(args.hidden_dim),
        init_std=args.init_std,
        output_std=args.init_std / math.sqrt(2 * args.num_layers),
        generator=generator,
    )


# end of pooling head


def mlp(dim: int, hidden: int, out: int) -> nn.Sequential:
    """Return a network of three layers."""
    return nn.Sequential(
        nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, out)
    )


class Agent(nn.Module):
    """Encoder, pooling head, actor and critic.

    All weights but the head's are drawn first, so that agents that differ only in the head start alike, and the
    head's from what follows in the same generator.
    """

    def __init__(self, args: Args, spec: TokenSpec, action_space: Any) -> None:
        """Make the network for tokens of `spec` and actions, Box, Discrete, or such of several alike, on the CPU."""
        super().__init__()
        self.spec, self.log_std_range = spec, (args.log_std_min, args.log_std_max)
        self.continuous = isinstance(action_space, gymnasium.spaces.Box)
        if self.continuous:
            self.num_actions = action_space.shape[-1]
        else:  # several learners of a world have a MultiDiscrete one
            self.num_actions = int(action_space.n if hasattr(action_space, "n") else action_space.nvec[-1])
        dim, features = args.hidden_dim, spec.num_features
        with torch.random.fork_rng(devices=[]):  # torch's layers draw from the global state, before ours replace it
            if spec.roles:  # the role, a number of a kind, becomes a learned vector
                self.role = nn.Embedding(1 + max(spec.roles.values()), args.type_dim)
                features += args.type_dim - 1
            self.project = nn.Sequential(nn.Linear(features, dim), nn.GELU())
            self.blocks = nn.ModuleList(Block(args) for _ in range(args.num_layers))
            outputs = 2 * self.num_actions if self.continuous else self.num_actions
            self.actor, self.critic = mlp(dim, args.mlp_dim, outputs), mlp(dim, args.mlp_dim, 1)
        generator = torch.Generator().manual_seed(args.seed)
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                last_of_residual = name.endswith("output.weight")
                std = args.init_std / (math.sqrt(2 * args.num_layers) if last_of_residual else 1)
                nn.init.normal_(weight, 0.0, std, generator)
            elif name.endswith("bias"):
                nn.init.zeros_(weight)
        self.pool = make_pool(args, spec.query_index, generator)
        extended, _ = self.pool.extend(torch.zeros(1, spec.num_tokens, dim))
        self.tokens_first = self.blocks[0].token_axis == 0
        rows = args.minibatch_size
        shape = (extended.shape[1], rows) if self.tokens_first else (rows, extended.shape[1])
        self.kept_shape = args.num_layers, *shape, dim  # of dropout in an update

    def encode(self, tokens: Tensor, kept: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Embed tokens (R, N, D): embeddings (R, N, H) and the mask of real ones (R, N), None if all are.

        In updates dropout keeps the numbers `kept`, bool (layers, R, N, H), or as the layers have it (see `Block`).
        ClsToken makes N one larger.
        """
        x, mask = self.enter(tokens)
        inner = mask
        if self.tokens_first:
            x, inner = x.transpose(0, 1).contiguous(), None if mask is None else mask.transpose(0, 1)
        for layer, block in enumerate(self.blocks):
            x = block(x, inner, None if kept is None else kept[layer])
        return x.transpose(0, 1) if self.tokens_first else x, mask

    def enter(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """Project tokens (R, N, D) to what the first layer takes, and tell which are real."""
        mask = self.spec.mask(tokens) if self.spec.padded else None
        if mask is not None:  # attention weighs padding with 0, and 0 times NaN is NaN
            tokens = tokens.masked_fill(~mask.unsqueeze(-1), 0)
        if self.spec.roles:
            role = self.role(tokens[..., self.spec.padding_feature].long().clamp(min=0))
            tokens = torch.cat([tokens[..., : self.spec.padding_feature], role], dim=-1)
        entered: tuple[Tensor, Tensor | None] = self.pool.extend(self.project(tokens), mask)
        return entered

    def forward(self, tokens: Tensor, kept: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the parameters of the action distribution (R, A) or (R, 2 A), and the values (R,)."""
        pooled = self.pool(*self.encode(tokens, kept))
        return self.actor(pooled), self.critic(pooled).squeeze(-1)

    def token_weights(self, tokens: Tensor) -> Tensor:
        """Return what each token (R, N, D) weighs in the pool, a mean over heads or features: (R, N)."""
        x, mask = self.enter(tokens)
        last: Any = self.blocks[-1]
        for block in self.blocks[:-1]:
            x = block(x, mask, None)
        pool: Any = self.pool
        weights: Tensor = pool.weights(last(x, mask, None), mask, last.attention(x, mask))
        weights = weights.movedim(pool.token_axis, -1)
        return weights if weights.dim() == 2 else weights.mean(dim=1)

    def normal(self, parameters: Tensor) -> tuple[Tensor, Tensor]:
        """Split parameters (R, 2 A) into means and log standard deviations."""
        mean, log_std = parameters.chunk(2, dim=-1)
        return mean, log_std.clamp(*self.log_std_range)

    def noise(self, shape: tuple[int, ...], device: str, generator: torch.Generator) -> Tensor:
        """Draw what `sample` takes for actions of leading `shape`: normal numbers, or Gumbel's."""
        noise = torch.empty((*shape, self.num_actions), device=device)
        return noise.normal_(generator=generator) if self.continuous else -noise.exponential_(generator=generator).log()

    def sample(self, parameters: Tensor, noise: Tensor) -> Tensor:
        """Turn noise into actions: normal ones (R, A), or integers (R,) by the Gumbel-max trick."""
        if not self.continuous:
            return (parameters + noise).argmax(-1)
        mean, log_std = self.normal(parameters)
        return mean + noise * log_std.exp()

    def best(self, parameters: Tensor) -> Tensor:
        """Return the mean or most probable actions."""
        return self.normal(parameters)[0] if self.continuous else parameters.argmax(-1)

    def log_prob(self, parameters: Tensor, actions: Tensor) -> Tensor:
        """Return the logarithm of the probability, or of its density, of actions: (R,)."""
        if not self.continuous:
            return parameters.log_softmax(-1).gather(-1, actions.unsqueeze(-1)).squeeze(-1)
        mean, log_std = self.normal(parameters)
        squares = ((actions - mean) / log_std.exp()).square()
        return -(0.5 * squares + log_std + 0.5 * math.log(2 * math.pi)).sum(-1)

    def entropy(self, parameters: Tensor) -> Tensor:
        """Return the entropy of the distribution, (R,)."""
        if not self.continuous:
            logs = parameters.log_softmax(-1)
            return -(logs.exp() * logs).sum(-1)
        return (self.normal(parameters)[1] + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)

    def divergence(self, old: Tensor, new: Tensor) -> Tensor:
        """Return KL(old || new) of two distributions by their parameters, (R,)."""
        if not self.continuous:
            old_logs, new_logs = old.log_softmax(-1), new.log_softmax(-1)
            return (old_logs.exp() * (old_logs - new_logs)).sum(-1)
        (mean, log_std), (new_mean, new_log_std) = self.normal(old), self.normal(new)
        squares = (mean - new_mean).square() + (2 * log_std).exp()
        return (new_log_std - log_std + 0.5 * squares * (-2 * new_log_std).exp() - 0.5).sum(-1)


class Play(NamedTuple):
    """Where a rollout stands."""

    worlds: Any  # what `pure_step` of the environments takes
    tokens: Tensor  # (R, N, D) what the learners see
    returns: Tensor  # (R,) of their episodes so far
    lengths: Tensor  # (R,)


class Batch(NamedTuple):
    """What a rollout saw, (T, R, ...) each."""

    tokens: Tensor
    actions: Tensor
    parameters: Tensor  # of the distribution that drew the actions
    values: Tensor
    rewards: Tensor
    final_tokens: Tensor  # after the step, before any reset
    terminated: Tensor
    truncated: Tensor
    returns: Tensor  # of the episode up to and with the step
    lengths: Tensor


def play_step(
    policy: Callable[..., Any], agent: Agent, pure_step: Callable[..., Any], play: Play, noise: Tensor
) -> tuple[Play, Batch]:
    """Let the learners act once, by noise (R, A): a pure function of tensors, which a GPU runs without the host."""
    parameters, values = policy(play.tokens)
    actions = agent.sample(parameters, noise)
    worlds, outcome = pure_step(play.worlds, actions)
    returns, lengths = play.returns + outcome.reward, play.lengths + 1
    going_on = ~(outcome.terminated | outcome.truncated)
    batch = Batch(
        play.tokens, actions, parameters, values,
        outcome.reward, outcome.final_tokens, outcome.terminated, outcome.truncated, returns, lengths,
    )  # fmt: skip
    return Play(worlds, outcome.tokens, returns * going_on, lengths * going_on), batch


def rollout(step: Callable[..., Any], play: Play, noise: Tensor) -> tuple[Play, Batch]:
    """Play T steps, by noise (T, R, A)."""
    steps = []
    for row in noise:
        play, one = step(play, row)
        steps.append(one)
    return play, Batch(*(torch.stack(column) for column in zip(*steps, strict=True)))


def values_after(policy: Callable[..., Any], agent: Agent, batch: Batch, last: Tensor) -> Tensor:
    """Return the values (T, R) of the states that the steps led to, before any reset.

    A terminated episode has nothing to come: 0. A truncated one goes on in principle, so its last state has a value.
    `last` (R,) are the values after the batch.
    """
    following = torch.cat([batch.values[1:], last[None]])
    cut = batch.truncated & ~batch.terminated
    if batch.tokens.is_cuda:  # to ask for the cut rows alone would wait for the GPU
        final_values = policy(batch.final_tokens.flatten(0, 1))[1].unflatten(0, cut.shape)
        following = torch.where(cut, final_values, following)
    elif cut.any():
        following[cut] = agent(batch.final_tokens[cut])[1]
    return following * ~batch.terminated


def advantages(
    rewards: Tensor, values: Tensor, next_values: Tensor, ended: Tensor, gamma: float, gae_lambda: float
) -> Tensor:
    """Estimate generalised advantages; all arguments and the result are (T, R).

    `next_values` bootstraps: the value of the state that the step led to, also where a time limit cut the episode,
    and 0 where it terminated. Nothing flows back over the end of an episode.
    """
    result, later = [], torch.zeros_like(rewards[0])
    deltas = rewards + gamma * next_values - values
    through = gamma * gae_lambda * (~ended).to(rewards.dtype)
    for t in reversed(range(len(rewards))):
        later = deltas[t] + through[t] * later
        result.append(later)
    return torch.stack(result[::-1])


class Samples(NamedTuple):
    """What a gradient step learns from, a row each."""

    tokens: Tensor  # (M, N, D)
    actions: Tensor
    parameters: Tensor  # of the distribution that drew the actions
    log_probs: Tensor  # (M,), as the next two
    gains: Tensor  # normalised advantages
    targets: Tensor  # of the value


def collect(
    step: Callable[..., Any], policy: Callable[..., Any], agent: Agent, args: Args, play: Play, noise: Tensor
) -> tuple[Play, Samples, Tensor]:
    """Play, and prepare what was seen for learning: where the rollout stands, T·R samples, and what to log (5,)."""
    play, batch = rollout(step, play, noise)
    next_values = values_after(policy, agent, batch, policy(play.tokens)[1])
    ended = batch.terminated | batch.truncated
    gains = advantages(batch.rewards, batch.values, next_values, ended, args.gamma, args.gae_lambda)
    targets = gains + batch.values
    mean = average(gains.mean())
    spread = average((gains - mean).square().mean()).sqrt()
    samples = Samples(
        batch.tokens,
        batch.actions,
        batch.parameters,
        agent.log_prob(batch.parameters, batch.actions),
        (gains - mean) / (spread + 1e-8),
        targets,
    )
    finite = agent.spec.finite(batch.tokens) & agent.spec.finite(batch.final_tokens)
    unexplained = average((targets - batch.values).var()) / average(targets.var())
    seen = [(batch.returns * ended).sum(), (batch.lengths * ended).sum(), ended.sum(), finite, 1 - unexplained]
    return play, Samples(*(x.flatten(0, 1) for x in samples)), torch.stack([x.float() for x in seen])


CPU_CHUNK = 1024  # samples
NOT_FINITE = "{} showed an observation that is not finite"
LOSSES = ("policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac")


def ppo_loss(agent: Agent, samples: Samples, kept: Tensor | None, args: Args, kl_coef: Tensor) -> tuple[Tensor, Tensor]:
    """Return PPO's loss, and what it is made of (5,), see `LOSSES`."""
    parameters, values = agent(samples.tokens, kept)
    ratio = (agent.log_prob(parameters, samples.actions) - samples.log_probs).exp()
    clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    policy_loss = -torch.min(samples.gains * ratio, samples.gains * clipped).mean()
    value_loss = (values - samples.targets).square().mean()
    entropy = agent.entropy(parameters).mean()
    kl = agent.divergence(samples.parameters, parameters).mean()
    loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy + kl_coef * kl
    outside = (ratio != clipped).float().mean()
    return loss, torch.stack([policy_loss, value_loss, entropy, kl, outside]).detach()


def gradient(
    loss_of: Callable[..., tuple[Tensor, Tensor]], agent: Agent, samples: Samples, kept: Tensor | None, kl_coef: Tensor
) -> Tensor:
    """Leave the gradient of the loss in the weights' `grad`, and return the parts of the loss.

    A CPU takes as many samples at a time as its caches hold.
    """
    for weight in agent.parameters():
        weight.grad = None
    size = len(samples.gains)
    some = size if samples.gains.is_cuda else max(i for i in range(1, min(size, CPU_CHUNK) + 1) if size % i == 0)
    pieces = zip(*(x.split(some) for x in samples), strict=True)
    masks = [None] * (size // some) if kept is None else kept.split(some, dim=2 if agent.tokens_first else 1)
    total = torch.zeros(len(LOSSES), device=samples.gains.device)
    for piece, mask in zip(pieces, masks, strict=True):
        loss, parts = loss_of(Samples(*piece), mask, kl_coef)
        (loss * (some / size)).backward()
        total += parts * (some / size)
    return total


def average(x: Tensor) -> Tensor:
    """Return the mean of a tensor over the processes that train together."""
    if dist.is_initialized():
        x = x.clone()
        dist.all_reduce(x)
        x /= dist.get_world_size()
    return x


def average_gradients(agent: Agent) -> None:
    """Replace the weights' gradients by their means over the processes, in one message."""
    weights = list(agent.parameters())
    mean = average(torch.cat([weight.grad.flatten() for weight in weights if weight.grad is not None]))
    for weight, part in zip(weights, mean.split([weight.numel() for weight in weights]), strict=True):
        weight.grad = part.view_as(weight)


def minibatches(size: int, args: Args, generator: torch.Generator) -> list[Tensor | None]:
    """Split the rows of an update at random; None stands for all of them."""
    if args.minibatch_size == size:
        return [None]
    order = torch.randperm(size, generator=generator, device=generator.device)
    return list(order.split(args.minibatch_size))


def update(
    gradient_of: Callable[..., Tensor],
    agent: Agent,
    optimizer: torch.optim.Optimizer,
    samples: Samples,
    args: Args,
    kl_coef: float,
    generator: torch.Generator,
) -> Tensor:
    """Improve the agent on samples by PPO; returns the means of `LOSSES`, and of the gradient's norm: (6,)."""
    seen, coefficient = [], samples.gains.new_full((), kl_coef)
    for _ in range(args.update_epochs):
        for rows in minibatches(len(samples.gains), args, generator):
            part = samples if rows is None else Samples(*(x[rows] for x in samples))
            kept = None
            if args.dropout:
                kept = torch.empty(agent.kept_shape, dtype=torch.bool, device=coefficient.device)
                kept.bernoulli_(1 - args.dropout, generator=generator)
            parts = gradient_of(part, kept, coefficient)
            if dist.is_initialized():
                average_gradients(agent)
            norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
            optimizer.step()
            seen.append(torch.cat([parts, norm[None]]))
    return average(torch.stack(seen).mean(dim=0))


def env_options(args: Args) -> dict[str, Any]:
    """Return the options of the environment; where the settings ask for a range, a start does not tell the number.

    Raises:
        ValueError, TypeError: as `asked_options` and `registration.same_start` do.
    """
    options = asked_options(args)
    return options | registration.same_start(args.env_id, options)


def as_trained(args: Args, trained: Args) -> Args:
    """Return the settings of an evaluation whose worlds start as those of training, `trained`, at any noise."""
    start = registration.same_start(args.env_id, asked_options(args), (trained.env_id, env_options(trained)))
    return dataclasses.replace(args, options=(*args.options, *(f"{name}={start[name]}" for name in start)))


def asked_options(args: Args) -> dict[str, Any]:
    """Return the options of the environment that the settings ask for.

    Raises:
        ValueError: naming what this game lacks, or what cannot be read.
    """
    game, _ = registration.find(args.env_id)
    options = {}
    for word in args.options:
        name, equals, value = word.partition("=")
        if not equals:
            raise ValueError(f"options={word!r}: must be NAME=VALUE")
        if name in options:
            raise ValueError(f"options={word!r}: {name} is given twice")
        try:
            options[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # the last three for odd nesting
            options[name] = value  # a word
    asked = {}
    if args.num_noise:
        asked["num_noise"] = registration.NOISE, args.num_noise[0]
    if args.num_agents > 1:
        asked["num_agents"] = registration.LEARNERS, args.num_agents
    for setting, (known, number) in asked.items():
        if game not in known:
            raise ValueError(f"{setting}={number}: {args.env_id} has none, only {registration.join_names(known)}")
        if known[game] in options and not args.evaluate:  # which asks for other noise than a run's own
            raise ValueError(f"{setting}={number}: {known[game]} is among the options too, give one of them")
        options[known[game]] = number
    return options


def game_of(args: Args) -> Any:
    """Return the rules of the environment, with its options.

    Raises:
        ValueError: naming an option that is unknown, or a value that is not allowed.
    """
    game, parameters = registration.find(args.env_id)
    if game == registration.OTHER:
        return gymnasium_envs.GymnasiumGame(args.env_id, env_options(args))
    try:
        return build(registration.GAMES[game], parameters | env_options(args))
    except TypeError as error:
        raise ValueError(str(error)) from None


def is_foreign(args: Args) -> bool:
    """Tell whether the environment is not of this project, but made noisy by its wrappers."""
    return registration.find(args.env_id)[0] == registration.OTHER


def draws(args: Args) -> bool:
    """Tell whether a run draws an episode at its end."""
    return args.gif and (not is_foreign(args) or game_of(args).draws)


def team(args: Args) -> str:
    """Name the agents that learn."""
    game, _ = registration.find(args.env_id)
    if args.parallel_env or (args.num_agents > 1 and game == "simple_centroid"):
        return "all"
    return "predators" if args.num_agents > 1 else "first"


def unseen(args: Args, trained: Args | None) -> dict[str, Any]:
    """Return the options of an evaluation: no level is of those that a run of the settings `trained` draws from."""
    options = env_options(args)
    return options | registration.eval_levels(args.env_id, options, env_options(trained or args))


def make_envs(
    args: Args, num_envs: int, purpose: str, first: int = 0, trained: Args | None = None
) -> tuple[Any, Tensor]:
    """Make worlds, and return them with what their learners see (R, N, D).

    Their seeds belong to this run and purpose alone; `first` is the number of the first world. To evaluate, `trained`
    are the settings of training, where `args` are others.
    """
    options = unseen(args, trained) if purpose == "evaluate" else env_options(args)
    envs: Any
    if is_foreign(args):
        envs = gymnasium_envs.ForeignVectorEnv(game_of(args), num_envs, args.device)
    else:
        envs = gymnasium.make_vec(
            args.env_id,
            num_envs,
            backend="torch",
            device=args.device,
            learners=team(args),
            autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP,
            **options,
        )
    tokens, _ = envs.reset(seed=derive_seed(args.seed, purpose) + first)
    return envs, tokens.flatten(0, -3)


def references(args: Args) -> BaselineReturns:
    """Return the returns of random play and of the oracle, or in a foreign environment of what counts as solved.

    They are NaN, and so is every score, where the learners play against each other, or the oracle is no better.
    """
    unknown = BaselineReturns(math.nan, math.nan)
    if team(args) == "all" and registration.find(args.env_id)[0] == "simple_tag":
        return unknown
    if is_foreign(args):
        found = game_of(args).references
    else:
        as_registered = game_of(args) == game_of(dataclasses.replace(args, options=(), num_noise=(), num_agents=1))
        found = baseline_returns(args.env_id, None if as_registered else env_options(args))
    return found if found.oracle > found.random else unknown


def decide(agent: Agent, tokens: Tensor, args: Args, generator: torch.Generator) -> Tensor:
    """Return the actions that an evaluation takes.

    Raises:
        FloatingPointError: an observation is not finite.
    """
    if not agent.spec.finite(tokens):
        raise FloatingPointError(NOT_FINITE.format(args.env_id))
    parameters, _ = agent(tokens)
    if args.eval_actions == "best":
        return agent.best(parameters)
    return agent.sample(parameters, agent.noise((len(tokens),), args.device, generator))


def evaluate(agent: Agent, args: Args, episodes: int, trained: Args | None = None) -> np.ndarray:
    """Play one episode in each of `episodes` worlds that training never sees: mean returns of the learners (E,).

    Raises:
        FloatingPointError: an observation, or a return, is not finite.
    """
    envs, tokens = make_envs(args, episodes, "evaluate", trained=trained)
    agent.spec = envs.token_spec
    generator = torch.Generator(args.device).manual_seed(args.seed)
    total = torch.zeros(episodes, device=args.device)
    running = torch.ones(episodes, dtype=torch.bool, device=args.device)
    with torch.inference_mode():
        while running.any():
            actions = decide(agent, tokens, args, generator).reshape(envs.action_space.shape)
            tokens, rewards, terminated, truncated, _ = envs.step(actions)
            tokens = tokens.flatten(0, -3)
            total += rewards.reshape(episodes, -1).mean(dim=1).where(running, 0)
            running &= ~(terminated | truncated)
    if not total.isfinite().all():
        raise FloatingPointError(f"{args.env_id} gave a return that is not finite")
    return total.cpu().numpy()


def overlap(args: Args, trained: Args) -> dict[str, float]:
    """Return which share of an evaluation's levels, by what lies in them, are among those of training; {} without."""
    bank = game_of(trained)
    if not hasattr(bank, "known"):
        return {}
    envs, _ = make_envs(dataclasses.replace(args, device="cpu"), args.eval_episodes, "evaluate", trained=trained)
    return {"known_levels": bank.known_share(envs.game.render_text(envs.state))}


def film(agent: Agent, args: Args, trained: Args | None = None) -> list[np.ndarray]:
    """Draw an episode of the evaluation, each token with a halo as strong as its weight in the pool."""
    game, parameters = registration.find(args.env_id)
    env: Any
    if is_foreign(args):
        env = gymnasium_envs.OneForeign(game_of(args))
    else:
        env = ParallelTokenEnv(game, "rgb_array", team(args), **(parameters | unseen(args, trained)))
    observations, _ = env.reset(seed=derive_seed(args.seed, "evaluate"))
    agent.spec = env.token_spec
    generator = torch.Generator(args.device).manual_seed(args.seed)
    frames: list[Any] = []
    with torch.inference_mode():
        while env.agents:
            tokens = torch.from_numpy(np.stack(list(observations.values()))).to(args.device)
            actions = decide(agent, tokens, args, generator).cpu().numpy()
            frames.append(env.render(weights=agent.token_weights(tokens)[0].cpu().numpy()))
            observations, *_ = env.step(dict(zip(env.agents, actions, strict=True)))
    frames.append(env.render())
    env.close()
    return frames


def parse(argv: Sequence[str]) -> Args:
    """Read the settings; `--env-id` and `--preset` pick the defaults of the others, or the run that is given does."""
    first = argparse.ArgumentParser(usage="%(prog)s [OPTIONS]", add_help=False, allow_abbrev=False)
    for option in ("env-id", "preset", "device", "resume", "parallel-env"):
        first.add_argument(f"--{option}", f"--{option.replace('-', '_')}")
    first.add_argument("--evaluate", nargs="+", default=[])  # none at all would train the demo
    chosen = first.parse_known_args(argv)[0]
    if chosen.evaluate:
        paths = only_runs([Path(path) for path in chosen.evaluate])
        args = dataclasses.replace(asked_of(argv, paths[0]), evaluate=tuple(paths))
    elif chosen.resume is not None:
        saved = load_args(Path(chosen.resume))
        args = parse_arguments(Args, argv, saved)
        path = checkpoint_path(Path(chosen.resume))
        if path.name != "checkpoint.pt":
            raise ValueError(f"resume={chosen.resume!r}: must be a run's folder, which goes on from its checkpoint.pt")
        args = dataclasses.replace(args, resume=path.parent)
        check_resumed(saved, args)
    else:
        env_id = chosen.env_id or registration.PARALLEL.get(chosen.parallel_env, Args.env_id)
        game, _ = registration.find(env_id)
        general = game not in PAPER or env_id.removeprefix("noisy_envs/") in GENERAL
        fast = chosen.preset == "fast" or (not chosen.preset and general)
        if not fast and game not in PAPER:
            raise ValueError(f"preset={chosen.preset!r}: the paper has none for {env_id}, only 'fast' is allowed")
        defaults = dataclasses.replace((FAST if fast else PAPER)[game], env_id=env_id)
        on_gpu = (chosen.device or "cpu").startswith("cuda")
        can_compile = on_gpu or shutil.which(os.environ.get("CXX", "g++")) is not None
        compiled = can_compile and (on_gpu or defaults.compile)
        defaults = dataclasses.replace(defaults, preset="fast" if fast else "paper", compile=compiled)
        args = parse_arguments(Args, argv, defaults)
    args = dataclasses.replace(args, env_id=registration.canonical_id(args.env_id))
    check(args)
    return args


def asked_of(argv: Sequence[str], path: Path) -> Args:
    """Return the settings of a run's evaluation: its own, where a word does not tell otherwise.

    Raises:
        ValueError: the run has learned another game than is asked for.
    """
    own = load_args(path)
    args = parse_arguments(Args, argv, dataclasses.replace(own, num_noise=()))
    args = dataclasses.replace(args, env_id=registration.canonical_id(args.env_id))
    game, _ = registration.find(args.env_id)
    if args.env_id != own.env_id and (game != registration.find(own.env_id)[0] or game == registration.OTHER):
        raise ValueError(f"env_id={args.env_id!r}: {path} learned another game, {own.env_id}")
    return args


def load_args(folder: Path) -> Args:
    """Read the settings of a run from its checkpoint."""
    path = checkpoint_path(folder)
    content: Any = load_checkpoint(path)
    saved = content.get("args") if isinstance(content, dict) else None
    if not isinstance(saved, dict) or not isinstance(content.get("agent"), dict):
        raise ValueError(f"{path} is no checkpoint of an agent: it holds no settings, or no weights")
    saved = {name: getattr(Args, name) for name in KEPT_FREE} | saved  # a run may be older than such a setting
    known = {field.name for field in dataclasses.fields(Args)}
    if saved.keys() != known:
        raise ValueError(f"{folder} is of another version of this file: it differs in {sorted(saved.keys() ^ known)}")
    for name, value in saved.items():
        check_kind(path, name, value)
    return Args(**{**saved, "run_dir": Path(saved["run_dir"])})


def check_kind(path: Path, name: str, value: Any) -> None:
    """Raise ValueError if a setting in a checkpoint is of another kind than its default."""
    default = getattr(Args, name)
    kind = str if isinstance(default, Path) else type(default)
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise ValueError(f"{path} is no checkpoint of an agent: {name}={value!r} must be of the kind {kind.__name__}")


def check_resumed(saved: Args, args: Args) -> None:
    """Raise ValueError if a setting that learning depends on is not that of the run."""
    for field in dataclasses.fields(Args):
        old, new = getattr(saved, field.name), getattr(args, field.name)
        if old != new and field.name not in KEPT_FREE:
            raise ValueError(f"{field.name}={new!r}: the run to resume has {old!r}")
    if args.anneal_lr and args.total_timesteps != saved.total_timesteps:
        raise ValueError(
            f"total_timesteps={args.total_timesteps}: must stay {saved.total_timesteps}, since the rate is annealed"
        )
    if torch.device(args.device).type != torch.device(saved.device).type:
        raise ValueError(f"device={args.device!r}: the run to resume was on {saved.device!r}")


def check(args: Args) -> None:
    """Raise ValueError, naming the setting, its value and what is allowed."""
    registration.find(args.env_id)
    if args.parallel_env and registration.PARALLEL[args.parallel_env] != args.env_id:
        raise ValueError(f"parallel_env={args.parallel_env!r}: give it alone, without env_id={args.env_id!r}")
    for field in dataclasses.fields(Args):
        value = getattr(args, field.name)
        lowest, highest = LIMITS.get(field.name, (1, math.inf))
        if type(value) in (int, float) and not lowest <= value <= highest:  # NaN fails too
            raise ValueError(f"{field.name}={value}: must be from {lowest} to {highest}")
    game = game_of(args)
    if not hasattr(game, "token_spec"):
        raise ValueError(f"options={args.options}: must leave observations that are tokens, not pictures")
    if args.record is not None and is_foreign(args) and not game.draws:
        raise ValueError(f"record={str(args.record)!r}: {args.env_id} cannot be drawn as an image")
    try:
        torch.zeros((), device=args.device).item()  # which "meta" refuses as well
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device={args.device!r}: {str(error).splitlines()[0]}") from None
    check_request(args)
    check_sizes(args)


def check_request(args: Args) -> None:
    """Check what is to be done, as `check` does."""
    if len(args.num_noise) > 1 and not args.evaluate:
        raise ValueError(f"num_noise={args.num_noise}: one number to train with; several are for --evaluate")
    if args.record is not None:
        if not args.evaluate:
            raise ValueError(f"record={str(args.record)!r}: only with --evaluate; a run draws its episode.gif itself")
        check_video_path(args.record)
    if args.evaluate and args.resume is not None:
        raise ValueError(f"resume={str(args.resume)!r}: not with --evaluate, which trains nothing")
    if args.track:
        import_wandb()


def check_sizes(args: Args) -> None:
    """Check what must fit together, as `check` does."""
    size = args.num_envs * args.num_steps * num_learners(args)
    if args.total_timesteps < size and not args.evaluate:
        raise ValueError(f"total_timesteps={args.total_timesteps}: less than the {size} of one update")
    if (args.minibatch_size < 2 or size % args.minibatch_size) and not args.evaluate:
        raise ValueError(f"minibatch_size={args.minibatch_size}: must be at least 2 and divide the {size} of an update")
    for setting in ("num_envs", "minibatch_size"):
        if getattr(args, setting) % WORLD_SIZE:
            raise ValueError(f"{setting}={getattr(args, setting)}: must be a multiple of the {WORLD_SIZE} processes")
    dim, spec = args.hidden_dim, game_of(args).token_spec
    layers = args.num_layers * (4 * dim + 2 * args.feedforward_dim)  # numbers kept of each token, for its gradient
    needs = {
        "num_layers, hidden_dim and feedforward_dim": 4 * dim * layers,  # weights, gradients, two moments of Adam
        "eval_episodes": args.eval_episodes * spec.num_tokens * max(spec.num_features, dim),
    }
    if not args.evaluate:
        rows = args.minibatch_size // WORLD_SIZE
        rows = rows if args.device.startswith("cuda") else min(rows, CPU_CHUNK)
        rollout = 2 * size * spec.num_tokens * spec.num_features  # before and after each step
        needs |= {"num_envs and num_steps": rollout // WORLD_SIZE, "minibatch_size": rows * spec.num_tokens * layers}
    check_memory(needs, args.device)
    if args.hidden_dim % args.num_heads:
        raise ValueError(f"hidden_dim={args.hidden_dim}: must be a multiple of num_heads={args.num_heads}")
    if args.log_std_min > args.log_std_max:
        raise ValueError(f"log_std_min={args.log_std_min}: must not be above log_std_max={args.log_std_max}")
    if args.attention_scale not in ("head", "hidden"):
        raise ValueError(f"attention_scale={args.attention_scale!r}: must be 'head' or 'hidden'")


def num_learners(args: Args) -> int:
    """Return how many agents of a world learn."""
    if team(args) == "first":
        return 1
    learners = game_of(args).teams[team(args)]
    return int(learners.stop - learners.start)


# the processes that `torchrun` started together, each with its share of the worlds
RANK, WORLD_SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def plain_agent(args: Args, envs: Any) -> Agent:
    """Return an agent that is not to be compiled, nor to learn."""
    agent = Agent(dataclasses.replace(args, compile=False), envs.token_spec, envs.single_action_space)
    return agent.to(args.device).requires_grad_(False)


def load_weights(agent: Agent, path: Path, content: dict[str, Any]) -> None:
    """Give an agent the weights of the checkpoint at `path`.

    Raises:
        ValueError: they are of another head, some of which have the same weights, or of another network.
    """
    own = type(agent.pool).__name__
    head = content.get("head", own)  # older checkpoints do not tell
    if head != own:
        other = Path(__file__).with_name(f"ppo_{head.lower()}.py")
        hint = f"; use {other.parent.name}/{other.name}" if other.is_file() else ""
        raise ValueError(f"{path} is of the head {head}: must be {own}, this file's{hint}")
    try:
        agent.load_state_dict(content["agent"])
    except RuntimeError as error:
        reason = str(error).splitlines()[1].strip()[:200]  # of dozens
        raise ValueError(f"{path} holds the weights of another network than these settings make: {reason}") from None


class Trainer:
    """A run: what learns, what it plays, and what must be saved so that it can go on exactly."""

    def __init__(self, args: Args) -> None:
        """Start a run in a folder of its own, or continue the one in `args.resume`."""
        self.args = args
        self.references = references(args)
        num_envs = args.num_envs // WORLD_SIZE
        self.envs, tokens = make_envs(args, num_envs, "train", first=RANK * num_envs)
        local = dataclasses.replace(args, minibatch_size=args.minibatch_size // WORLD_SIZE)  # of this process
        self.agent = Agent(local, self.envs.token_spec, self.envs.single_action_space).to(args.device)
        self.optimizer = torch.optim.Adam(self.agent.parameters(), args.learning_rate, eps=1e-5, fused=True)
        own_seed = derive_seed(args.seed, f"process {RANK}")  # of the weights' numbers none returns
        self.generator = torch.Generator(args.device).manual_seed(own_seed)
        zeros = torch.zeros(len(tokens), device=args.device)
        self.play = Play(self.envs.env_state, tokens, zeros, zeros.clone())
        self.step, self.updates, self.seconds, self.kl_coef = 0, 0, 0.0, args.kl_coef
        self.first_seconds = 0.0  # of this process's first update, which compiles
        self._prepare(local)
        self.folder, self.lock = args.resume or args.run_dir, None
        if RANK == 0:
            if args.resume is None:
                noise = f"-{args.num_noise[0]}" if args.num_noise else ""
                name = (
                    f"{registration.short_name(args.env_id)}{noise}__{Path(__file__).stem}__{args.seed}__{timestamp()}"
                )
                self.folder = new_folder(args.run_dir, name)
            self.lock = lock_folder(self.folder)  # held until the process ends, or `close`
        self.size = len(tokens) * args.num_steps * WORLD_SIZE  # steps of an iteration
        self.tracker: Any = None
        try:
            if args.resume is not None:
                path = checkpoint_path(args.resume)
                with checkpoint_errors(path):
                    self.load(path)
                if RANK == 0 and (self.folder / "metrics.csv").exists():
                    read_metrics(self.folder / "metrics.csv")  # damaged, it is told before a step is played
            if args.track and RANK == 0:
                name, resumed = self.folder.name, args.resume is not None
                self.tracker = start_wandb(args.wandb_project, name, vars(args), self.folder, resumed)
        except BaseException:
            self.close()
            raise
        self.started_at, self.before = self.step, self.seconds

    def _prepare(self, args: Args) -> None:
        """Bind the functions of an iteration to this run; compile and record them, if that is asked for."""
        agent, pure_step = self.agent, self.envs.pure_step
        on_gpu = torch.device(args.device).type == "cuda" and not is_foreign(args)  # worlds and network alike

        # A GPU sums over so few tokens best without dividing them among threads.
        options: Any = {"unroll_reductions_threshold": 64} if torch.device(args.device).type == "cuda" else None

        def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
            return torch.compile(function, fullgraph=True, dynamic=False, options=options) if args.compile else function

        def policy(tokens: Tensor) -> Any:
            return agent(tokens)

        def step(play: Play, noise: Tensor) -> Any:
            return play_step(policy if on_gpu else compiled_policy, agent, pure_step, play, noise)

        def loss_of(samples: Samples, kept: Tensor | None, kl_coef: Tensor) -> tuple[Tensor, Tensor]:
            return ppo_loss(agent, samples, kept, args, kl_coef)

        if args.compile:
            torch.compiler.reset()  # another run in this process would count as variants of the same functions
        compiled_policy, compiled_loss = compiled(policy), compiled(loss_of)
        compiled_step = step
        if on_gpu:  # Python's share of a world's step is small beside the network's on a CPU
            with torch.no_grad():  # Python 3.11 locks the game's cached properties, which bars compiling: fill them
                step(self.play, agent.noise((len(self.play.tokens),), args.device, torch.Generator(args.device)))
            compiled_step = compiled(step)

        def collected(play: Play, noise: Tensor) -> Any:
            with torch.no_grad():
                return collect(compiled_step, compiled_policy, agent, args, play, noise)

        def gradient_of(samples: Samples, kept: Tensor | None, kl_coef: Tensor) -> Tensor:
            return gradient(compiled_loss, agent, samples, kept, kl_coef)

        recorded = on_gpu and args.cuda_graphs and WORLD_SIZE == 1
        self.collect = Recorded(collected) if recorded else collected
        self.gradient = Recorded(gradient_of) if recorded else gradient_of
        self.local = args

    @property
    def speed(self) -> float:
        """Steps a second of this process's training, without its first update."""
        later = self.seconds - self.before - self.first_seconds
        return (self.step - self.started_at - self.size) / later if later > 0 else math.nan

    def save(self) -> None:
        """Write the checkpoint, of all processes together."""
        own = {"generator": self.generator.get_state(), "play": to_tuples(self.play)}
        parts: list[Any] = [own] * WORLD_SIZE
        if WORLD_SIZE > 1:
            dist.all_gather_object(parts, own)
        content = {
            "args": {name: str(x) if name == "run_dir" else x for name, x in vars(self.args).items()}
            | {"resume": None},
            "versions": library_versions(),
            "agent": self.agent.state_dict(),
            "head": type(self.agent.pool).__name__,
            "optimizer": self.optimizer.state_dict(),
            "processes": parts,
            "progress": [self.step, self.updates, self.seconds, self.kl_coef],
        }
        if RANK == 0:
            save_checkpoint(self.folder / "checkpoint.pt", content)

    def load(self, path: Path) -> None:
        """Take up what `save` wrote."""
        content = load_checkpoint(path)
        if len(content["processes"]) != WORLD_SIZE:
            raise ValueError(f"{path} is of {len(content['processes'])} processes: must be resumed with as many")
        own = content["processes"][RANK]
        load_weights(self.agent, path, content)
        self.optimizer.load_state_dict(content["optimizer"])
        self.generator.set_state(own["generator"])
        self.step, self.updates, self.seconds, self.kl_coef = content["progress"]
        if is_foreign(self.args):  # such worlds cannot be saved: they begin new episodes
            seed = derive_seed(self.args.seed, f"train from step {self.step}, process {RANK}")
            self.play = self.play._replace(tokens=self.envs.reset(seed=seed)[0])
        else:
            self.play = from_tuples(self.play, own["play"])

    def iterate(self) -> dict[str, float]:
        """Play and learn once; returns what to log.

        Raises:
            FloatingPointError: an observation, or a loss, is no longer finite.
        """
        args, start = self.args, time.perf_counter()
        if args.anneal_lr:
            rate = args.learning_rate * (1 - self.updates / (args.total_timesteps // self.size))
            self.optimizer.param_groups[0]["lr"] = rate
        noise = self.agent.noise((args.num_steps, len(self.play.tokens)), args.device, self.generator)
        self.play, samples, seen = self.collect(self.play, noise)
        losses = update(self.gradient, self.agent, self.optimizer, samples, self.local, self.kl_coef, self.generator)
        *parts, norm, returns, lengths, episodes, finite, explained = torch.cat([losses, average(seen)]).tolist()
        if finite < 1:
            raise FloatingPointError(NOT_FINITE.format(args.env_id))
        named = {f"losses/{name}": value for name, value in zip(LOSSES, parts, strict=True)}
        if not all(map(math.isfinite, (*parts, norm))):
            raise FloatingPointError(
                f"update {self.updates + 1}: losses are no longer finite: {named}, gradient {norm}"
            )
        if self.kl_coef:  # adapt the penalty towards its target, as in the PPO paper
            kl = named["losses/approx_kl"]
            self.kl_coef *= 1.5 if kl > 2 * args.kl_target else 0.5 if kl < args.kl_target / 2 else 1.0
        self.step += self.size
        self.updates += 1
        spent = time.perf_counter() - start
        self.seconds += spent
        self.first_seconds = self.first_seconds or spent
        mean, length = (returns / episodes, lengths / episodes) if episodes else (math.nan, math.nan)
        return {
            "charts/episodic_return": mean,
            "charts/episodic_length": length,
            "charts/normalized_score": self.references.normalized_score(mean),
            "charts/SPS": self.size / spent,
            "charts/learning_rate": self.optimizer.param_groups[0]["lr"],
            **named,
            "losses/grad_norm": norm,
            "losses/explained_variance": explained,
        }

    def train(self) -> list[dict[str, float]]:
        """Play and learn until the end, saving on the way. Returns the log.

        Raises:
            KeyboardInterrupt: after one of `stop_signals`, once the update in hand is done and saved; a second
                one stops at once.
        """
        args, size = self.args, self.size
        log, stopping = None, torch.zeros((), device=args.device if WORLD_SIZE > 1 else "cpu")

        def stop(*_: Any) -> None:
            stopping.fill_(1)
            if RANK == 0:
                write_stderr("stopping after this update, which is saved; once more: at once")

        bar = tqdm(
            total=args.total_timesteps, initial=self.step, unit=" steps", unit_scale=True, desc="training",
            mininterval=0.5 if sys.stderr.isatty() else 15, dynamic_ncols=True, disable=RANK > 0,
        )  # fmt: skip
        try:
            with on_stop_signal(stop, once=True):
                while self.step + size <= args.total_timesteps and not average(stopping):
                    values = self.iterate()
                    if RANK == 0:
                        if log is None:
                            log = MetricsLogger(self.folder, tuple(values), self.step - size or None, self.tracker)
                            log.note("settings", vars(args) | library_versions())
                        log.add(self.step, values)  # before the checkpoint: resuming drops rows too many, none may lack
                    told = {"return": values["charts/episodic_return"], "score": values["charts/normalized_score"]}
                    bar.set_postfix({name: f"{x:.3f}" for name, x in told.items() if math.isfinite(x)}, refresh=False)
                    bar.update(size)
                    if self.updates == 1 or self.updates % args.save_every == 0:
                        self.save()
        finally:
            bar.close()
            if log is not None:
                log.close()
        self.save()
        if average(stopping):  # a signal may have reached another process alone
            raise KeyboardInterrupt
        if RANK > 0:
            return []
        return log.rows if log is not None else read_metrics(self.folder / "metrics.csv")

    def finish(self, rows: list[dict[str, float]]) -> dict[str, Any]:
        """Evaluate, draw and sum up."""
        args, start = self.args, time.perf_counter()
        agent = plain_agent(args, self.envs)
        agent.load_state_dict(self.agent.state_dict())
        random, oracle = self.references
        title = f"{args.env_id}, {Path(__file__).stem}"
        plot_curve(self.folder / "curve.png", rows, random, oracle, title, ceiling(args))
        summary = {
            "env_id": args.env_id,
            "options": env_options(args),
            "agent": Path(__file__).stem,
            "seed": args.seed,
            "steps": self.step,
            **score(evaluate(agent, args, args.eval_episodes), self.references, args.seed),
            **overlap(args, args),
            "eval_episodes": args.eval_episodes,
            "parameters": sum(weight.numel() for weight in self.agent.parameters()),
            "train_seconds": self.seconds,
            "first_update_seconds": self.first_seconds,
            "finish_seconds": time.perf_counter() - start,
            "versions": library_versions(),
            "settings": vars(args),
        }
        write_summary(self.folder / "summary.json", summary)
        if self.tracker is not None:
            self.tracker.summarize({name: summary[name] for name in ("score", "return", "score_95", "return_95")})
        if draws(args):  # last: an error in drawing must not cost the result
            write_gif(self.folder / "episode.gif", film(agent, args), fps=10)
        return summary

    def close(self) -> None:
        """Let go of the folder, and of Weights & Biases."""
        if self.tracker is not None:
            self.tracker.close()
        if self.lock is not None:
            self.lock.close()


def ceiling(args: Args) -> str:
    """Name what a score of 1 stands for."""
    return "solved" if is_foreign(args) else "oracle"


def score(returns: np.ndarray, reference: BaselineReturns, seed: int) -> dict[str, Any]:
    """Sum up returns (E,): their mean and normalised score, with 95 % bootstrapped confidence intervals."""
    low, high = bootstrap_interval(returns, seed)
    return {
        "score": reference.normalized_score(float(returns.mean())),
        "score_95": [reference.normalized_score(low), reference.normalized_score(high)],
        "return": float(returns.mean()),
        "return_95": [low, high],
        "return_random": reference.random,
        "return_oracle": reference.oracle,
    }


def in_words(found: dict[str, Any], args: Args) -> str:
    """Put what `score` found into words."""
    name, about = ("return", "") if math.isnan(found["score"]) else ("score", f"; 0 random, 1 {ceiling(args)}")
    low, high = found[f"{name}_95"]
    interval = "no interval from one episode" if math.isnan(low) else f"95 % interval {low:.3f} to {high:.3f}"
    text = f"{name} {found[name]:.3f} ({interval}{about})"
    return text if name == "return" else f"{text}, return {found['return']:.3f}"


def episodes_in_words(found: dict[str, Any], args: Args) -> str:
    """Say over how many episodes an evaluation was, and whether training drew from their levels too."""
    known = found.get("known_levels")
    kind = f"episodes, {100 * known:.3g} % on levels of training" if known else "unseen episodes"
    return f"{args.eval_episodes} {kind}"


def evaluate_all(args: Args, argv: Sequence[str]) -> list[dict[str, Any]]:
    """Evaluate each checkpoint at each noise, and leave table, matrix and film in files; returns the table's rows.

    Words of `argv` are for all checkpoints, what no word tells is each one's own, but for how it is evaluated: `args`,
    of the first.

    Raises:
        ValueError, OSError: before anything is played, naming a checkpoint or setting that does not fit.
    """
    common = {name: getattr(args, name) for name in ("device", "threads", "eval_episodes")}
    players = []
    for path in dict.fromkeys(args.evaluate):
        own = load_args(path)
        asked = dataclasses.replace(asked_of(argv, path), **common)
        content = load_checkpoint(checkpoint_path(path))
        noises: list[tuple[int, ...]] = [(number,) for number in args.num_noise]
        for noise in noises or [own.num_noise]:
            here = dataclasses.replace(asked, num_noise=noise)
            check(here)
            here = as_trained(here, own)
            agent = plain_agent(here, make_envs(here, 1, "evaluate")[0])
            load_weights(agent, checkpoint_path(path), content)
            players.append((path, own, here, agent))
    folder = new_folder(args.run_dir, f"evaluation__{timestamp()}")
    rows = []
    for path, own, here, agent in players:
        found = score(evaluate(agent, here, here.eval_episodes, own), references(here), here.seed) | overlap(here, own)
        told = {"run": str(path), "seed": own.seed, "env_id": here.env_id}
        told |= {"trained": noise_of(own), "evaluated": noise_of(here)}
        rows.append({**told, "options": env_options(here), "eval_actions": here.eval_actions, **found})
        print(f"{name_of(path, here)}: {in_words(found, here)} over {episodes_in_words(found, here)}")
    head = {"command": ["python", *sys.argv], "eval_episodes": args.eval_episodes, "versions": library_versions()}
    write_summary(folder / "evaluation.json", {**head, "results": rows})
    if args.num_noise:
        plot_scores(folder / "matrix.png", rows, ceiling(players[0][2]))
    print(f"see {', '.join(sorted(path.name for path in folder.iterdir()))} in {folder}")
    if args.record is not None:  # last: an error in drawing must not cost the result
        path, own, here, agent = players[0]
        write_video(args.record, film(agent, here, own), fps=10)
        print(f"see an episode of {name_of(path, here)}, in {args.record}")
    return rows


def name_of(path: Path, args: Args) -> str:
    """Name an evaluated run, and the noise that it is evaluated at."""
    return str(path) if noise_of(args) is None else f"{path}, noise {noise_of(args)}"


def noise_of(args: Args) -> Any:
    """Return how many noise tokens there are, or None where the game has no such option."""
    option = registration.NOISE.get(registration.find(args.env_id)[0])
    return None if option is None else getattr(game_of(args), option)


def finished(args: Args) -> dict[str, Any] | None:
    """Return the summary of the run to go on with if no update is left: asked before anything slow is made.

    Raises:
        ValueError: the weights are of another head or network.
    """
    if args.resume is None or not (args.resume / "summary.json").exists():
        return None
    path = checkpoint_path(args.resume)
    content = load_checkpoint(path)
    with checkpoint_errors(path):
        load_weights(plain_agent(args, make_envs(args, 1, "evaluate")[0]), path, content)
        step, *_ = content["progress"]
        left = args.total_timesteps - step
    if left >= args.num_envs * args.num_steps * num_learners(args):
        return None
    if draws(args) and not (args.resume / "episode.gif").exists():
        return None
    summary = read_summary(args.resume / "summary.json")
    evaluated = {name: getattr(args, name) for name in ("eval_episodes", "eval_actions")}
    settings = summary.get("settings")
    same = isinstance(settings, dict) and settings.items() >= evaluated.items()
    return summary if same and summary.get("steps") == step else None  # else it is of before the run was made longer


def pace(args: Args) -> str:
    """Say how the worlds play: in a vector environment of this package, or as single ones of Gymnasium."""
    return "in step" if not is_foreign(args) or game_of(args).native else "one after another"


def train(args: Args) -> dict[str, Any]:
    """Train, evaluate and leave everything in the run's folder."""
    try:
        done = finished(args)
        if done is not None:
            if RANK == 0:
                print(f"{args.resume} is finished: see curve.png, metrics.csv and summary.json there")
            return done
        trainer = Trainer(args)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
    if RANK == 0:
        at = "" if args.resume is None else f", going on from step {trainer.step:,}"
        steps = f"{args.total_timesteps:,} steps by the preset {args.preset!r}"
        print(f"run: {trainer.folder}, {steps}, {args.num_envs} worlds {pace(args)}{at}")
    go_on = f"go on with: {shlex.join(['python', sys.argv[0], '--resume', str(trainer.folder)])}"
    saved = (trainer.folder / "checkpoint.pt").exists  # asked when it ends
    try:
        rows = trainer.train()
        summary = trainer.finish(rows) if RANK == 0 else {}
    except KeyboardInterrupt:
        if RANK == 0:  # no other process knows the folder
            hint = f"stopped; {go_on}" if saved() else "stopped before the first update was done: nothing is saved"
            print(hint, file=sys.stderr)
        raise SystemExit(EXIT_INTERRUPTED) from None
    except OSError as error:
        raise SystemExit(f"error: {error}" + (f"; once that is mended, {go_on}" if saved() else "")) from None
    except (FloatingPointError, ColumnMismatch, gymnasium_envs.Unfit) as error:
        raise SystemExit(f"error: {error}") from None
    finally:
        trainer.close()
    if RANK == 0:
        first = f", {trainer.first_seconds:.0f} of them for the first update; {trainer.speed:,.0f} steps/s after it"
        print(
            f"{in_words(summary, args)} over {episodes_in_words(summary, args)}, "
            f"trained in {trainer.seconds:.0f} s{first if trainer.speed > 0 else ''}\n"
            f"see curve.png, {'episode.gif, ' if draws(args) else ''}metrics.csv and summary.json in {trainer.folder}"
        )
    return summary


@memory_errors()
def main(argv: Sequence[str]) -> Any:
    """Train, go on, or evaluate, as the settings say."""
    try:
        args = parse(argv)
        torch.set_num_threads(args.threads)
        use_deterministic(args.deterministic)
        if args.evaluate:
            return evaluate_all(args, argv)
    except BrokenPipeError:
        raise
    except (ValueError, OSError, FloatingPointError) as error:
        raise SystemExit(f"error: {error}") from None
    if WORLD_SIZE > 1:
        if args.device == "cuda":
            args = dataclasses.replace(args, device=f"cuda:{os.environ['LOCAL_RANK']}")
            torch.cuda.set_device(args.device)
        dist.init_process_group("nccl" if args.device.startswith("cuda") else "gloo")
    try:
        return train(args)
    finally:
        if WORLD_SIZE > 1:
            dist.destroy_process_group()


if __name__ == "__main__":
    with ignore_broken_pipe():
        main(sys.argv[1:])
