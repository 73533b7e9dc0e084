"""Intervals for means over seeds and samples, by resampling both."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri, stdtrit

_Array = npt.NDArray[np.float64]


def resampled_means(
    values: npt.ArrayLike, *, resamples: int = 4000, seed: int = 0
) -> _Array:
    """Means of several groups under resampled seeds and samples.

    All groups saw the same samples, so that a resample holds the same samples in each;
    seeds are drawn anew for each group. Of n seeds, and of n samples, n − 1 are drawn,
    with replacement: then the variance of the means is the unbiased s²/n, where n draws
    give (n − 1)/n of it, two thirds for three seeds (Rao & Wu, 1988). A factor with one
    entry adds no spread.

    Args:
        values: ``(groups, seeds, samples)``; NaN where there is no value.
        resamples: how many.
        seed: of the resampling.

    Returns:
        ``(groups, resamples)``; NaN where a resample has no value.

    Raises:
        ValueError: if ``values`` has another number of dimensions or is empty.

    Example:
        >>> draws = resampled_means(np.zeros((2, 3, 4)) + [[[1.0]], [[5.0]]])
        >>> draws.shape, float(draws[0].max()), float(draws[1].min())
        ((2, 4000), 1.0, 5.0)
    """
    data = np.asarray(values, dtype=np.float64)
    if data.ndim != 3 or data.size == 0:
        raise ValueError(
            f"values must be (groups, seeds, samples) and not empty, got shape "
            f"{data.shape}."
        )
    groups, seeds, samples = data.shape
    random = np.random.default_rng(seed)
    of_samples = _counts(random, samples, (resamples,))
    of_seeds = _counts(random, seeds, (groups, resamples))
    known = ~np.isnan(data)
    filled = np.where(known, data, 0.0)
    pick = "gbs,bx,gsx->gb"
    total = np.einsum(pick, of_seeds, of_samples, filled, optimize=True)
    weight = np.einsum(
        pick, of_seeds, of_samples, known.astype(np.float64), optimize=True
    )
    means: _Array = np.where(
        weight > 0, total / np.where(weight > 0, weight, 1), np.nan
    )
    return means


def widened_interval(
    draws: _Array, centre: float, level: float, degrees: int
) -> tuple[float, float]:
    """The central part of resampled values, widened as Student's t is for few units.

    Percentiles of a bootstrap take the spread as known. It was estimated from
    ``degrees`` + 1 units, so both ends move away from the centre by the ratio of the
    quantiles of t and of the normal distribution.

    Args:
        draws: ``(resamples,)``.
        centre: the value of which they are resamples.
        level: coverage, in (0, 1).
        degrees: of freedom, at least 1; 0 for no interval.

    Returns:
        Both ends; NaN where half of the draws or more are.

    Example:
        >>> low, high = widened_interval(np.arange(101.0), 50.0, 0.9, 10**6)
        >>> round(low, 3), round(high, 3)
        (5.0, 95.0)
    """
    found = draws[~np.isnan(draws)]
    if degrees < 1 or 2 * len(found) <= len(draws):
        return float("nan"), float("nan")
    tail = (1 - level) / 2
    wider = float(stdtrit(degrees, 1 - tail) / ndtri(1 - tail))
    low, high = np.quantile(found, [tail, 1 - tail])
    return (
        centre + wider * (float(low) - centre),
        centre + wider * (float(high) - centre),
    )


def _counts(random: np.random.Generator, n: int, shape: tuple[int, ...]) -> _Array:
    """How often each of n is drawn, among max(n − 1, 1)."""
    counts = random.multinomial(max(n - 1, 1), np.full(n, 1 / n), shape)
    return np.asarray(counts, dtype=np.float64)
