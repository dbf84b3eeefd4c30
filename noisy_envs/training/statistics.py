"""Statistics over runs: interquartile means and bootstrap intervals, as by Agarwal et al. 2021 (rliable)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

MAX_DRAWS = 2**22  # numbers that the bootstrap draws at a time, 32 MiB


def bootstrap_interval(
    values: np.ndarray, seed: int, level: float = 0.95, resamples: int = 2000
) -> tuple[float, float]:
    """Return the bootstrap confidence interval of the mean of values (n,); NaN for a single value.

    Raises:
        ValueError: there is no value, or one that is not finite.
    """
    if np.ndim(values) != 1 or not len(values) or not np.isfinite(values).all():
        bad = int(np.size(values) - np.isfinite(values).sum())
        raise ValueError(f"values: expected shape (n,), all finite, got {np.shape(values)}, {bad} not finite")
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
Rows = list[dict[str, float]]  # of `metrics.csv`


def iqm(values: np.ndarray) -> np.ndarray:
    """Return the interquartile mean over the last axis, (…, n) -> (…): floor(n / 4) values are cut off at each end.

    For three or fewer values it is the mean.
    """
    count = values.shape[-1]
    middle: np.ndarray = np.sort(values, axis=-1)[..., count // 4 : count - count // 4].mean(axis=-1)
    return middle


class Estimate(NamedTuple):
    """An interquartile mean, a difference of two, or a probability, with a 95% interval, NaN below three seeds."""

    value: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        """Format the estimate as a cell of a table, with three decimals or as `spec` says, such as ".2f"."""
        value, low, high = (format(x, spec or ".3f") for x in self)
        return f"{value} ({low} to {high})" if np.isfinite(self.low) else value

    def __str__(self) -> str:
        """Format the estimate with three decimals."""
        return format(self)


def resample(scores: Sequence[float] | np.ndarray, seed: int) -> np.ndarray:
    """Return scores (R, n, …) drawn with replacement from scores (n, …)."""
    index = np.random.default_rng(seed).integers(0, len(scores), (RESAMPLES, len(scores)))
    return np.asarray(scores)[index]


def resample_counts(n: int, seed: int) -> np.ndarray:
    """Return how often each of n runs is drawn in a resample of n runs with replacement: (R, n)."""
    return np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), RESAMPLES)


def estimate(*strata: Sequence[float]) -> Estimate:
    """Estimate the interquartile mean of the scores of n >= 1 seeds, or of such scores at several noise levels.

    The scores of all strata, such as noise levels, are pooled; each stratum is resampled on its own (stratified
    bootstrap).

    Intervals of few seeds are too narrow: for normal scores of 2, 3, 5 and 10 seeds, 95% intervals hold the true value
    in 50, 76, 89 and 93% of cases (2,000 simulations). For two seeds none is given.
    """
    samples = np.concatenate([resample(scores, seed) for seed, scores in enumerate(strata)], axis=1)
    return _estimate(float(iqm(np.concatenate(strata))), iqm(samples), min(map(len, strata)))


def difference(*strata: tuple[Sequence[float], Sequence[float]]) -> Estimate:
    """Estimate the interquartile mean of scores of one setting minus that of another.

    The scores of all strata, such as noise levels, are pooled. Runs of both settings are resampled independently in
    each stratum.

    Args:
        strata: scores of the first and of the second setting, (n,) and (m,), in each stratum.
    """
    sides = list(zip(*strata, strict=True))
    values = [float(iqm(np.concatenate(side))) for side in sides]
    samples = [
        iqm(np.concatenate([resample(scores, 2 * i + second) for i, scores in enumerate(side)], axis=1))
        for second, side in enumerate(sides)
    ]
    return _estimate(values[0] - values[1], samples[0] - samples[1], min(len(x) for pair in strata for x in pair))


def paired_difference(first: Sequence[float], second: Sequence[float]) -> Estimate:
    """Estimate the first interquartile mean minus the second, of scores of the same n seeds in the same order.

    Seeds are resampled, each with both of its scores, so what a seed does to both settings leaves the interval narrow.

    Raises:
        ValueError: the numbers of scores differ.
    """
    pairs = np.array(list(zip(first, second, strict=True)))  # (n, 2)
    value, samples = iqm(pairs.T), iqm(resample(pairs, 0).swapaxes(1, 2))  # (2,), (R, 2)
    return _estimate(float(value[0] - value[1]), samples[:, 0] - samples[:, 1], len(pairs))


def probability_of_improvement(*strata: tuple[Sequence[float], Sequence[float]]) -> Estimate:
    """Estimate how likely a run of one setting scores higher than a run of another; a tie counts half.

    As in rliable, this is the mean over all pairs of runs (Mann-Whitney) in each stratum, such as a noise level, and
    then over strata. Runs of both settings are resampled independently in each stratum.

    Args:
        strata: scores of the first and of the second setting, (n,) and (m,), in each stratum.
    """
    values, samples = [], []
    for number, (first, second) in enumerate(strata):
        better = (1 + np.sign(np.subtract.outer(first, second))) / 2  # (n, m)
        counts = resample_counts(len(first), 2 * number), resample_counts(len(second), 2 * number + 1)
        values.append(better.mean())
        samples.append((counts[0] @ better * counts[1]).sum(axis=1) / better.size)
    fewest = min(len(scores) for pair in strata for scores in pair)
    return _estimate(float(np.mean(values)), np.mean(samples, axis=0), fewest)


def _estimate(value: float, samples: np.ndarray, seeds: int) -> Estimate:
    low, high = np.quantile(samples, (0.025, 0.975)) if seeds > 2 else (np.nan, np.nan)
    return Estimate(value, float(low), float(high))


def mean_curve(runs: Sequence[Rows]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Average the training returns of n runs.

    Returns:
        Steps, means and standard errors (T,) at the steps at which every run has a return; for a single run the errors
        are zero.
    """
    returns = [{row["global_step"]: row["charts/episodic_return"] for row in rows} for rows in runs]
    finite = [{step for step, value in run.items() if np.isfinite(value)} for run in returns]
    steps = sorted(set.intersection(*finite))
    values = np.array([[run[step] for step in steps] for run in returns])  # (n, T)
    errors = values.std(axis=0, ddof=1) / np.sqrt(len(runs)) if len(runs) > 1 else np.zeros(len(steps))
    return np.array(steps), values.mean(axis=0), errors


def mean_interval(curves: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return means and ends of their bootstrapped 95% intervals, (T,) each, of the curves of n runs (n, T).

    Where a run has no value (NaN), there are none; below three runs there are no intervals.
    """
    count = len(curves)
    samples = resample_counts(count, 0) @ curves / count  # (R, T)
    low, high = np.quantile(samples, (0.025, 0.975), axis=0) if count > 2 else np.full((2, curves.shape[1]), np.nan)
    return curves.mean(axis=0), low, high
