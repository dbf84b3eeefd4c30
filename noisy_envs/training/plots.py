"""Figures and tables of runs: learning curves, scores by noise level, comparisons of pooling heads."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from noisy_envs.training.files import write_atomically
from noisy_envs.training.statistics import RESAMPLES, Estimate, Rows, mean_curve, mean_interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# of Okabe and Ito, distinguishable with color blindness
COLOURS = {"avgpool": "#0072b2", "maxpool": "#e69f00", "clstoken": "#009e73", "adapool": "#d55e00"}
OTHER_COLOURS = ("#cc79a7", "#56b4e9", "#f0e442", "#000000")  # for agents of a user
HEAD_NAMES = {"avgpool": "AvgPool", "maxpool": "MaxPool", "clstoken": "ClsToken", "adapool": "AdaPool"}
STYLES = ("-", (0, (7, 3)), (0, (4, 4)), (0, (1, 2)))  # later lines have gaps, which show the lines below them
MARKERS = {"avgpool": "s", "maxpool": "^", "clstoken": "D", "adapool": "o"}


def format_table(results: dict[str, Any]) -> str:
    """Format results of agents/compare.py in Markdown: a row for each head, a column for each noise level."""
    columns = ["head", *(f"{name}, SNR {snr:.3g}" for name, snr in results["snr"].items()), "drop"]
    rows = [columns, ["---"] * len(columns)]
    for head, scores in results["scores"].items():
        cells = [
            f"{Estimate(**results['iqm'][head][name])}, n = {len(seeds)}" if seeds else "none"
            for name, seeds in scores.items()
        ]
        drop = str(Estimate(**results["drop"][head])) if head in results["drop"] else "none"
        rows.append([HEAD_NAMES.get(head, head), *cells, drop])
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    missing = "\n".join(f"* missing: {run}: {reason}" for run, reason in results["missing"].items())
    return "\n\n".join(["# Pooling heads by noise level", *_notes(results), table, missing]).rstrip() + "\n"


def _notes(results: dict[str, Any]) -> list[str]:
    counts = [len(seeds) for scores in results["scores"].values() for seeds in scores.values() if seeds]
    fewest = min(counts, default=0)
    notes = [
        f"`{results['command']}`",
        f"Runs: {', '.join(f'{name} {version}' for name, version in results['versions'].items())}.",
        "Normalized scores of the final evaluation: 0 is a random policy, 1 the oracle (in other Gymnasium "
        "environments the reward threshold). Each cell has the interquartile mean over n seeds and, from three seeds "
        f"on, its 95% confidence interval in parentheses ({RESAMPLES:,} bootstrap resamples of the seeds). Drop: "
        "difference between the lowest and the highest noise level.",
    ]
    if fewest < 4:
        notes.append("With fewer than four seeds no score is trimmed: the interquartile mean is the mean.")
    if fewest < 10:
        notes.append(
            "Intervals of few seeds are too narrow: with 3, 5 and 10 seeds about 76, 89 and 93% hold the true value."
        )
    return notes


class Panel(NamedTuple):
    """Learning curves at a noise level."""

    title: str
    random: float
    oracle: float
    curves: dict[str, list[Rows]]  # head -> runs, at least one
    ceiling: str = "oracle"  # name of the return `oracle`


def plot_panels(path: Path, panels: Sequence[Panel]) -> None:
    """Plot a panel for each noise level, as a PNG: means over seeds as lines, standard errors as shaded areas."""
    from matplotlib.figure import Figure

    columns = min(4, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(max(7.5, 3 * columns + 0.6), 2.9 * rows + 0.6), dpi=150, layout="constrained")
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False).flatten()
    for axes, panel in zip(grid, panels, strict=False):
        _draw_panel(axes, panel)
    for axes in grid[len(panels) :]:
        axes.remove()
    for axes in grid[: len(panels) : columns]:
        axes.set_ylabel("return of training episodes")
    handles = {line.get_label(): line for axes in grid[: len(panels)] for line in axes.get_lines()}
    last = (*dict.fromkeys(panel.ceiling for panel in panels), "random")
    labels = [label for label in handles if label not in last] + [label for label in last if label in handles]
    figure.legend([handles[label] for label in labels], labels, loc="outside lower center", ncols=6, frameon=False)
    write_png(path, figure)


def _draw_panel(axes: Any, panel: Panel) -> None:
    from matplotlib.ticker import EngFormatter

    axes.axhline(panel.oracle, color="0.35", linestyle="--", linewidth=1, label=panel.ceiling)
    axes.axhline(panel.random, color="0.35", linestyle=":", linewidth=1, label="random")
    for number, (head, runs) in enumerate(panel.curves.items()):
        steps, means, errors = mean_curve(runs)
        point = "o" if len(steps) == 1 else None  # a single point has no line
        style = _look(head, number)
        axes.plot(steps, means, **style, marker=point)
        axes.fill_between(steps, means - errors, means + errors, color=style["color"], alpha=0.25, linewidth=0)
    axes.set_title(panel.title, fontsize=10)
    axes.set_xlabel("environment steps")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(alpha=0.25)
    axes.set_xlim(left=0)


def plot_levels(path: Path, panels: dict[str, dict[str, list[Estimate]]], snrs: Sequence[float], source: str) -> None:
    """Plot normalised scores by SNR as a PNG, a panel for each setting: estimates with their intervals.

    Args:
        path: of the PNG.
        panels: title -> head -> an estimate for each SNR; NaN leaves a place empty.
        snrs: one for each noise level, from left to right.
        source: what the figure shows, see `write_png`.
    """
    figure, grid = _score_panels(list(panels), min(3, len(panels)), "SNR (share of signal tokens)", 3.6)
    for axes, heads in zip(grid, panels.values(), strict=False):
        for number, (head, estimates) in enumerate(heads.items()):
            value, low, high = np.array(estimates).T
            x = np.arange(len(snrs)) + 0.09 * (number - (len(heads) - 1) / 2)  # so that no interval hides another
            errors = np.nan_to_num([value - low, high - value]).clip(min=0)  # without interval, no bar
            axes.errorbar(x, value, errors, **_look(head, number), marker=MARKERS.get(head, "o"), capsize=2.5)
        axes.set_xticks(range(len(snrs)), [f"{snr:.3g}" for snr in snrs])
        axes.set_xlim(-0.5, len(snrs) - 0.5)
    _finish(path, figure, source)


def plot_score_curves(
    path: Path, panels: dict[str, dict[str, npt.NDArray[Any]]], columns: int, steps: Sequence[float], source: str
) -> None:
    """Plot training scores in bins as a PNG, a panel for each noise level of a setting: means with their intervals.

    Args:
        path: of the PNG.
        panels: title -> head -> curves (n, T) of n runs.
        columns: number of panels in a row.
        steps: of each panel's longest run.
        source: what the figure shows, see `write_png`.
    """
    from matplotlib.ticker import EngFormatter

    figure, grid = _score_panels(list(panels), columns, "environment steps", 2.9)
    for axes, heads, length in zip(grid, panels.values(), steps, strict=False):
        for number, (head, curves) in enumerate(heads.items()):
            x = length * (np.arange(curves.shape[1]) + 0.5) / curves.shape[1]
            means, low, high = mean_interval(curves)
            axes.plot(x, means, **(style := _look(head, number)))
            axes.fill_between(x, low, high, color=style["color"], alpha=0.2, linewidth=0)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.set_xlim(0, length)
        if not heads:
            axes.remove()
    _finish(path, figure, source)


def _score_panels(titles: Sequence[str], columns: int, xlabel: str, height: float) -> tuple[Figure, Any]:
    """Return a figure with panels of normalised scores, and the panels in order."""
    from matplotlib.figure import Figure

    rows = -(-len(titles) // columns)
    figure = Figure(figsize=(max(6, 3.1 * columns + 0.6), height * rows + 0.5), dpi=120, layout="constrained")
    figure.supylabel("normalised score", fontsize="medium")
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False).flatten()
    for number, axes in enumerate(grid):
        if number >= len(titles):
            axes.remove()
            continue
        axes.axhline(1, color="0.35", linestyle="--", linewidth=1)
        axes.axhline(0, color="0.35", linestyle=":", linewidth=1)
        axes.set_title("\n".join(textwrap.fill(line, 42) for line in titles[number].splitlines()), fontsize=9)
        axes.set_xlabel(xlabel)
        axes.tick_params(labelleft=True)
        axes.grid(alpha=0.25)
    return figure, grid


def _look(head: str, number: int) -> dict[str, Any]:
    """Return how the line of a head is drawn, the same in all panels; `number` is that of a head of a user."""
    number = list(COLOURS).index(head) if head in COLOURS else number
    colour = COLOURS.get(head, OTHER_COLOURS[number % len(OTHER_COLOURS)])
    style = {"color": colour, "linestyle": STYLES[number % len(STYLES)], "linewidth": 1.4}
    return style | {"label": HEAD_NAMES.get(head, head)}


def _finish(path: Path, figure: Figure, source: str) -> None:
    """Add a legend of all heads, and write the figure."""
    pairs = [axes.get_legend_handles_labels() for axes in figure.axes]
    handles = {label: line for lines, labels in pairs for line, label in zip(lines, labels, strict=True)}
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=6, frameon=False)
    write_png(path, figure, source)


def plot_curve(
    path: Path, rows: list[dict[str, float]], random: float, oracle: float, title: str, ceiling: str = "oracle"
) -> None:
    """Plot returns over steps as a PNG, with lines for random policy and oracle if both are known and differ."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    finite = [row for row in rows if np.isfinite(row["charts/episodic_return"])]
    steps = [row["global_step"] for row in finite]
    returns = [row["charts/episodic_return"] for row in finite]
    known = np.isfinite([random, oracle]).all() and random != oracle
    if known:
        axes.axhline(oracle, color="#14782c", linestyle="--", label=f"{ceiling} {oracle:.2f}")
    axes.plot(steps, returns, color="#142caa", marker=".", label="training, mean over episodes")
    if known:
        axes.axhline(random, color="#c0392b", linestyle=":", label=f"random {random:.2f}")

    def to_score(y: Any) -> Any:
        return (y - random) / (oracle - random)

    def to_return(score: Any) -> Any:
        return random + score * (oracle - random)

    if known:
        score = axes.secondary_yaxis("right", functions=(to_score, to_return))
        score.set_ylabel("normalized score")
    axes.set(xlabel="environment steps", ylabel="episodic return", title=title)
    axes.grid(alpha=0.25)
    axes.legend(loc="center right")
    write_png(path, figure)


def plot_scores(path: Path, rows: Sequence[dict[str, Any]], ceiling: str = "oracle") -> None:
    """Plot the scores of an evaluation by noise in training (rows) and in evaluation (columns), see `plot_matrix`.

    Args:
        path: of the PNG.
        rows: results of each run at the same noise levels: `run`, `seed`, `env_id`, `trained` and `evaluated` (noise
            tokens), `score`, `score_95`.
        ceiling: name of the return with a score of 1.
    """
    results = {(row["run"], row["evaluated"]): row for row in rows}
    noises = sorted({row["evaluated"] for row in rows}, key=lambda noise: np.ravel(noise).tolist())
    by_run = {row["run"]: row for row in rows}
    trained = sorted(by_run.values(), key=lambda row: (np.ravel(row["trained"]).tolist(), row["seed"]))
    labels = [str(row["trained"]) for row in trained]
    for details in ([f"seed {row['seed']}" for row in trained], [Path(row["run"]).name for row in trained]):
        if len(set(labels)) < len(labels):  # several runs with the same noise
            labels = [f"{row['trained']}, {detail}" for row, detail in zip(trained, details, strict=True)]
    cells = [[results[row["run"], noise] for noise in noises] for row in trained]
    values = np.array([[cell["score"] for cell in line] for line in cells])
    lows, highs = (np.array([[cell["score_95"][side] for cell in line] for line in cells]) for side in (0, 1))
    columns = [str(noise) for noise in noises]
    title = f"normalized score, {rows[0]['env_id']}"
    plot_matrix(path, values, lows, highs, labels, columns, title, "noise in training", "noise in evaluation", ceiling)


def plot_matrix(
    path: Path,
    values: npt.NDArray[Any],
    lows: npt.NDArray[Any],
    highs: npt.NDArray[Any],
    rows: Sequence[str],
    columns: Sequence[str],
    title: str,
    row_label: str,
    column_label: str,
    ceiling: str = "oracle",
) -> None:
    """Plot normalized scores (R, C), such as by noise in training and evaluation, as a PNG: a heat map with numbers.

    The colors always range from 0, a random policy, to 1, the ceiling, so that figures can be compared.

    Args:
        path: of the PNG.
        values: scores (R, C); NaN leaves a cell empty.
        lows, highs: ends of the intervals (R, C); NaN omits the interval.
        rows, columns: R and C names; the first row is at the top, the first column on the left.
        title: of the figure.
        row_label, column_label: labels of the axes.
        ceiling: name of the return with a score of 1.

    Raises:
        ValueError: shapes differ.
    """
    from matplotlib.figure import Figure

    shape = (len(rows), len(columns))
    for name, array in {"values": values, "lows": lows, "highs": highs}.items():
        if np.shape(array) != shape or 0 in shape:
            raise ValueError(f"{name}: expected shape {shape} of rows and columns, got {np.shape(array)}")
    # of the figure and of its cells, in inches
    width, height = max(4.6, 2.2 + 0.95 * shape[1]), max(1.1, 0.62 * shape[0])
    figure = Figure(figsize=(width, 1.5 + height), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(np.ma.masked_invalid(values), cmap="viridis", vmin=0, vmax=1, aspect="auto")
    for row, column in np.argwhere(np.isfinite(values)):
        color = "white" if values[row, column] < 0.6 else "#202020"
        _label_cell(axes, row, column, [array[row, column] for array in (values, lows, highs)], color)
    axes.set_xticks(range(shape[1]), columns)
    axes.set_yticks(range(shape[0]), rows)
    axes.set(xlabel=column_label, ylabel=row_label)
    axes.set_xticks(np.arange(1, shape[1]) - 0.5, minor=True)
    axes.set_yticks(np.arange(1, shape[0]) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=2)
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_visible(False)
    figure.suptitle(textwrap.fill(title, int(12 * width)), fontsize=11)
    bar = figure.colorbar(image, ax=axes, extend="both", extendfrac=0.12 / height, aspect=height / 0.16, pad=0.03)
    bar.set_ticks([0, 0.25, 0.5, 0.75, 1], labels=["0 random", "0.25", "0.5", "0.75", f"1 {ceiling}"])
    bar.set_label("normalized score")
    write_png(path, figure)


def _label_cell(axes: Axes, row: int, column: int, numbers: Sequence[float], color: str) -> None:
    """Write a score and, if known, its interval below it in a cell; `numbers` are value, low, high."""
    value, low, high = (f"{round(number, 2) + 0.0:.2f}" for number in numbers)  # + 0.0 turns -0.0 into 0.0
    style: dict[str, Any] = {"ha": "center", "va": "center", "color": color, "textcoords": "offset points"}
    known = np.isfinite(numbers).all()
    axes.annotate(value, (column, row), (0, 6 if known else 0), fontsize=11, fontweight="bold", **style)
    if known:
        axes.annotate(f"{low} to {high}", (column, row), (0, -8), fontsize=7.5, **style)


def write_png(path: Path, figure: Figure, source: str = "") -> None:
    """Write a figure as a PNG, without the global state of pyplot; its text field `Source` holds `source`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer, metadata={"Source": source} if source else None)
    write_atomically(path, buffer.getvalue())
