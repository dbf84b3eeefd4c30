"""Statistics over runs: interquartile means and bootstrapped intervals (Agarwal et al. 2021, the library rliable)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

MAX_DRAWS = 2**22  # numbers that a bootstrap draws at a time, 32 MiB


def bootstrap_interval(
    values: np.ndarray, seed: int, level: float = 0.95, resamples: int = 2000
) -> tuple[float, float]:
    """Return the bootstrapped confidence interval of the mean of values (n,).

    A single value tells nothing of its spread: both ends are NaN.

    Raises:
        ValueError: there is no value, or one that is not finite.
    """
    if np.ndim(values) != 1 or not len(values) or not np.isfinite(values).all():
        bad = int(np.size(values) - np.isfinite(values).sum())
        raise ValueError(f"values must be (n,), n from 1, and finite, got {np.shape(values)}, {bad} of them not finite")
    if len(values) == 1:
        return np.nan, np.nan
    generator, rows = np.random.default_rng(seed), max(1, MAX_DRAWS // len(values))
    means = [
        values[generator.integers(0, len(values), (min(rows, resamples - done), len(values)))].mean(axis=1)
        for done in range(0, resamples, rows)
    ]
    low, high = np.quantile(np.concatenate(means), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


RESAMPLES = 10_000
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
