"""What the experiments on the synthetic sets share: settings, and the task to predict a vector from a set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import training
from chance import Chance
from network import HEADS, Network, set_network
from synthetic import Sets, draw_sets, load_sets
from torch import Tensor

from noisy_envs.validation import check_count


@dataclass(kw_only=True)
class SetArgs(training.Args):
    """Settings of an experiment on the synthetic sets; the defaults take minutes on a CPU."""

    preset: training.Preset = "fast"
    """where the other defaults come from: ours for a CPU, or the paper's"""
    num_sets: int = 60_000
    """sets, of which the last tenth is the test set"""
    num_vectors: int = 32
    """N, vectors of a set"""
    num_features: int = 16
    """D, features of a vector"""
    data_seed: int = 42
    """seed of the data set"""
    pools: tuple[str, ...] = tuple(HEADS)
    seeds: tuple[int, ...] = (1, 2, 3)
    folds: tuple[int, ...] = (1,)
    epochs: int = 5
    batch_size: int = 250
    learning_rate: float = 3e-3
    layers: int = 2
    width: int = 16
    heads: int = 2
    feedforward: int = 64
    schedule: training.Schedule = "cosine"
    warmup: float = 0.1
    max_grad_norm: float = 1.0
    jobs: int = 2


# appendix "Supervised KNN Centroid", and the folds of Section 4.2
PAPER: dict[str, Any] = {
    "num_sets": 1_000_000, "num_vectors": 128, "seeds": (1,), "folds": (1, 2, 3, 4, 5), "epochs": 100,
    "batch_size": 750, "learning_rate": 5e-4, "schedule": "constant", "warmup": 0.0, "max_grad_norm": float("inf"),
    "layers": 12, "heads": 8, "dropout": 0.1, "jobs": 1,
}  # fmt: skip


def check(args: SetArgs) -> None:
    """Raise ValueError, naming a setting, its value and what is allowed."""
    training.check(args, list(HEADS))
    for name, least in (("num_sets", 2 * training.FOLDS), ("num_vectors", 2), ("num_features", 1), ("data_seed", 0)):
        check_count(name, getattr(args, name), least, may_be_range=False)


def sets_of(args: SetArgs) -> Tensor:
    """Return the sets (num_sets, N, D): drawn on a GPU, or on a CPU mapped from a file; equal but for rounding."""
    sets = Sets(args.num_sets, args.num_vectors, args.num_features, args.data_seed)
    return load_sets(sets, args.data_dir) if args.device == "cpu" else draw_sets(sets, args.device)


def test_sets(args: SetArgs) -> Tensor:
    """Return the sets of the test set."""
    return sets_of(args)[-(args.num_sets // 10) :]


class SetTask:
    """Sets (B, N, D), and vectors (B, D) to predict from them."""

    def __init__(self, args: SetArgs, targets_of: Callable[[Tensor], Tensor]) -> None:
        """Take the sets, and compute the targets."""
        self.args, self.sets = args, sets_of(args)
        self.targets = targets_of(self.sets)
        self.num_samples, self.num_test = len(self.sets), len(self.sets) // 10

    def network(self, pool: str, seed: int) -> Network:
        """Make the network with one of the heads."""
        return set_network(training.shape(self.args), self.args.num_features, pool, seed)

    def draw(self, index: Tensor, chance: Chance) -> Tensor:
        """Return no numbers: sets are shown as they are."""
        return index.new_empty(len(index), 0)

    def batch(self, index: Tensor, numbers: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return sets and targets of samples (B,)."""
        return self.sets[index], self.targets[index]

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean squared error."""
        return (outputs - targets).square().mean()

    def error(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the squared error of each set, a mean over features (B,)."""
        return (outputs - targets).square().mean(dim=1)


def sets_as_in_the_paper(args: SetArgs) -> bool:
    """Tell whether the sets have the paper's sizes."""
    return (args.num_vectors, args.num_features) == (128, 16)


def as_in_the_paper(args: SetArgs) -> bool:
    """Tell whether the sets and the network have the paper's sizes."""
    return sets_as_in_the_paper(args) and (args.width, args.layers) == (16, 12)
