"""Which heads find the centroid of the k nearest neighbors of a vector among N? (Section 4.2, Figure 4, Table 4)

    python supervised/knn_centroid.py                                 # minutes on a CPU: N = 32, two layers, k = 4
    python supervised/knn_centroid.py --num-neighbors 1 4 16 --pooling adapool avgpool
    python supervised/knn_centroid.py --preset paper --device cuda    # N = 128, 12 layers, 100 epochs, 5 folds
    python supervised/knn_centroid.py --preset paper --num-vectors 32 --embed-dim 64 --device cuda   # an ablation

A learned embedding marks the first vector of a set; the target is the mean of its k nearest neighbors. They are the
signal, k of N vectors. The error is the mean squared error, the paper's signal loss. Naive baselines are the centroid
of all vectors and the marked vector itself. OUT gets `table.md`, `results.json` and `signal_loss.png`; `experiment.py`
describes its other files.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import experiment
import report
import torch
from network import ClassTokenInit, Network, set_network
from set_task import PAPER, SetArgs, SetTask, all_sets, check, has_paper_sets, has_paper_sizes, test_sets
from synthetic import centroids
from torch import Tensor


@dataclass(kw_only=True)
class Args(SetArgs):
    """Settings of the KNN-centroid experiment."""

    out: Path = Path("runs/knn_centroid")
    num_neighbors: tuple[int, ...] = (4,)
    """values of k, the number of neighbors to average"""
    mark_class_token: bool = False
    """as in the authors' code, mark the class token instead of the target; only with --pooling clstoken"""
    class_token_init: ClassTokenInit = "normal"
    """initial class token: Normal(0, init_std), or uniform between 0 and 1 as in the authors' code; uniform only with
    --pooling clstoken"""


PAPER_KS = (1, 2, 4, 8, 16, 32, 64, 128)
PAPER_LOSS = {  # Table 4: N = 128, D = 16
    "maxpool": (0.066, 0.061, 0.050, 0.045, 0.047, 0.055, 0.068, 0.046),
    "avgpool": (0.093, 0.071, 0.055, 0.043, 0.031, 0.016, 0.001, 0.000),
    "clstoken": (0.102, 0.079, 0.063, 0.050, 0.038, 0.027, 0.016, 0.008),
    "adapool": (0.037, 0.019, 0.006, 0.004, 0.003, 0.002, 0.001, 0.000),
    "baseline: centroid": (0.093, 0.071, 0.055, 0.043, 0.031, 0.020, 0.008, 0.000),
    "baseline: target": (0.058, 0.044, 0.040, 0.041, 0.048, 0.060, 0.080, 0.126),
}
# appendix "KNN Centroid Ablations": N = 32, by num_features, embed_dim and num_layers (for 24 the header says 28)
ABLATION_KS = (1, 2, 4, 8, 16)
ABLATION_LOSS = {
    (16, 16, 12): {
        "maxpool": (0.022, 0.014, 0.009, 0.006, 0.009),
        "avgpool": (0.086, 0.049, 0.010, 0.005, 0.003),
        "clstoken": (0.094, 0.066, 0.046, 0.030, 0.017),
        "adapool": (0.018, 0.011, 0.007, 0.004, 0.002),
    },
    (64, 16, 12): {
        "maxpool": (0.0056, 0.0025, 0.0025, 0.0018, 0.0018),
        "avgpool": (0.0204, 0.0104, 0.0053, 0.0023, 0.0006),
        "clstoken": (0.0229, 0.0126, 0.0069, 0.0036, 0.0017),
        "adapool": (0.0064, 0.0031, 0.0010, 0.0005, 0.0002),
    },
    (16, 32, 12): {
        "maxpool": (0.022, 0.011, 0.0023, 0.0006, 0.0003),
        "avgpool": (0.048, 0.022, 0.0012, 0.0006, 0.0002),
        "clstoken": (0.086, 0.057, 0.0371, 0.0214, 0.0082),
        "adapool": (0.003, 0.001, 0.0006, 0.0003, 0.0001),
    },
    (16, 64, 12): {
        "maxpool": (0.022, 0.0012, 0.0005, 0.00024, 0.00010),
        "avgpool": (0.004, 0.0016, 0.0005, 0.00021, 0.00009),
        "clstoken": (0.086, 0.0574, 0.0373, 0.02147, 0.00825),
        "adapool": (0.001, 0.0010, 0.0003, 0.00019, 0.00007),
    },
    (16, 16, 24): {
        "maxpool": (0.020, 0.011, 0.007, 0.005, 0.0056),
        "avgpool": (0.061, 0.013, 0.006, 0.003, 0.0019),
        "clstoken": (0.094, 0.066, 0.046, 0.030, 0.0165),
        "adapool": (0.017, 0.014, 0.014, 0.008, 0.0021),
    },
}


def column_name(k: int) -> str:
    """Return the paper's name of the task with k neighbors."""
    return f"KNN-{k}"


class KnnTask(SetTask):
    """The task of a column; its networks take the class token's settings."""

    args: Args

    def network(self, pooling: str, seed: int) -> Network:
        """Make the network with one of the pooling heads."""
        args, config = self.args, experiment.encoder_config(self.args)
        return set_network(config, args.num_features, pooling, seed, args.mark_class_token, args.class_token_init)


def make_task(args: Args, column: str) -> SetTask:
    """Return the task of a column."""
    return KnnTask(args, partial(centroids, k=int(column.removeprefix("KNN-"))))


def baselines(args: Args) -> dict[str, dict[str, float]]:
    """Return the test errors of the centroid of all vectors and of the marked vector, by row and column.

    If an embedding is smaller than a vector, a third row has the least possible error, see `least_error`.
    """
    sets = test_sets(args)
    guesses = {"baseline: centroid": sets.mean(dim=1), "baseline: target": sets[:, 0]}
    errors: dict[str, dict[str, float]] = {row: {} for row in guesses}
    for k in sorted(set(args.num_neighbors)):
        targets = centroids(sets, k)
        for row, guess in guesses.items():
            errors[row][column_name(k)] = (guess - targets).square().mean().item()
        if args.embed_dim < args.num_features:
            row = f"lowest possible, embed_dim {args.embed_dim}"
            errors.setdefault(row, {})[column_name(k)] = least_error(targets, args.embed_dim)
    return errors


def least_error(targets: Tensor, embed_dim: int) -> float:
    """Return the least mean squared error to `targets` (B, D) of any linear output of `embed_dim` < D numbers.

    The outputs span `embed_dim` dimensions; the first principal components of the targets are their best choice.
    """
    variances = torch.linalg.eigvalsh(targets.double().T.cov(correction=0))  # ascending
    return variances[:-embed_dim].sum().item() / targets.shape[1]


def paper_rows(args: Args) -> dict[str, dict[str, float]]:
    """Return the paper's errors for the requested k; none if the sets or the network have other sizes.

    For the baselines, which have no network, the sizes of the sets are enough.
    """
    if has_paper_sets(args):
        ks: tuple[int, ...] = PAPER_KS
        losses: Mapping[str, tuple[float, ...]] = PAPER_LOSS
        if not has_paper_sizes(args):
            losses = {row: numbers for row, numbers in losses.items() if row.startswith("baseline")}
    elif args.num_vectors == 32:
        ks, losses = ABLATION_KS, ABLATION_LOSS.get((args.num_features, args.embed_dim, args.num_layers), {})
    else:
        return {}
    return {
        row: {column_name(k): number for k, number in zip(ks, numbers, strict=True) if k in args.num_neighbors}
        for row, numbers in losses.items()
    }


def check_all(args: Args) -> None:
    """Raise ValueError, naming a setting, its value and what is allowed."""
    check(args)
    experiment.check_not_empty(args, "num_neighbors")
    for k in args.num_neighbors:
        if not 1 <= k <= args.num_vectors:
            raise ValueError(f"num_neighbors={k}: expected a number from 1 to num_vectors={args.num_vectors}")
    for name in ("mark_class_token", "class_token_init"):
        value, default = getattr(args, name), getattr(Args, name)
        if value != default and set(args.pooling) != {"clstoken"}:
            raise ValueError(f"{name}={value!r}: expected {default!r}, or --pooling clstoken alone")


def main(argv: Sequence[str]) -> None:
    """Run what is missing; write the table and the figure."""
    args = experiment.parse(Args, argv, {"fast": {}, "paper": {**PAPER, "num_neighbors": PAPER_KS}}, __doc__)
    check_all(args)
    all_sets(args)  # write the file before several runs need it
    columns = [column_name(k) for k in sorted(set(args.num_neighbors))]
    summaries = experiment.run_all(args, columns, make_task)
    rows, naive, paper = report.scores(summaries), baselines(args), paper_rows(args)
    text = report.format_table(rows, naive, paper, columns, digits=4)
    report.write(args, "knn_centroid.py", "Signal loss of the KNN-centroid task", text, summaries)
    positions = {column_name(k): k / args.num_vectors for k in args.num_neighbors}
    labels = ("signal-to-noise ratio k / N", "signal loss (mean squared error)")
    report.plot_lines(args.out / "signal_loss.png", rows, naive, paper, positions, labels)
    print(f"{text}\nsee table.md, results.json and signal_loss.png in {args.out}")


if __name__ == "__main__":
    experiment.guard(main, sys.argv[1:])
