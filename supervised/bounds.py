"""How close are the weights of a trained AdaPool to the optimal ones and to the theorem's bounds? (Theorem 3.12)

    python supervised/knn_centroid.py --num-neighbors 1 4 16 --pooling adapool    # train first
    python supervised/bounds.py                                        # then measure all its AdaPool runs
    python supervised/bounds.py runs/knn_centroid/KNN-4/adapool/seed-1-fold-1    # or a single run

The signal of a test set is the k nearest neighbors of its first vector; all others are noise, the first included.
The head's scores determine the widths of signal and noise, the margin between them, and the bounds on the error w* − w
of each weight. RUNS gets `bounds.md` and `bounds.png`.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import experiment
import knn_centroid
import torch
from network import Network, set_network
from set_task import test_sets
from synthetic import nearest
from torch import Tensor

from noisy_envs.nn import theory
from noisy_envs.training.checkpoint import checkpoint_errors, load_checkpoint
from noisy_envs.training.files import write_atomically
from noisy_envs.training.plots import write_png
from noisy_envs.training.versions import current_commit

ROUNDING = 1e-12  # of float64
DEFAULT = Path("runs/knn_centroid")


class Measurement(NamedTuple):
    """Results for one k: means over sets, heads and runs."""

    runs: int
    margins: theory.Margins
    bounds: theory.Bounds
    signal: tuple[float, float, float]  # minimum, mean and maximum error w* − w in a set
    noise: tuple[float, float, float]
    inside: float  # share of the weights that lie within their bounds


def finished_runs(folder: Path) -> list[Path]:
    """Return the folders of the finished AdaPool runs in an experiment's folder, or in a folder inside it."""
    depths = ("", "*/", "*/*/", "*/*/*/")  # deeper ones belong to several experiments
    paths = [path for depth in depths for path in folder.resolve().glob(f"{depth}summary.json")]
    return sorted(path.parent for path in paths if path.match("KNN-*/adapool/*/summary.json"))


def load(folder: Path, data_dir: Path) -> tuple[Network, knn_centroid.Args, int]:
    """Return the best network of a run, in float64, its settings and its k.

    Raises:
        FileNotFoundError, ValueError: there is no checkpoint, or it is damaged.
    """
    path = folder / "checkpoint.pt"
    content = load_checkpoint(path)
    known = {field.name for field in dataclasses.fields(knn_centroid.Args)}
    with checkpoint_errors(path):
        settings = {name: value for name, value in content["settings"].items() if name in known and value is not None}
        args = knn_centroid.Args(**{**settings, "data_dir": data_dir, "device": "cpu"})
        network = set_network(experiment.encoder_config(args), args.num_features, "adapool", seed=0)
        network.load_state_dict(content["best"])
        k = int(content["settings"]["column"].removeprefix("KNN-"))
    return network.double().eval(), args, k


@torch.no_grad()
def measure(network: Network, sets: Tensor, k: int) -> Measurement:
    """Measure one run on sets (B, N, D), except those in which ties leave the k nearest neighbors undefined."""
    shares = nearest(sets, k)
    defined = ((shares == 0) | (shares == 1)).all(dim=1)
    sets, signal = sets[defined], shares[defined, None] > 0  # (B, 1, N)
    weights = network.head.weights(network.encode(sets.double()))  # (B, heads, N)
    margins = theory.margins(weights.log(), signal)
    bounds = theory.weight_bounds(margins, int(signal[0].sum()), sets.shape[1])
    errors = theory.weight_errors(weights, signal)
    low = torch.where(signal, bounds.signal_low[..., None], bounds.noise_low[..., None]) - ROUNDING
    high = torch.where(signal, bounds.signal_high[..., None], bounds.noise_high[..., None]) + ROUNDING
    inside = ((low <= errors) & (errors <= high)).double().mean().item()
    margins, bounds = theory.Margins(*(x.mean() for x in margins)), theory.Bounds(*(x.mean() for x in bounds))
    return Measurement(1, margins, bounds, spread(errors, signal), spread(errors, ~signal), inside)


def spread(errors: Tensor, chosen: Tensor) -> tuple[float, float, float]:
    """Return minimum, mean and maximum of the chosen errors (B, heads, N) in a set, averaged over sets and heads."""
    chosen = chosen.expand_as(errors)
    minimum = errors.masked_fill(~chosen, torch.inf).amin(dim=2)
    maximum = errors.masked_fill(~chosen, -torch.inf).amax(dim=2)
    mean = errors.masked_fill(~chosen, 0).sum(dim=2) / chosen.sum(dim=2)
    return minimum.mean().item(), mean.mean().item(), maximum.mean().item()


def average(runs: Sequence[Measurement]) -> Measurement:
    """Average the runs of one k."""

    def mean(values: Sequence[Sequence[float | Tensor]]) -> list[float]:
        return [float(sum(map(float, column))) / len(column) for column in zip(*values, strict=True)]

    signal, noise = (mean([getattr(run, name) for run in runs]) for name in ("signal", "noise"))
    return Measurement(
        len(runs),
        theory.Margins(*map(torch.tensor, mean([run.margins for run in runs]))),
        theory.Bounds(*map(torch.tensor, mean([run.bounds for run in runs]))),
        (signal[0], signal[1], signal[2]),
        (noise[0], noise[1], noise[2]),
        min(run.inside for run in runs),
    )


def format_table(by_k: Mapping[int, Measurement]) -> str:
    """Format a table with a row for each k."""
    lines = [
        "| k | runs | ε_s | ε_η | M | D | signal: L_s | w* − w, minimum to maximum | U_s "
        "| noise: L_η | w* − w | U_η | inside |",
        "|" + 13 * "---|",
    ]
    for k, run in by_k.items():
        low, high, noise_low, noise_high = map(float, run.bounds)
        numbers = " | ".join(f"{float(x):.2f}" for x in run.margins)
        signal, noise = (f"{minimum:.4f} to {maximum:.4f}" for minimum, _, maximum in (run.signal, run.noise))
        lines.append(
            f"| {k} | {run.runs} | {numbers} | {low:.4f} | {signal} | {high:.4f} "
            f"| {noise_low:.4f} | {noise} | {noise_high:.4f} | {100 * run.inside:.2f}% |"
        )
    return "\n".join(lines)


def plot(by_k: Mapping[int, Measurement], path: Path) -> None:
    """Plot, for each k, the bounds as a pale bar and the errors as a dark one."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.8), dpi=150, layout="constrained")
    for axes, name, colour in zip(figure.subplots(1, 2), ("signal", "noise"), ("#0072b2", "#d55e00"), strict=True):
        for place, run in enumerate(by_k.values()):
            low, high = (float(getattr(run.bounds, f"{name}_{end}")) for end in ("low", "high"))
            minimum, mean, maximum = getattr(run, name)
            bars = ((low, high, 0.6, 0.25), (minimum, maximum, 0.25, 0.9))
            for bottom, top, width, alpha in bars:
                axes.bar(place, top - bottom, width, bottom, color=colour, alpha=alpha, linewidth=0)
            axes.plot(place, mean, "o", color="black", markersize=4)
        axes.axhline(0, color="0.4", linewidth=0.8)
        axes.set_xticks(range(len(by_k)), [str(k) for k in by_k])
        axes.set_xlim(-0.8, len(by_k) - 0.2)
        axes.use_sticky_edges = False  # bars do not touch the frame
        axes.autoscale(axis="y")
        axes.margins(y=0.05)
        axes.set(xlabel="number of neighbors k", ylabel="w* − w", title=f"weights of {name}")
        axes.grid(axis="y", alpha=0.25)
    figure.suptitle(
        "errors of the weights (dark: minimum to maximum in a set, dot: mean) and their bounds (pale)", fontsize=9
    )
    write_png(path, figure)


def main(argv: Sequence[str]) -> None:
    """Measure all AdaPool runs in a folder, or a single run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="?", default=DEFAULT, help="folder of knn_centroid.py, or of a run")
    parser.add_argument("--num-sets", type=int, default=1000, help="test sets to measure on")
    parser.add_argument("--data-dir", type=Path, default=Path("data"), help="folder of data files")
    args = parser.parse_args(argv)
    if args.num_sets < 1:
        raise ValueError(f"num_sets={args.num_sets}: expected at least 1")
    folders = finished_runs(args.runs)
    if not folders:
        raise ValueError(f"{args.runs} contains no finished run of AdaPool: train one with supervised/knn_centroid.py")
    runs: dict[int, list[Measurement]] = {}
    for folder in folders:
        network, settings, k = load(folder, args.data_dir)
        runs.setdefault(k, []).append(measure(network, test_sets(settings)[: args.num_sets], k))
    by_k = {k: average(runs[k]) for k in sorted(runs)}
    text = format_table(by_k)
    command = shlex.join(["python", "supervised/bounds.py", *argv])
    write_atomically(args.runs / "bounds.md", f"`{command}`, commit {current_commit()}\n\n{text}\n")
    plot(by_k, args.runs / "bounds.png")
    print(f"{text}\nsee bounds.md and bounds.png in {args.runs}")


if __name__ == "__main__":
    experiment.guard(main, sys.argv[1:])
