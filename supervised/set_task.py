"""What the experiments on synthetic sets share: settings, and the task of predicting a vector from a set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import experiment
from chance import Chance
from network import POOLING, Network, set_network
from synthetic import Sets, draw_sets, load_sets
from torch import Tensor

from noisy_envs.validation import check_count


@dataclass(kw_only=True)
class SetArgs(experiment.Args):
    """Settings of an experiment on synthetic sets; with the defaults it takes minutes on a CPU."""

    preset: experiment.Preset = "fast"
    """defaults of all other settings: fast on a CPU, or the paper's"""
    num_sets: int = 60_000
    """number of sets; the last tenth is the test set"""
    num_vectors: int = 32
    """N, vectors per set"""
    num_features: int = 16
    """D, features per vector"""
    data_seed: int = 42
    """seed of the data set"""
    pooling: tuple[str, ...] = tuple(POOLING)
    seeds: tuple[int, ...] = (1, 2, 3)
    folds: tuple[int, ...] = (1,)
    epochs: int = 5
    batch_size: int = 250
    learning_rate: float = 3e-3
    num_layers: int = 2
    embed_dim: int = 16
    num_heads: int = 2
    feedforward_dim: int = 64
    schedule: experiment.Schedule = "cosine"
    warmup: float = 0.1
    max_grad_norm: float = 1.0
    jobs: int = 2


# appendix "Supervised KNN Centroid"; folds of Section 4.2
PAPER: dict[str, Any] = {
    "num_sets": 1_000_000, "num_vectors": 128, "seeds": (1,), "folds": (1, 2, 3, 4, 5), "epochs": 100,
    "batch_size": 750, "learning_rate": 5e-4, "schedule": "constant", "warmup": 0.0, "max_grad_norm": float("inf"),
    "num_layers": 12, "num_heads": 8, "dropout": 0.1, "jobs": 1,
}  # fmt: skip


def check(args: SetArgs) -> None:
    """Raise ValueError, naming a setting, its value and what is allowed."""
    experiment.check(args, list(POOLING))
    for name, minimum in (
        ("num_sets", 2 * experiment.NUM_FOLDS),
        ("num_vectors", 2),
        ("num_features", 1),
        ("data_seed", 0),
    ):
        check_count(name, getattr(args, name), minimum, may_be_range=False)


def all_sets(args: SetArgs) -> Tensor:
    """Return the sets (num_sets, N, D): on a CPU mapped from a file, on a GPU drawn; they differ only by rounding."""
    sets = Sets(args.num_sets, args.num_vectors, args.num_features, args.data_seed)
    return load_sets(sets, args.data_dir) if args.device == "cpu" else draw_sets(sets, args.device)


def test_sets(args: SetArgs) -> Tensor:
    """Return the test set (B, N, D)."""
    return all_sets(args)[-(args.num_sets // 10) :]


class SetTask:
    """The task of predicting a vector (B, D) from a set (B, N, D)."""

    def __init__(self, args: SetArgs, make_targets: Callable[[Tensor], Tensor]) -> None:
        """Load the sets, and compute the targets (num_sets, D)."""
        self.args, self.sets = args, all_sets(args)
        self.targets = make_targets(self.sets)
        self.num_samples, self.num_test = len(self.sets), len(self.sets) // 10

    def network(self, pooling: str, seed: int) -> Network:
        """Make the network with one of the pooling heads."""
        return set_network(experiment.encoder_config(self.args), self.args.num_features, pooling, seed)

    def draw(self, index: Tensor, chance: Chance) -> Tensor:
        """Return no random numbers (B, 0): sets are not augmented."""
        return index.new_empty(len(index), 0)

    def batch(self, index: Tensor, numbers: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return sets and targets of samples (B,)."""
        return self.sets[index], self.targets[index]

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean squared error."""
        return (outputs - targets).square().mean()

    def error(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the squared error of each set (B,), averaged over features."""
        return (outputs - targets).square().mean(dim=1)


def has_paper_sets(args: SetArgs) -> bool:
    """Return whether the sets have the paper's sizes."""
    return (args.num_vectors, args.num_features) == (128, 16)


def has_paper_sizes(args: SetArgs) -> bool:
    """Return whether the sets and the network have the paper's sizes."""
    return has_paper_sets(args) and (args.embed_dim, args.num_layers) == (16, 12)
