"""How near are the weights of a trained AdaPool to the optimal ones, and to the theorem's bounds? (Theorem 3.12)

    python supervised/knn_centroid.py --ks 1 4 16 --pools adapool      # train first
    python supervised/bounds.py                                        # then measure all its AdaPool runs
    python supervised/bounds.py runs/knn_centroid/KNN-4/adapool/seed-1-fold-1    # or one alone

The signal of a test set is the k nearest neighbours of its first vector; all others are noise, that vector included.
From the head's scores follow the widths of signal and noise, the margin between them, and the bounds on w* − w, in
which every weight must lie. RUNS gets `bounds.md` and `bounds.png`.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import knn_centroid
import torch
import training
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


class Measured(NamedTuple):
    """Numbers of one noise level, means over sets, heads and runs."""

    runs: int
    margins: theory.Margins
    bounds: theory.Bounds
    signal: tuple[float, float, float]  # least, mean and largest error w* − w in a set
    noise: tuple[float, float, float]
    inside: float  # share of all weights that lie within their bounds


def finished(folder: Path) -> list[Path]:
    """Return the folders of the finished AdaPool runs in a folder of runs, or in a part of it, that of one run say."""
    depths = ("", "*/", "*/*/", "*/*/*/")  # runs of two experiments lie farther apart
    found = [path for depth in depths for path in folder.resolve().glob(f"{depth}summary.json")]
    return sorted(path.parent for path in found if path.match("KNN-*/adapool/*/summary.json"))


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
        network = set_network(training.shape(args), args.num_features, "adapool", seed=0)
        network.load_state_dict(content["best"])
        k = int(content["settings"]["column"].removeprefix("KNN-"))
    return network.double().eval(), args, k


@torch.no_grad()
def measure(network: Network, sets: Tensor, k: int) -> Measured:
    """Measure one run on sets (B, N, D), but for those of which a tie leaves open what the k nearest are."""
    shares = nearest(sets, k)
    told = ((shares == 0) | (shares == 1)).all(dim=1)
    sets, signal = sets[told], shares[told, None] > 0  # (B, 1, N)
    weights = network.head.weights(network.encode(sets.double()))  # (B, heads, N)
    found = theory.margins(weights.log(), signal)
    bounds = theory.weight_bounds(found, int(signal[0].sum()), sets.shape[1])
    errors = theory.weight_errors(weights, signal)
    low = torch.where(signal, bounds.signal_low[..., None], bounds.noise_low[..., None]) - ROUNDING
    high = torch.where(signal, bounds.signal_high[..., None], bounds.noise_high[..., None]) + ROUNDING
    inside = ((low <= errors) & (errors <= high)).double().mean().item()
    found, bounds = theory.Margins(*(x.mean() for x in found)), theory.Bounds(*(x.mean() for x in bounds))
    return Measured(1, found, bounds, spread(errors, signal), spread(errors, ~signal), inside)


def spread(errors: Tensor, chosen: Tensor) -> tuple[float, float, float]:
    """Return the least, the mean and the largest of the chosen errors in a set (B, heads, N), means over the rest."""
    chosen = chosen.expand_as(errors)
    least = errors.masked_fill(~chosen, torch.inf).amin(dim=2)
    largest = errors.masked_fill(~chosen, -torch.inf).amax(dim=2)
    mean = errors.masked_fill(~chosen, 0).sum(dim=2) / chosen.sum(dim=2)
    return least.mean().item(), mean.mean().item(), largest.mean().item()


def average(found: Sequence[Measured]) -> Measured:
    """Average the runs of one noise level."""

    def mean(values: Sequence[Sequence[float | Tensor]]) -> list[float]:
        return [float(sum(map(float, column))) / len(column) for column in zip(*values, strict=True)]

    signal, noise = (mean([getattr(one, name) for one in found]) for name in ("signal", "noise"))
    return Measured(
        len(found),
        theory.Margins(*map(torch.tensor, mean([one.margins for one in found]))),
        theory.Bounds(*map(torch.tensor, mean([one.bounds for one in found]))),
        (signal[0], signal[1], signal[2]),
        (noise[0], noise[1], noise[2]),
        min(one.inside for one in found),
    )


def table(levels: Mapping[int, Measured]) -> str:
    """Write a row for each k."""
    lines = [
        "| k | runs | ε_s | ε_η | M | D | signal: L_s | w* − w, least to largest | U_s "
        "| noise: L_η | w* − w | U_η | inside |",
        "|" + 13 * "---|",
    ]
    for k, found in levels.items():
        low, high, noise_low, noise_high = map(float, found.bounds)
        numbers = " | ".join(f"{float(x):.2f}" for x in found.margins)
        signal, noise = (f"{least:.4f} to {largest:.4f}" for least, _, largest in (found.signal, found.noise))
        lines.append(
            f"| {k} | {found.runs} | {numbers} | {low:.4f} | {signal} | {high:.4f} "
            f"| {noise_low:.4f} | {noise} | {noise_high:.4f} | {100 * found.inside:.2f} % |"
        )
    return "\n".join(lines)


def draw(levels: Mapping[int, Measured], path: Path) -> None:
    """Draw, for each k, the bounds as a pale bar and the errors within as a dark one."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.8), dpi=150, layout="constrained")
    for axes, name, colour in zip(figure.subplots(1, 2), ("signal", "noise"), ("#0072b2", "#d55e00"), strict=True):
        for place, found in enumerate(levels.values()):
            low, high = (float(getattr(found.bounds, f"{name}_{end}")) for end in ("low", "high"))
            least, mean, largest = getattr(found, name)
            bars = ((low, high, 0.6, 0.25), (least, largest, 0.25, 0.9))
            for bottom, top, width, alpha in bars:
                axes.bar(place, top - bottom, width, bottom, color=colour, alpha=alpha, linewidth=0)
            axes.plot(place, mean, "o", color="black", markersize=4)
        axes.axhline(0, color="0.4", linewidth=0.8)
        axes.set_xticks(range(len(levels)), [str(k) for k in levels])
        axes.set_xlim(-0.8, len(levels) - 0.2)
        axes.use_sticky_edges = False  # bars do not touch the frame
        axes.autoscale(axis="y")
        axes.margins(y=0.05)
        axes.set(xlabel="k, neighbours that are signal", ylabel="w* − w", title=f"weights of {name}")
        axes.grid(axis="y", alpha=0.25)
    figure.suptitle("errors of weights (dark: least to largest in a set, dot: mean) in their bounds (pale)", fontsize=9)
    write_png(path, figure)


def main(argv: Sequence[str]) -> None:
    """Measure all AdaPool runs in a folder, or one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="?", default=DEFAULT, help="knn_centroid.py's folder, or a run's")
    parser.add_argument("--num-sets", type=int, default=1000, help="test sets to measure on")
    parser.add_argument("--data-dir", type=Path, default=Path("data"), help="folder of data files")
    args = parser.parse_args(argv)
    if args.num_sets < 1:
        raise ValueError(f"num_sets={args.num_sets}: must be at least 1")
    folders = finished(args.runs)
    if not folders:
        raise ValueError(f"{args.runs} holds no finished run of AdaPool: train one with supervised/knn_centroid.py")
    found: dict[int, list[Measured]] = {}
    for folder in folders:
        network, settings, k = load(folder, args.data_dir)
        found.setdefault(k, []).append(measure(network, test_sets(settings)[: args.num_sets], k))
    levels = {k: average(found[k]) for k in sorted(found)}
    text = table(levels)
    command = shlex.join(["python", "supervised/bounds.py", *argv])
    write_atomically(args.runs / "bounds.md", f"`{command}`, commit {current_commit()}\n\n{text}\n")
    draw(levels, args.runs / "bounds.png")
    print(f"{text}\nsee bounds.md and bounds.png in {args.runs}")


if __name__ == "__main__":
    training.guard(main, sys.argv[1:])
