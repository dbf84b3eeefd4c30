"""Figures of runs: learning curves, scores over levels of noise, panels of several heads."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from noisy_envs.training.files import write_atomically
from noisy_envs.training.statistics import RESAMPLES, Estimate, Rows, mean_curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart by the colour-blind too
COLOURS = {"avgpool": "#0072b2", "maxpool": "#e69f00", "clstoken": "#009e73", "adapool": "#d55e00"}
HEAD_NAMES = {"avgpool": "AvgPool", "maxpool": "MaxPool", "clstoken": "ClsToken", "adapool": "AdaPool"}
STYLES = ("-", (0, (7, 3)), (0, (4, 4)), (0, (1, 2)))  # gaps of the later lines show one that they lie on
MARKERS = {"avgpool": "s", "maxpool": "^", "clstoken": "D", "adapool": "o"}


def format_table(found: dict[str, Any]) -> str:
    """Write results, as agents/compare.py gathers them, in Markdown: a row for each head, a column for each level."""
    columns = ["head", *(f"{name}, SNR {snr:.3g}" for name, snr in found["snr"].items()), "drop"]
    rows = [columns, ["---"] * len(columns)]
    for head, scores in found["scores"].items():
        texts = [
            f"{Estimate(**found['iqm'][head][name])}, n = {len(one)}" if one else "none" for name, one in scores.items()
        ]
        drop = str(Estimate(**found["drop"][head])) if head in found["drop"] else "none"
        rows.append([HEAD_NAMES[head], *texts, drop])
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    missing = "\n".join(f"* missing: {cell}: {why}" for cell, why in found["missing"].items())
    return "\n\n".join(["# Pooling heads over noise levels", *_notes(found), table, missing]).rstrip() + "\n"


def _notes(found: dict[str, Any]) -> list[str]:
    fewest = min((len(one) for scores in found["scores"].values() for one in scores.values() if one), default=0)
    notes = [
        f"`{found['command']}`",
        f"Runs: {', '.join(f'{name} {version}' for name, version in found['versions'].items())}.",
        "Normalised score (0 random play, 1 the oracle, or in environments of others what counts as solved) of the "
        "evaluation at the end: interquartile mean over n seeds, in brackets, from three seeds on, its 95 % interval "
        f"({RESAMPLES:,} bootstrap resamples of the seeds of each cell). Drop: from the level of least noise to "
        "that of most.",
    ]
    if fewest < 4:
        notes.append("Of fewer than four seeds no score is trimmed: the interquartile mean is the mean.")
    if fewest < 10:
        notes.append(
            "Intervals of few seeds are too narrow: of 3, 5 and 10 seeds about 76, 89 and 93 % hold the truth."
        )
    return notes


class Panel(NamedTuple):
    """A noise level in the figure."""

    title: str
    random: float
    oracle: float
    curves: dict[str, list[Rows]]  # head -> runs, at least one
    ceiling: str = "oracle"  # whose return `oracle` is


def plot_panels(path: Path, panels: Sequence[Panel]) -> None:
    """Draw a panel for each noise level, as a PNG: lines are means over seeds, shaded their standard errors."""
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
    ceilings = dict.fromkeys(panel.ceiling for panel in panels)
    labels = [label for label in (*HEAD_NAMES.values(), *ceilings, "random") if label in handles]
    figure.legend([handles[label] for label in labels], labels, loc="outside lower center", ncols=6, frameon=False)
    write_png(path, figure)


def _draw_panel(axes: Any, panel: Panel) -> None:
    from matplotlib.ticker import EngFormatter

    axes.axhline(panel.oracle, color="0.35", linestyle="--", linewidth=1, label=panel.ceiling)
    axes.axhline(panel.random, color="0.35", linestyle=":", linewidth=1, label="random")
    for number, (head, runs) in enumerate(panel.curves.items()):
        steps, means, errors = mean_curve(runs)
        point = "o" if len(steps) == 1 else None  # of which there is no line
        look: dict[str, Any] = {"color": COLOURS[head], "linestyle": STYLES[number % len(STYLES)], "marker": point}
        axes.plot(steps, means, **look, linewidth=1.4, label=HEAD_NAMES[head])
        axes.fill_between(steps, means - errors, means + errors, color=COLOURS[head], alpha=0.25, linewidth=0)
    axes.set_title(panel.title, fontsize=10)
    axes.set_xlabel("environment steps")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(alpha=0.25)
    axes.set_xlim(left=0)


def plot_curve(
    path: Path, rows: list[dict[str, float]], random: float, oracle: float, title: str, ceiling: str = "oracle"
) -> None:
    """Draw returns over steps, between the lines of random play and of the oracle where they differ, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    played = [row for row in rows if np.isfinite(row["charts/episodic_return"])]
    steps = [row["global_step"] for row in played]
    returns = [row["charts/episodic_return"] for row in played]
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
        score.set_ylabel("normalised score")
    axes.set(xlabel="environment steps", ylabel="episodic return", title=title)
    axes.grid(alpha=0.25)
    axes.legend(loc="center right")
    write_png(path, figure)


def plot_scores(path: Path, rows: Sequence[dict[str, Any]], ceiling: str = "oracle") -> None:
    """Draw the scores of an evaluation, noise in training × noise in evaluation, both ascending, as `plot_matrix` does.

    Args:
        path: of the PNG.
        rows: results of each run in turn, at the same noises: `run`, `seed`, `env_id`, `trained`, `evaluated` (noise
            tokens), `score`, `score_95`.
        ceiling: whose return has the score 1.
    """
    found = {(row["run"], row["evaluated"]): row for row in rows}
    noises = sorted({row["evaluated"] for row in rows}, key=lambda noise: np.ravel(noise).tolist())
    by_run = {row["run"]: row for row in rows}
    trained = sorted(by_run.values(), key=lambda row: (np.ravel(row["trained"]).tolist(), row["seed"]))
    labels = [str(row["trained"]) for row in trained]
    for name in ([f"seed {row['seed']}" for row in trained], [Path(row["run"]).name for row in trained]):
        if len(set(labels)) < len(labels):  # several of one noise: say which
            labels = [f"{row['trained']}, {own}" for row, own in zip(trained, name, strict=True)]
    cells = [[found[row["run"], noise] for noise in noises] for row in trained]
    values = np.array([[cell["score"] for cell in line] for line in cells])
    lows, highs = (np.array([[cell["score_95"][side] for cell in line] for line in cells]) for side in (0, 1))
    columns = [str(noise) for noise in noises]
    title = f"normalised score, {rows[0]['env_id']}"
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
    """Draw normalised scores (R, C), say training noise × evaluation noise, as coloured cells with numbers, as a PNG.

    The colours run from 0, random play, to 1, the ceiling, in every figure, so that two of them compare.

    Args:
        path: of the PNG.
        values: scores (R, C); NaN leaves a cell empty.
        lows, highs: ends of the intervals (R, C); NaN leaves one out.
        rows, columns: R and C names, of the first row at the top and the first column at the left.
        title: of the figure.
        row_label, column_label: what rows and columns are.
        ceiling: whose return has the score 1.

    Raises:
        ValueError: for shapes that differ.
    """
    from matplotlib.figure import Figure

    shape = (len(rows), len(columns))
    for name, array in {"values": values, "lows": lows, "highs": highs}.items():
        if np.shape(array) != shape or 0 in shape:
            raise ValueError(f"{name} must have a row for each of rows and columns, {shape}, got {np.shape(array)}")
    width, height = max(4.6, 2.2 + 0.95 * shape[1]), max(1.1, 0.62 * shape[0])  # of the figure and of its cells, inches
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
    bar.set_label("normalised score")
    write_png(path, figure)


def _label_cell(axes: Axes, row: int, column: int, numbers: Sequence[float], color: str) -> None:
    """Write a score in its cell, and below it the interval, if it is known: `numbers` are value, low, high."""
    value, low, high = (f"{round(number, 2) + 0.0:.2f}" for number in numbers)  # + 0.0 spares "-0.00"
    style: dict[str, Any] = {"ha": "center", "va": "center", "color": color, "textcoords": "offset points"}
    known = np.isfinite(numbers).all()
    axes.annotate(value, (column, row), (0, 6 if known else 0), fontsize=11, fontweight="bold", **style)
    if known:
        axes.annotate(f"{low} to {high}", (column, row), (0, -8), fontsize=7.5, **style)


def write_png(path: Path, figure: Figure) -> None:
    """Write a figure without the global state of pyplot."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer)
    write_atomically(path, buffer.getvalue())
