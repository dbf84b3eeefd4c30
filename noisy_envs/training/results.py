"""What is told of several runs: interquartile means, bootstrapped intervals, learning curves. Needs no torch.

The statistics are those of Agarwal et al. 2021 (their library is rliable): resampling draws seeds anew within each
cell, a head at a noise level, and intervals are percentiles. `n` seeds, `R` resamples, `T` steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from noisy_envs.training.pictures import write_png

RESAMPLES = 10_000
# Okabe and Ito's colours, told apart by the colour-blind too
COLOURS = {"avgpool": "#0072b2", "maxpool": "#e69f00", "clstoken": "#009e73", "adapool": "#d55e00"}
NAMES = {"avgpool": "AvgPool", "maxpool": "MaxPool", "clstoken": "ClsToken", "adapool": "AdaPool"}
STYLES = ("-", (0, (7, 3)), (0, (4, 4)), (0, (1, 2)))  # gaps of the later lines show one that they lie on
MARKERS = {"avgpool": "s", "maxpool": "^", "clstoken": "D", "adapool": "o"}
Rows = list[dict[str, float]]  # of a `metrics.csv`


def iqm(values: np.ndarray) -> np.ndarray:
    """Return the interquartile mean over the last axis, (…, n) -> (…): floor(n / 4) values fall away at each end.

    Of three values or fewer none falls away, and it is the mean.
    """
    count = values.shape[-1]
    middle: np.ndarray = np.sort(values, axis=-1)[..., count // 4 : count - count // 4].mean(axis=-1)
    return middle


class Estimate(NamedTuple):
    """An interquartile mean, or a difference of two, with its 95 % interval; of fewer than three seeds that is NaN."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        """Write it as a cell of a table."""
        return f"{self.value:.3f}" + (f" ({self.low:.3f} to {self.high:.3f})" if np.isfinite(self.low) else "")


def resampled(scores: Sequence[float], seed: int) -> np.ndarray:
    """Return interquartile means (R,) of the scores, drawn with replacement."""
    picked = np.random.default_rng(seed).integers(0, len(scores), (RESAMPLES, len(scores)))
    return iqm(np.asarray(scores)[picked])


def estimate(scores: Sequence[float]) -> Estimate:
    """Return the interquartile mean of the scores of n >= 1 seeds.

    The interval of few seeds is too narrow: of normal scores, one of 95 % holds the truth for 2, 3, 5 and 10 seeds
    in 50, 76, 89 and 93 % of cases (2,000 simulations). That of two is a coin's toss, and none is given.
    """
    return _estimate(float(iqm(np.asarray(scores))), resampled(scores, 0), len(scores))


def drop(few: Sequence[float], many: Sequence[float]) -> Estimate:
    """Return how far the interquartile mean falls from the scores at little noise to those at much.

    Both are resampled independently.
    """
    value = float(iqm(np.asarray(few)) - iqm(np.asarray(many)))
    return _estimate(value, resampled(few, 0) - resampled(many, 1), min(len(few), len(many)))


def _estimate(value: float, samples: np.ndarray, seeds: int) -> Estimate:
    low, high = np.quantile(samples, (0.025, 0.975)) if seeds > 2 else (np.nan, np.nan)
    return Estimate(value, float(low), float(high))


def tabulate(found: dict[str, Any]) -> str:
    """Write results, as agents/compare.py gathers them, in Markdown: a row for each head, a column for each level."""
    columns = ["head", *(f"{name}, SNR {snr:.3g}" for name, snr in found["snr"].items()), "drop"]
    rows = [columns, ["---"] * len(columns)]
    for head, scores in found["scores"].items():
        texts = [
            f"{Estimate(**found['iqm'][head][name])}, n = {len(one)}" if one else "none" for name, one in scores.items()
        ]
        drop = str(Estimate(**found["drop"][head])) if head in found["drop"] else "none"
        rows.append([NAMES[head], *texts, drop])
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


def mean_curve(runs: Sequence[Rows]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Average the training returns of n runs.

    Returns:
        Steps, means and standard errors (T,), at those steps at which every run has a return. The errors of a
        single run are zero.
    """
    returns = [{row["global_step"]: row["charts/episodic_return"] for row in rows} for rows in runs]
    finite = [{step for step, value in one.items() if np.isfinite(value)} for one in returns]
    steps = sorted(set.intersection(*finite))
    values = np.array([[one[step] for step in steps] for one in returns])  # (n, T)
    errors = values.std(axis=0, ddof=1) / np.sqrt(len(runs)) if len(runs) > 1 else np.zeros(len(steps))
    return np.array(steps), values.mean(axis=0), errors


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
        _draw(axes, panel)
    for axes in grid[len(panels) :]:
        axes.remove()
    for axes in grid[: len(panels) : columns]:
        axes.set_ylabel("return of training episodes")
    handles = {line.get_label(): line for axes in grid[: len(panels)] for line in axes.get_lines()}
    ceilings = dict.fromkeys(panel.ceiling for panel in panels)
    labels = [label for label in (*NAMES.values(), *ceilings, "random") if label in handles]
    figure.legend([handles[label] for label in labels], labels, loc="outside lower center", ncols=6, frameon=False)
    write_png(path, figure)


def _draw(axes: Any, panel: Panel) -> None:
    from matplotlib.ticker import EngFormatter

    axes.axhline(panel.oracle, color="0.35", linestyle="--", linewidth=1, label=panel.ceiling)
    axes.axhline(panel.random, color="0.35", linestyle=":", linewidth=1, label="random")
    for number, (head, runs) in enumerate(panel.curves.items()):
        steps, means, errors = mean_curve(runs)
        point = "o" if len(steps) == 1 else None  # of which there is no line
        look: dict[str, Any] = {"color": COLOURS[head], "linestyle": STYLES[number % len(STYLES)], "marker": point}
        axes.plot(steps, means, **look, linewidth=1.4, label=NAMES[head])
        axes.fill_between(steps, means - errors, means + errors, color=COLOURS[head], alpha=0.25, linewidth=0)
    axes.set_title(panel.title, fontsize=10)
    axes.set_xlabel("environment steps")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(alpha=0.25)
    axes.set_xlim(left=0)
