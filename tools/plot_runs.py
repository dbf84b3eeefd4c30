"""Plot the training curves of several runs in one figure: python tools/plot_runs.py OUT.png "LABEL=runs/NAME" ...

Each run is a folder with a `metrics.csv`. Runs with the same label share a colour.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from noisy_envs.training.metrics import read_metrics
from noisy_envs.training.plots import STYLES, write_png


def labeled_run(argument: str) -> tuple[str, Path]:
    """Split LABEL=FOLDER and return the label and the path of the folder's metrics."""
    label, _, folder = argument.partition("=")
    path = Path(folder) / "metrics.csv"
    if not folder or not path.is_file():
        raise argparse.ArgumentTypeError(f"runs={argument!r}: expected LABEL=FOLDER, with FOLDER/metrics.csv")
    return label, path


def main() -> None:
    """Read the metrics and write the figure."""
    from matplotlib.figure import Figure

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("runs", type=labeled_run, nargs="+", metavar="LABEL=FOLDER")
    parser.add_argument("--title", default="")
    args = parser.parse_args()
    figure = Figure(figsize=(8, 4.2), dpi=110, layout="constrained")
    axes = figure.subplots()
    labels = list(dict.fromkeys(label for label, _ in args.runs))
    for label, path in args.runs:
        rows = [row for row in read_metrics(path) if np.isfinite(row["charts/episodic_return"])]
        steps, returns = ([row[name] for row in rows] for name in ("global_step", "charts/episodic_return"))
        color = f"C{labels.index(label)}"
        seen = any(line.get_label() == label for line in axes.get_lines())
        style = STYLES[labels.index(label) % len(STYLES)]
        look: dict[str, Any] = {"color": color, "linestyle": style, "linewidth": 1.2, "label": None if seen else label}
        axes.plot(np.array(steps) / 1e6, returns, **look)
    axes.set(xlabel="million steps", ylabel="return of training episodes", title=args.title)
    axes.grid(alpha=0.25)
    axes.legend()
    write_png(args.out, figure)


if __name__ == "__main__":
    main()
