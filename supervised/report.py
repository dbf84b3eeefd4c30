"""Tables and figures of the supervised experiments, with the paper's numbers."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from experiment import Args, Job

from noisy_envs.training.checkpoint import write_summary
from noisy_envs.training.files import write_atomically
from noisy_envs.training.plots import COLOURS, HEAD_NAMES, MARKERS, write_png
from noisy_envs.training.versions import merge_versions

NAMES = HEAD_NAMES | {f"adapool-{query}": f"AdaPool, {query} query" for query in ("focal", "mean", "corner")}
COLOURS = COLOURS | dict(zip(list(NAMES)[-3:], ("#d55e00", "#cc79a7", "#56b4e9"), strict=True))
MARKERS = MARKERS | dict(zip(list(NAMES)[-3:], "oPv", strict=True))
Paper = Mapping[str, Mapping[str, float]]  # row -> column -> number


class Score(NamedTuple):
    """The mean over runs and its standard error, which is NaN for a single run."""

    mean: float
    error: float
    number: int

    def text(self, digits: int) -> str:
        """Format the score as a cell of a table."""
        spread = f" ± {self.error:.{digits}f}" if self.number > 1 else ""
        return f"{self.mean:.{digits}f}{spread}"


def scores(
    summaries: Mapping[Job, Mapping[str, Any]], transform: Callable[[float], float] = float
) -> dict[str, dict[str, Score]]:
    """Return the scores by pooling head (row) and column: means of the transformed test errors."""
    values: dict[str, dict[str, list[float]]] = {}
    for job, summary in summaries.items():
        values.setdefault(job.pooling, {}).setdefault(job.column, []).append(transform(summary["test_error"]))
    return {pooling: {column: _score(cell) for column, cell in row.items()} for pooling, row in values.items()}


def _score(values: Sequence[float]) -> Score:
    error = float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else np.nan
    return Score(float(np.mean(values)), error, len(values))


def format_table(
    rows: Mapping[str, Mapping[str, Score]], baselines: Paper, paper: Paper, columns: Sequence[str], digits: int
) -> str:
    """Format a table: pooling heads, baselines, and under each row the paper's numbers if there are any."""
    lines = [["", *columns], ["---"] * (1 + len(columns))]
    for name in [*rows, *baselines]:
        if name in rows:
            texts = [rows[name][column].text(digits) if column in rows[name] else "" for column in columns]
        else:
            texts = [f"{baselines[name][column]:.{digits}f}" for column in columns]
        lines.append([NAMES.get(name, name), *texts])
        row = paper.get(name, {})
        if any(column in row for column in columns):
            places = min(digits, 3)  # the paper's tables have no more
            lines.append(["the paper's", *(f"{row[x]:.{places}f}" if x in row else "" for x in columns)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write(args: Args, script: str, title: str, text: str, summaries: Mapping[Job, Mapping[str, Any]]) -> None:
    """Write `table.md`, with command, settings and versions, and `results.json`."""
    versions = merge_versions(summaries.values())
    command = f"python supervised/{script} {shlex.join(sys.argv[1:])}".strip()
    counts = sorted(set(Counter(job[:2] for job in summaries).values()))
    notes = [
        f"# {title}",
        f"`{command}`",
        f"Means over {' to '.join(map(str, counts))} runs (seeds and folds) ± standard error. The test set is "
        "evaluated once, with the weights of the best validation epoch.",
        text,
        f"Runs: {', '.join(f'{name} {value}' for name, value in versions.items())}.",
        f"Settings: {', '.join(f'{name} {value}' for name, value in dataclasses.asdict(args).items())}.",
    ]
    write_atomically(args.out / "table.md", "\n\n".join(notes) + "\n")
    runs = [{**job._asdict(), **summary} for job, summary in summaries.items()]
    write_summary(args.out / "results.json", {"command": command, "versions": versions, "runs": runs})


def plot_lines(
    path: Path,
    rows: Mapping[str, Mapping[str, Score]],
    baselines: Paper,
    paper: Paper,
    positions: Mapping[str, float],
    labels: tuple[str, str],
    log: bool = True,
) -> None:
    """Plot scores over the positions of the columns, on two logarithmic axes if `log`; the paper's are dashed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.6), dpi=150, layout="constrained")
    axes = figure.subplots()
    for name, row in rows.items():
        x = [positions[column] for column in row]
        means, errors = [score.mean for score in row.values()], [np.nan_to_num(score.error) for score in row.values()]
        style: dict[str, Any] = {"color": COLOURS[name], "marker": MARKERS[name]}
        axes.errorbar(x, means, errors, **style, markersize=5, capsize=3, label=NAMES[name])
    for line, (name, numbers) in zip((":x", "-.+", "--v"), baselines.items(), strict=False):
        x = [positions[column] for column in numbers]
        axes.plot(x, list(numbers.values()), line, color="0.3", linewidth=1, label=name, zorder=3)
    for name, numbers in paper.items():
        if name in rows:
            x = [positions[column] for column in numbers]
            axes.plot(x, list(numbers.values()), "--", color=COLOURS[name], linewidth=1, alpha=0.5)
    axes.set(xlabel=labels[0], ylabel=labels[1], xscale="log")
    if log:
        axes.set_yscale("symlog", linthresh=1e-3, linscale=0.5)
        axes.set_ylim(-5e-5, 1.4 * axes.dataLim.y1)  # nothing touches the frame
    ticks = sorted(set(positions.values()))
    axes.set_xticks(ticks, [f"{tick:.3g}" for tick in ticks])
    axes.set_xlim(ticks[0] / 1.4, ticks[-1] * 1.4)
    axes.minorticks_off()
    axes.grid(alpha=0.25)
    if paper:
        axes.plot([], [], "--", color="0.6", linewidth=1, label="the paper's")
    axes.legend(fontsize=8)
    write_png(path, figure)
