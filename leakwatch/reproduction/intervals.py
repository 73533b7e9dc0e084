"""Intervals of statistics of images that were measured several times each."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.stats import rankdata

__all__ = ["bootstrapped", "mean_interval", "median_interval", "rank_correlations"]

_Array = npt.NDArray[np.float64]


def bootstrapped(
    statistic: Callable[[Any], float], n: int, *, draws: int = 400, seed: int = 0
) -> tuple[float | None, float | None, float | None]:
    """A statistic and the 95 % percentile bootstrap interval over images.

    An image is drawn with all its values, whatever seeds and noise they belong to:
    these are not independent of each other.

    Args:
        statistic: of the images whose positions it is given, with repeats.
        n: images.
        draws: resamples.
        seed: of the resampling.

    Returns:
        Value, lower and upper end, each None where it is no number.

    Example:
        >>> bootstrapped(lambda i: float(len(i)), 5, draws=10)
        (5.0, 5.0, 5.0)
    """
    value = statistic(np.arange(n))
    places = np.random.default_rng(seed).integers(0, n, (draws, n))
    found = np.array([statistic(i) for i in places])
    found = found[np.isfinite(found)]
    low = high = math.nan
    if len(found) >= draws / 2:
        low, high = np.quantile(found, [0.025, 0.975])
    return _number(value), _number(low), _number(high)


def mean_interval(
    values: npt.ArrayLike,
) -> tuple[float | None, float | None, float | None]:
    """Mean and its 95 % interval by Student's t; ends are None below two values.

    Args:
        values: independent of each other; those that are no number are left out.

    Example:
        >>> [round(v, 3) for v in mean_interval([1.0, 2.0, 3.0])]
        [2.0, -0.484, 4.484]
    """
    from scipy.stats import t

    kept = np.asarray(values, dtype=np.float64)
    kept = kept[np.isfinite(kept)]
    if not len(kept):
        return None, None, None
    mean = float(kept.mean())
    if len(kept) < 2:
        return _number(mean), None, None
    half = float(t.ppf(0.975, len(kept) - 1) * kept.std(ddof=1) / math.sqrt(len(kept)))
    return _number(mean), _number(mean - half), _number(mean + half)


def median_interval(
    values: npt.ArrayLike,
) -> tuple[float | None, float | None, float | None]:
    """Median and its bootstrap interval over images.

    Args:
        values: the last axis are images, see :func:`bootstrapped`.

    Example:
        >>> median_interval([[1.0, 2.0, 2.0, 2.0, 9.0]])
        (2.0, 1.0, 9.0)
    """
    found = np.asarray(values, dtype=np.float64)

    def middle(i: Any) -> float:
        chosen = found[..., i]
        return float(np.nanmedian(chosen)) if np.isfinite(chosen).any() else math.nan

    return bootstrapped(middle, found.shape[-1])


def rank_correlations(a: npt.ArrayLike, b: npt.ArrayLike) -> _Array:
    """Spearman's ρ along the last axis; NaN where it is not defined.

    Args:
        a: values.
        b: the same shape. A pair with NaN is left out.
    """
    one, other = np.broadcast_arrays(
        np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    )
    lines = one.reshape(-1, one.shape[-1]), other.reshape(-1, other.shape[-1])
    found = [_spearman(x, y) for x, y in zip(*lines, strict=True)]
    return np.array(found).reshape(one.shape[:-1])


def _spearman(x: _Array, y: _Array) -> float:
    good = ~np.isnan(x + y)
    if good.sum() < 3:
        return math.nan
    ranks = [rankdata(v[good]) for v in (x, y)]
    u, v = (r - r.mean() for r in ranks)
    size = math.sqrt(float((u @ u) * (v @ v)))
    return float(u @ v) / size if size else math.nan


def _number(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None
