"""Which heads find the k nearest neighbours of a vector among N, and their centroid? (Section 4.2, Figure 4, Table 4)

    python supervised/knn_centroid.py                                 # minutes on a CPU: N = 32, two layers, k = 4
    python supervised/knn_centroid.py --ks 1 4 16 --pools adapool avgpool
    python supervised/knn_centroid.py --preset paper --device cuda    # N = 128, 12 layers, 100 epochs, 5 folds
    python supervised/knn_centroid.py --preset paper --num-vectors 32 --width 64 --device cuda    # an ablation

The first vector of a set is marked by a learned embedding; the target is the mean of its k nearest neighbours. They are
the signal, k of N vectors. The error is the mean squared error, the paper's signal loss. Naive baselines: the centroid
of all vectors, and the marked vector itself. OUT gets `table.md`, `results.json` and `signal_loss.png`; see
`training.py` for what else it holds.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import report
import torch
import training
from set_task import PAPER, SetArgs, SetTask, as_in_the_paper, check, sets_as_in_the_paper, sets_of, test_sets
from synthetic import centroids
from torch import Tensor


@dataclass(kw_only=True)
class Args(SetArgs):
    """Settings of the KNN-centroid experiment."""

    out: Path = Path("runs/knn_centroid")
    ks: tuple[int, ...] = (4,)
    """numbers of neighbours, the signal"""


PAPERS_KS = (1, 2, 4, 8, 16, 32, 64, 128)
PAPERS_LOSS = {  # Table 4: N = 128, D = 16
    "maxpool": (0.066, 0.061, 0.050, 0.045, 0.047, 0.055, 0.068, 0.046),
    "avgpool": (0.093, 0.071, 0.055, 0.043, 0.031, 0.016, 0.001, 0.000),
    "clstoken": (0.102, 0.079, 0.063, 0.050, 0.038, 0.027, 0.016, 0.008),
    "adapool": (0.037, 0.019, 0.006, 0.004, 0.003, 0.002, 0.001, 0.000),
    "baseline: centroid": (0.093, 0.071, 0.055, 0.043, 0.031, 0.020, 0.008, 0.000),
    "baseline: target": (0.058, 0.044, 0.040, 0.041, 0.048, 0.060, 0.080, 0.126),
}
# appendix "KNN Centroid Ablations": N = 32, by features, width and layers (of 24 the table's header says 28)
ABLATIONS_KS = (1, 2, 4, 8, 16)
ABLATIONS_LOSS = {
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


def name(k: int) -> str:
    """Name a number of neighbours as the paper does."""
    return f"KNN-{k}"


def make_task(args: Args, column: str) -> SetTask:
    """Return the task of a number of neighbours."""
    return SetTask(args, partial(centroids, k=int(column.removeprefix("KNN-"))))


def baselines(args: Args) -> dict[str, dict[str, float]]:
    """Return the errors on the test set of the centroid of all vectors, of the marked one, and the least there can be.

    That is shown where an embedding is narrower than a vector, see `floor`.
    """
    sets = test_sets(args)
    guesses = {"baseline: centroid": sets.mean(dim=1), "baseline: target": sets[:, 0]}
    found: dict[str, dict[str, float]] = {row: {} for row in guesses}
    for k in sorted(set(args.ks)):
        targets = centroids(sets, k)
        for row, guess in guesses.items():
            found[row][name(k)] = (guess - targets).square().mean().item()
        if args.width < args.num_features:
            found.setdefault(f"least from width {args.width}", {})[name(k)] = floor(targets, args.width)
    return found


def floor(targets: Tensor, width: int) -> float:
    """Return the least mean squared error to `targets` (B, D) of any linear output from `width` < D numbers.

    What it gives lies in `width` dimensions, and none fit better than the first principal components of the targets.
    """
    variances = torch.linalg.eigvalsh(targets.double().T.cov(correction=0))  # ascending
    return variances[:-width].sum().item() / targets.shape[1]


def papers(args: Args) -> dict[str, dict[str, float]]:
    """Return the paper's numbers for the asked k, none if sets or network have other sizes than the paper's.

    Its baselines have no network.
    """
    if sets_as_in_the_paper(args):
        ks: tuple[int, ...] = PAPERS_KS
        losses: Mapping[str, tuple[float, ...]] = PAPERS_LOSS
        if not as_in_the_paper(args):
            losses = {row: numbers for row, numbers in losses.items() if row.startswith("baseline")}
    elif args.num_vectors == 32:
        ks, losses = ABLATIONS_KS, ABLATIONS_LOSS.get((args.num_features, args.width, args.layers), {})
    else:
        return {}
    return {
        row: {name(k): number for k, number in zip(ks, numbers, strict=True) if k in args.ks}
        for row, numbers in losses.items()
    }


def check_all(args: Args) -> None:
    """Raise ValueError, naming a setting, its value and what is allowed."""
    check(args)
    if not args.ks:
        raise ValueError("ks: must be at least one")
    for k in args.ks:
        if not 1 <= k <= args.num_vectors:
            raise ValueError(f"ks={k}: must be from 1 to {args.num_vectors}, the vectors of a set")


def main(argv: Sequence[str]) -> None:
    """Run what is missing; write table and figure."""
    args = training.parse(Args, argv, {"fast": {}, "paper": {**PAPER, "ks": PAPERS_KS}}, __doc__)
    check_all(args)
    sets_of(args)  # written before several runs ask for it
    columns = [name(k) for k in sorted(set(args.ks))]
    found = training.run_all(args, columns, make_task)
    rows, naive, paper = report.scores(found), baselines(args), papers(args)
    text = report.table(rows, naive, paper, columns, digits=4)
    report.write(args, "knn_centroid.py", "Signal loss of the KNN-centroid task", text, found)
    positions = {name(k): k / args.num_vectors for k in args.ks}
    labels = ("signal-to-noise ratio k / N", "signal loss (mean squared error)")
    report.plot_lines(args.out / "signal_loss.png", rows, naive, paper, positions, labels)
    print(f"{text}\nsee table.md, results.json and signal_loss.png in {args.out}")


if __name__ == "__main__":
    training.guard(main, sys.argv[1:])
