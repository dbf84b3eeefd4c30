"""Plot the README's figure from the tables in docs/results.md: python tools/plot_noise.py [OUT.png].

The figure shows each pooling head's score without noise and with 28 noise tokens, in SimpleTag and CartPole.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from noisy_envs.training.plots import COLOURS, HEAD_NAMES, write_png

ROOT = Path(__file__).parents[1]
TABLES = {  # first header cell of the table -> title, label of score 1
    "SimpleTag": ("SimpleTag, 4 million steps", "oracle"),
    "head": ("CartPole, 65,536 steps", "solved"),
}
CELL = re.compile(r"([−\d.]+) \(([−\d.]+) to ([−\d.]+)\)")  # mean (low to high)


def read_scores(page: str, first_cell: str) -> list[list[tuple[float, ...]]]:
    """Return (mean, low, high) for each head and column of the table whose header starts with `first_cell`."""
    _, _, rows = page.partition(f"| {first_cell} |")
    scores = []
    for name in HEAD_NAMES.values():
        row = re.search(rf"^\| {name} \|(.*)$", rows, re.MULTILINE)
        assert row is not None, name
        scores.append([tuple(float(x.replace("−", "-")) for x in cell) for cell in CELL.findall(row[1])])
    return scores


def main() -> None:
    """Read the scores and write the figure."""
    from matplotlib.figure import Figure

    out = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images" / "noise.png"
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    figure = Figure(figsize=(8, 3.3), dpi=150, layout="constrained")
    for axes, (first_cell, (title, best_label)) in zip(figure.subplots(1, 2, sharey=True), TABLES.items(), strict=True):
        for level, style in ((1, "--"), (0, ":")):
            axes.axhline(level, color="0.5", linestyle=style, linewidth=1)
            text = best_label if level else "random policy"
            axes.annotate(text, (0.5, level), (0, -3), textcoords="offset points", va="top", ha="center")
        scores = zip(COLOURS.values(), read_scores(page, first_cell), strict=True)
        for x, (colour, (clean, noisy, *_)) in enumerate(scores):
            for place, (mean, low, high), face in ((x - 0.13, clean, "white"), (x + 0.13, noisy, colour)):
                axes.errorbar(
                    place, mean, [[mean - low], [high - mean]], fmt="o", color=colour, markerfacecolor=face,
                    markersize=7, capsize=3, elinewidth=1.5,
                )  # fmt: skip
        axes.set(title=title, xlim=(-0.5, 3.5), ylim=(-0.15, 1.2), xticks=range(4), xticklabels=HEAD_NAMES.values())
        axes.grid(axis="y", alpha=0.2)
    figure.axes[0].set_ylabel("normalised score")
    for face, label in (("white", "no noise"), ("0.3", "28 noise tokens")):
        figure.axes[0].plot([], [], "o", color="0.3", markerfacecolor=face, markersize=7, label=label)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    write_png(out, figure)


if __name__ == "__main__":
    main()
