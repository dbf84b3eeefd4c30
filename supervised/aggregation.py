"""Does the pooling head matter if the encoder can aggregate? Each head learns the maximum, mean and minimum of a set.

    python supervised/aggregation.py                                  # ten minutes on a CPU: N = 32, two layers
    python supervised/aggregation.py --preset paper --device cuda     # N = 128, 12 layers, 100 epochs, 5 folds

Appendix "Aggregation Function Approximation", Table 2. The targets are the maximum, mean and minimum of each feature;
the error is the mean squared error. OUT gets `table.md` and `results.json`; `experiment.py` describes its other files.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import experiment
import report
from set_task import PAPER, SetArgs, SetTask, all_sets, check, has_paper_sizes
from torch import Tensor


@dataclass(kw_only=True)
class Args(SetArgs):
    """Settings of the aggregation experiment."""

    out: Path = Path("runs/aggregation")
    """folder of the runs and the table"""
    targets: tuple[str, ...] = ("max", "mean", "min")
    """functions to learn"""
    epochs: int = 15
    """passes over the training set"""
    seeds: tuple[int, ...] = (1,)
    """seeds of the initial weights, the order of samples and dropout"""


TARGETS: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda sets: sets.amax(dim=1),
    "mean": lambda sets: sets.mean(dim=1),
    "min": lambda sets: sets.amin(dim=1),
}
PAPER_ERROR = {
    "maxpool": {"max": 0.000, "mean": 0.026, "min": 0.297},
    "avgpool": {"max": 0.003, "mean": 0.000, "min": 0.003},
    "clstoken": {"max": 0.011, "mean": 0.008, "min": 0.011},
    "adapool": {"max": 0.002, "mean": 0.000, "min": 0.002},
}


def make_task(args: Args, column: str) -> SetTask:
    """Return the task of a target."""
    return SetTask(args, TARGETS[column])


def main(argv: Sequence[str]) -> None:
    """Run what is missing; write the table."""
    args = experiment.parse(Args, argv, {"fast": {}, "paper": PAPER}, __doc__)
    check(args)
    experiment.check_not_empty(args, "targets")
    for target in args.targets:
        if target not in TARGETS:
            raise ValueError(f"targets={target!r}: expected one of {', '.join(TARGETS)}")
    all_sets(args)  # write the file before several runs need it
    columns = list(dict.fromkeys(args.targets))
    summaries = experiment.run_all(args, columns, make_task)
    text = report.format_table(
        report.scores(summaries), {}, PAPER_ERROR if has_paper_sizes(args) else {}, columns, digits=4
    )
    report.write(args, "aggregation.py", "Mean squared error of the aggregation task", text, summaries)
    print(f"{text}\nsee table.md and results.json in {args.out}")


if __name__ == "__main__":
    experiment.guard(main, sys.argv[1:])
