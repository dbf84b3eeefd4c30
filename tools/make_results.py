"""Make the figures and tables of docs/results.md from docs/data/*.jsonl: python tools/make_results.py [DOCS].

A file NAME.jsonl of tools/collect_runs.py gives the figures that results.md shows, `images/NAME_scores.png` (score
against SNR) and `images/NAME_curves.png` (training), and the tables between `<!-- table NAME KIND -->` and
`<!-- end -->`. Runs are grouped by the settings in which the runs of a file differ. Kinds:

  best         scores by the best actions
  sampled      scores by sampled actions: of an evaluation, or else of the last tenth of training
  improvement  how likely AdaPool scores higher than each other head, by the best actions
  difference   interquartile mean of AdaPool minus that of each other head, by the best actions
  summary      over all noise levels: scores of all heads, runs that broke down, updates with a KL divergence above 1,
               and how likely AdaPool scores higher than each other head
  missing      runs that a group lacks
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from noisy_envs.training.files import write_atomically
from noisy_envs.training.plots import HEAD_NAMES, plot_levels, plot_score_curves
from noisy_envs.training.run_lines import level_of, read_lines
from noisy_envs.training.statistics import Estimate, difference, estimate, probability_of_improvement

REFERENCE = "adapool"  # the head that is compared with each other one
QUERY_VECTOR = "query_vector"  # the setting by which "adapool" gives them to that head alone
TITLES = {"none": "no vectors", "adapool": "vectors in AdaPool alone", "all": "vectors in all heads"}  # its values
NO_CHANGE = "no change"  # the label of runs with no setting but those of all runs
NONE = Estimate(np.nan, np.nan, np.nan)
TENTH = 4  # of the 40 bins of a curve
COMPARISONS = {  # by kind of table: corner, statistic
    "improvement": (f"{HEAD_NAMES[REFERENCE]} over", probability_of_improvement),
    "difference": (f"{HEAD_NAMES[REFERENCE]} minus", difference),
}
FALL = 0.1  # from its best training score, with which a run counts as broken down
BLOCK = re.compile(r"(<!-- table (\S+) (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
Run = dict[str, Any]
Cells = dict[str, dict[int, Run]]  # by noise level and seed


class Experiment(NamedTuple):
    """The runs of a file, grouped by the settings in which they differ."""

    common: str  # settings of all runs
    snrs: dict[str, float]  # by noise level, decreasing
    groups: dict[str, dict[str, Cells]]  # by the other settings and head


def by_actions(runs: Sequence[Run], actions: str) -> list[Run]:
    """Return the runs that have a score by "best" or by "sampled" actions, with that score."""
    found = []
    for run in runs:
        scores = {name: value for name, (value, *_) in run["scores"].items()}
        late = [x for x in run["curve"][-TENTH:] if x is not None]
        if late:  # training samples its actions
            scores.setdefault("sampled", float(np.mean(late)))
        if actions in scores:
            found.append({**run, "score": scores[actions]})
    return found


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
        label = ", ".join(f"{name} {own[name]}" for name in varied if name in own) or NO_CHANGE * bool(varied)
        cells = groups.setdefault(label, {head: {level: {} for level in snrs} for head in heads})
        cells[run["agent"]][level_of(run)][run["seed"]] = run
    return Experiment(common, snrs, dict(sorted(groups.items(), key=place)))


def place(group: tuple[str, Any]) -> tuple[int, str]:
    """Return what groups are sorted by: the number of settings in the label, then the label, in the order of TITLES."""
    label, _ = group
    for number, value in enumerate(TITLES):
        label = label.replace(f"{QUERY_VECTOR} {value}", f"{QUERY_VECTOR} {number}")
    return (0 if label == NO_CHANGE else 1 + label.count(",")), label


def add_one_head(experiment: Experiment) -> Experiment:
    """Add the settings in which REFERENCE alone has query vectors: its runs and those of the other heads are there."""
    groups = {}
    for label, heads in experiment.groups.items():
        without = experiment.groups.get(label.replace(f"{QUERY_VECTOR} all", f"{QUERY_VECTOR} none"), heads)
        if without is not heads and REFERENCE in heads:
            one = {REFERENCE: heads[REFERENCE]}
            groups[label.replace(f"{QUERY_VECTOR} all", f"{QUERY_VECTOR} {REFERENCE}")] = without | one
    return experiment._replace(groups=dict(sorted((groups | experiment.groups).items(), key=place)))


def title_of(label: str) -> str:
    """Return how a page names a label."""
    for value, title in TITLES.items():
        label = label.replace(f"{QUERY_VECTOR} {value}", title)
    return label


def scores_of(cells: Cells, level: str) -> list[float]:
    """Return the scores of a noise level's runs."""
    return [run["score"] for run in cells[level].values()]


def score_cell(heads: dict[str, Cells], head: str, levels: Sequence[str]) -> str:
    """Return a head's interquartile mean at those noise levels that have runs."""
    strata = [scores for level in levels if (scores := scores_of(heads[head], level))]
    return describe(estimate(*strata), len(strata), len(levels)) if strata else "not evaluated"


def compare_cell(statistic: Callable[..., Estimate], heads: dict[str, Cells], head: str, levels: Sequence[str]) -> str:
    """Return a statistic of the scores of REFERENCE and a head at those noise levels that have runs of both."""
    pairs = [(scores_of(heads[REFERENCE], level), scores_of(heads[head], level)) for level in levels]
    strata = [pair for pair in pairs if all(pair)]
    return describe(statistic(*strata), len(strata), len(levels)) if strata else "not evaluated"


def describe(value: Estimate, found: int, asked: int) -> str:
    """Format an estimate over noise levels, and say if not all of them have runs."""
    return f"{value:.2f}" + f", {found} of {asked} levels" * (found < asked)


def level_columns(experiment: Experiment) -> list[tuple[str, list[str]]]:
    """Return titles and noise levels of a table's columns: each level, and all of them together."""
    columns = []
    for level, snr in experiment.snrs.items():
        size = level.partition("-")[2] or level  # without the game, which is that of all runs
        columns.append((f"{size}, SNR {snr:.3g}", [level]))
    return [*columns, ("all levels", list(experiment.snrs))] if columns[1:] else columns


def format_table(
    experiment: Experiment,
    corner: str,
    heads: Sequence[str],
    cell: Callable[[dict[str, Cells], str, Sequence[str]], str],
) -> str:
    """Format a table in Markdown: a row for each setting and head, a column for each noise level and for all."""
    columns = level_columns(experiment)
    rows = [[corner, *(title for title, _ in columns)]]
    for label, cells in experiment.groups.items():
        for head in heads:
            texts = [cell(cells, head, levels) for _, levels in columns]
            rows.append([title_of(label), HEAD_NAMES.get(head, head), *texts])
    if len(experiment.groups) > 1:
        rows[0].insert(0, "settings")
    else:
        rows[1:] = [row[1:] for row in rows[1:]]
    return to_markdown(rows)


def format_summary(experiment: Experiment, others: Sequence[str]) -> str:
    """Format a table in Markdown of all heads and noise levels together, a row for each setting."""
    levels = list(experiment.snrs)
    leads = [f"{HEAD_NAMES[REFERENCE]} over {HEAD_NAMES.get(head, head)}" for head in others]
    rows = [["settings", "score", "broke down", "KL > 1", *leads]]
    for label, heads in experiment.groups.items():
        runs = [run for cells in heads.values() for level in levels for run in cells[level].values()]
        strata = [scores for cells in heads.values() for level in levels if (scores := scores_of(cells, level))]
        broken = sum(run["best"] - run["final"] > FALL for run in runs)
        numbers = f"{broken} of {len(runs)}", f"{np.mean([run['kl_above_1'] for run in runs]):.2%}"
        cells = (compare_cell(probability_of_improvement, heads, head, levels) for head in others)
        rows.append([title_of(label), f"{estimate(*strata):.2f}", *numbers, *cells])
    return to_markdown(rows)


def to_markdown(rows: list[list[str]]) -> str:
    """Format rows, of which the first is the head of the table."""
    rows = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def find_missing(experiment: Experiment) -> list[str]:
    """Return what a group of runs lacks: noise levels, heads, or seeds that others of the group have."""
    lines: list[tuple[str, ...]] = []
    for label, heads in experiment.groups.items():
        seeds = {seed for cells in heads.values() for runs in cells.values() for seed in runs}
        for level in experiment.snrs:
            if not any(cells[level] for cells in heads.values()):
                lines.append((title_of(label), level, "all runs"))
                continue
            for head, cells in heads.items():
                lacking = ", ".join(map(str, sorted(seeds - cells[level].keys())))
                what = f"seeds {lacking}" if cells[level] else "all runs"
                lines += [(title_of(label), level, HEAD_NAMES.get(head, head), what)] * bool(lacking)
    return [", ".join(filter(None, line)) for line in lines]


def make_table(runs: Sequence[Run], kind: str) -> str:
    """Return a table of a file's runs, in Markdown.

    Raises:
        ValueError: there is no such kind of table, or no run has such a score.
    """
    runs = by_actions(runs, "sampled" if kind == "sampled" else "best")
    if not runs:
        raise ValueError(f"table kind {kind!r}: expected runs with a score by these actions")
    experiment = group(runs)
    heads = list(next(iter(experiment.groups.values())))
    if kind in ("best", "sampled"):
        table = format_table(experiment, "pooling", heads, score_cell)
        counts = {len(runs) for own in experiment.groups.values() for cells in own.values() for runs in cells.values()}
        numbers = f"{min(counts - {0})} to {max(counts)}" if len(counts - {0}) > 1 else str(max(counts))
        return f"All runs: {experiment.common}; {numbers} seeds.\n\n{table}"
    others = [head for head in heads if head != REFERENCE]
    if kind in COMPARISONS:
        corner, statistic = COMPARISONS[kind]
        return format_table(add_one_head(experiment), corner, others, partial(compare_cell, statistic))
    if kind == "summary":
        return format_summary(experiment, others)
    if kind == "missing":
        return "\n".join(f"* {line}" for line in find_missing(experiment)) or "Nothing is missing."
    raise ValueError(f"table kind {kind!r}: expected best, sampled, {', '.join(COMPARISONS)}, summary or missing")


def fill(page: str, files: dict[str, list[Run]]) -> str:
    """Return a page with the tables between their marks.

    Args:
        page: text of the page.
        files: the runs of each file, by its name.

    Raises:
        ValueError: the page marks a table of an unknown file or kind.
    """

    def table(match: re.Match[str]) -> str:
        start, name, kind, end = match.groups()
        if name not in files:
            raise ValueError(f"table {name}: expected a file of this name in docs/data")
        return f"{start}\n{make_table(files[name], kind)}\n\n{end}"

    return BLOCK.sub(table, page)


def digest(path: Path) -> str:
    """Return the name and the hash of a file, which a figure stores as its source."""
    return f"{path.name} {hashlib.sha256(path.read_text(encoding='utf-8').encode()).hexdigest()[:16]}"


def draw_scores(runs: Sequence[Run], path: Path, source: str) -> None:
    """Draw scores against SNR."""
    experiment = add_one_head(group(by_actions(runs, "best")))
    panels = {
        title_of(label): {
            head: [estimate(scores) if (scores := scores_of(cells, level)) else NONE for level in experiment.snrs]
            for head, cells in heads.items()
        }
        for label, heads in experiment.groups.items()
    }
    plot_levels(path, panels, list(experiment.snrs.values()), source)


def draw_curves(runs: Sequence[Run], path: Path, source: str) -> None:
    """Draw scores in training."""
    experiment = group(runs)
    curves, steps = {}, []
    for label, heads in experiment.groups.items():
        for level in experiment.snrs:
            found = {head: list(cells[level].values()) for head, cells in heads.items() if cells[level]}
            arrays = {head: np.array([run["curve"] for run in some], float) for head, some in found.items()}
            curves[f"{level}\n{title_of(label)}"] = arrays
            steps.append(max((run["steps"] for some in found.values() for run in some), default=1))
    plot_score_curves(path, curves, len(experiment.snrs), steps, source)


def main(argv: Sequence[str]) -> None:
    """Make all figures and tables, and print what is missing."""
    docs = Path(argv[0]) if argv else Path(__file__).parents[1] / "docs"
    page, files = docs / "results.md", {}
    text = page.read_text(encoding="utf-8")
    for path in sorted((docs / "data").glob("*.jsonl")):
        runs = files[path.stem] = list(read_lines(path).values())
        for kind, draw in (("scores", draw_scores), ("curves", draw_curves)):
            name = f"images/{path.stem}_{kind}.png"
            if name in text:
                draw(runs, docs / name, digest(path))
        missing = find_missing(group(runs)) + [f"a table in {page}"] * (f"<!-- table {path.stem} " not in text)
        print("\n".join([f"{path}: {len(runs)} runs", *(f"  missing: {line}" for line in missing)]))
    write_atomically(page, fill(text, files))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
