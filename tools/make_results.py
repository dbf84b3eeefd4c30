"""Make the figures and tables of docs/results.md from docs/data/*.jsonl: python tools/make_results.py [DOCS].

Each file NAME.jsonl of tools/collect_runs.py gives `images/NAME_scores.png` (score against SNR),
`images/NAME_curves.png` (training) and the text between `<!-- table NAME -->` and `<!-- end -->` in results.md. Runs
are grouped by the settings in which the runs of a file differ; each game needs a file of its own. What is missing is
listed below the tables and printed.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from noisy_envs.training.files import write_atomically
from noisy_envs.training.plots import HEAD_NAMES, plot_levels, plot_score_curves
from noisy_envs.training.run_lines import level_of, read_lines
from noisy_envs.training.statistics import Estimate, estimate, probability_of_improvement

REFERENCE = "adapool"  # the head that is compared with each other one
NONE = Estimate(np.nan, np.nan, np.nan)
BLOCK = re.compile(r"(<!-- table (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
Run = dict[str, Any]
Cells = dict[str, dict[int, Run]]  # by noise level and seed


class Experiment(NamedTuple):
    """The runs of a file, grouped by the settings in which they differ."""

    common: str  # settings of all runs
    snrs: dict[str, float]  # by noise level, decreasing
    groups: dict[str, dict[str, Cells]]  # by the other settings and head


def by_actions(runs: Sequence[Run]) -> list[Run]:
    """Return each run once for each of its evaluations, with its score and the actions as a setting."""
    return [
        {**run, "score": score, "settings": {**run["settings"], "actions": actions}}
        for run in runs
        for actions, (score, *_) in run["scores"].items()
    ]


def group(runs: Sequence[Run]) -> Experiment:
    """Group runs by the settings in which they differ."""
    settings = [
        {"game": re.split("[ -]", level_of(run))[0], "preset": run["preset"], **run["settings"]} for run in runs
    ]
    names = list(dict.fromkeys(name for own in settings for name in own))
    varied = [name for name in names if len({repr(own.get(name)) for own in settings}) > 1]
    common = ", ".join(f"{name} {settings[0][name]}" for name in names if name not in varied)
    snrs = {level_of(run): run["snr"] for run in sorted(runs, key=lambda run: (-run["snr"], level_of(run)))}
    heads = sorted({run["agent"] for run in runs}, key=lambda head: [*HEAD_NAMES, head].index(head))
    groups: dict[str, dict[str, Cells]] = {}
    for own, run in zip(settings, runs, strict=True):
        label = ", ".join(f"{name} {own[name]}" for name in varied if name in own) or "by default" * bool(varied)
        cells = groups.setdefault(label, {head: {level: {} for level in snrs} for head in heads})
        cells[run["agent"]][level_of(run)][run["seed"]] = run
    return Experiment(common, snrs, dict(sorted(groups.items())))


def scores_of(cells: Cells, level: str) -> list[float]:
    """Return the scores of a noise level's runs."""
    return [run["score"] for run in cells[level].values()]


def score_cell(heads: dict[str, Cells], head: str, levels: Sequence[str]) -> str:
    """Return a head's interquartile mean at noise levels, and the number of runs."""
    strata = [scores_of(heads[head], level) for level in levels]
    return f"{estimate(*strata)}, n = {sum(map(len, strata))}" if all(strata) else "none"


def improvement_cell(heads: dict[str, Cells], head: str, levels: Sequence[str]) -> str:
    """Return the probability of improvement of REFERENCE over a head at noise levels."""
    strata = [(scores_of(heads[REFERENCE], level), scores_of(heads[head], level)) for level in levels]
    return str(probability_of_improvement(*strata)) if all(map(all, strata)) else "none"


def format_table(
    experiment: Experiment,
    corner: str,
    heads: Sequence[str],
    cell: Callable[[dict[str, Cells], str, Sequence[str]], str],
) -> str:
    """Format a table in Markdown: a row for each setting and head, a column for each noise level and for all."""
    levels, several = list(experiment.snrs), len(experiment.groups) > 1
    columns = [[level] for level in levels] + ([levels] if levels[1:] else [])
    names = [*(f"{level}, SNR {snr:.3g}" for level, snr in experiment.snrs.items()), "all levels"][: len(columns)]
    rows = [["settings"] * several + [corner, *names]]
    rows.append(["---"] * len(rows[0]))
    for label, cells in experiment.groups.items():
        for head in heads:
            texts = [cell(cells, head, column) for column in columns]
            rows.append([label] * several + [HEAD_NAMES.get(head, head), *texts])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def find_missing(experiment: Experiment) -> list[str]:
    """Return what a group of runs lacks: noise levels, heads, or seeds that others of the group have."""
    lines: list[tuple[str, ...]] = []
    for label, heads in experiment.groups.items():
        seeds = {seed for cells in heads.values() for runs in cells.values() for seed in runs}
        for level in experiment.snrs:
            if not any(cells[level] for cells in heads.values()):
                lines.append((label, level, "all runs"))
                continue
            for head, cells in heads.items():
                lacking = ", ".join(map(str, sorted(seeds - cells[level].keys())))
                what = f"seeds {lacking}" if cells[level] else "all runs"
                lines += [(label, level, HEAD_NAMES.get(head, head), what)] * bool(lacking)
    return [", ".join(filter(None, line)) for line in lines]


def make_tables(runs: Sequence[Run]) -> str:
    """Return the tables of a file's runs, and what is missing, in Markdown."""
    experiment = group(by_actions(runs))
    heads = list(next(iter(experiment.groups.values())))
    others = [head for head in heads if head != REFERENCE]
    parts = [
        f"Settings of all runs: {experiment.common}. Normalised scores: interquartile means over n runs, with 95% "
        "intervals (stratified bootstrap).",
        format_table(experiment, "pooling", heads, score_cell),
    ]
    if REFERENCE in heads and others:
        name = HEAD_NAMES[REFERENCE]
        parts += [
            f"Probability of improvement: how likely a run with {name} scores higher than one with the other pooling.",
            format_table(experiment, f"{name} over", others, improvement_cell),
        ]
    missing = find_missing(experiment)
    if missing:
        parts += ["Missing:", "\n".join(f"* {line}" for line in missing)]
    return "\n\n".join(parts)


def fill(page: str, tables: dict[str, str]) -> str:
    """Return a page with the tables between their marks.

    Raises:
        ValueError: the page marks a table of an unknown name.
    """
    unknown = {name for _, name, _ in BLOCK.findall(page)} - tables.keys()
    if unknown:
        raise ValueError(f"table {', '.join(sorted(unknown))}: expected a file of this name in docs/data")
    return BLOCK.sub(lambda match: f"{match[1]}\n{tables[match[2]]}\n\n{match[3]}", page)


def digest(path: Path) -> str:
    """Return what a figure holds to tell of which file it is."""
    return f"{path.name} {hashlib.sha256(path.read_text(encoding='utf-8').encode()).hexdigest()[:16]}"


def draw(runs: Sequence[Run], stem: Path, source: str) -> None:
    """Draw the figures of a file's runs."""
    experiment = group(by_actions(runs))
    panels = {
        label: {
            head: [estimate(scores) if (scores := scores_of(cells, level)) else NONE for level in experiment.snrs]
            for head, cells in heads.items()
        }
        for label, heads in experiment.groups.items()
    }
    plot_levels(stem.with_name(f"{stem.name}_scores.png"), panels, list(experiment.snrs.values()), source)
    experiment = group(runs)
    curves, steps = {}, []
    for label, heads in experiment.groups.items():
        for level in experiment.snrs:
            found = {head: list(cells[level].values()) for head, cells in heads.items() if cells[level]}
            arrays = {head: np.array([run["curve"] for run in some], float) for head, some in found.items()}
            curves[f"{level}\n{label}"] = arrays
            steps.append(max((run["steps"] for some in found.values() for run in some), default=1))
    plot_score_curves(stem.with_name(f"{stem.name}_curves.png"), curves, len(experiment.snrs), steps, source)


def main(argv: Sequence[str]) -> None:
    """Make all figures and tables, and print what is missing."""
    docs = Path(argv[0]) if argv else Path(__file__).parents[1] / "docs"
    page, tables = docs / "results.md", {}
    before = page.read_text(encoding="utf-8")
    for path in sorted((docs / "data").glob("*.jsonl")):
        runs = list(read_lines(path).values())
        tables[path.stem] = make_tables(runs)
        draw(runs, docs / "images" / path.stem, digest(path))
        missing = find_missing(group(by_actions(runs)))
        missing += [f"a table in {page}"] * (f"<!-- table {path.stem} -->" not in before)
        print("\n".join([f"{path}: {len(runs)} runs", *(f"  missing: {line}" for line in missing)]))
    write_atomically(page, fill(before, tables))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
