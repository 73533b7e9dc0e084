"""Spearman's rank correlation with everything needed to judge it.

A correlation alone says little: with few samples, ties or constant columns libraries
return 0, 1 or NaN for it. Here it comes with n, a p-value, a bootstrap interval, and
the word "undefined" with a reason where there is no such number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations
from typing import Final, final

import numpy as np
import numpy.typing as npt
from scipy.special import stdtr
from scipy.stats import rankdata

from leakwatch.status import OK, Status

__all__ = ["Correlation", "partial_spearman", "resampled_spearman", "spearman"]

_Array = npt.NDArray[np.float64]

_FEWEST: Final = 3
_FEW: Final = 10
_EXACT_UP_TO: Final = 8
# What is left of a rank after its controls, relative to the rank's own variance.
_EXPLAINED: Final = 1e-10
_LEAST_DEFINED: Final = 0.5


@final
@dataclass(frozen=True)
class Correlation:
    """A rank correlation.

    Attributes:
        rho: in [−1, 1], NaN when undefined.
        n: pairs that it is computed from.
        p_value: two-sided, of no association; NaN when undefined.
        low: lower end of the bootstrap interval, NaN when there is none.
        high: upper end.
        status: ``ok``; ``estimated`` below 10 pairs; ``undefined`` with the reason.
        dropped: pairs left out because one of their values was NaN.
    """

    rho: float
    n: int
    p_value: float
    low: float
    high: float
    status: Status
    dropped: int = 0

    @property
    def clear(self) -> bool:
        """Whether the bootstrap interval excludes zero."""
        return self.low > 0 or self.high < 0

    def __str__(self) -> str:
        if not self.status.usable:
            return f"undefined (n = {self.n}): {self.status.reason}"
        return (
            f"{self.rho:+.2f} [{self.low:+.2f}, {self.high:+.2f}], n = {self.n}, "
            f"p = {self.p_value:.2g}"
        )


def spearman(
    a: npt.ArrayLike,
    b: npt.ArrayLike,
    *,
    bootstrap: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> Correlation:
    """Spearman's correlation: Pearson's, of ranks, where ties share their mean rank.

    The p-value is exact (over all permutations) up to 8 pairs; above from Student's t
    with n − 2 degrees of freedom, and at least 2/n!, which no data can undercut. The
    interval is the percentile bootstrap over pairs; resamples in which a column is
    constant don't count.

    Args:
        a: one value per sample; NaN where there is none. Infinities have a rank.
        b: the same for the same samples.
        bootstrap: number of resamples, 0 for no interval.
        level: coverage of the interval.
        seed: of the resampling. Nothing else draws from it.

    Returns:
        The correlation; undefined below 3 pairs and when a column is constant.

    Raises:
        ValueError: if the columns aren't one-dimensional or differ in length, or for
            a negative ``bootstrap`` or a level outside of (0, 1).

    Example:
        >>> result = spearman(range(20), [x**3 for x in range(20)])
        >>> result.rho, result.low, result.high, result.n
        (1.0, 1.0, 1.0, 20)
        >>> str(spearman([1, 2, 3, 4], [5, 5, 5, 5]))
        'undefined (n = 4): the second column is constant'
    """
    return _correlate([a, b], bootstrap, level, seed)


def partial_spearman(
    a: npt.ArrayLike,
    b: npt.ArrayLike,
    *controls: npt.ArrayLike,
    bootstrap: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> Correlation:
    """What of a rank correlation is left when other columns are held fixed.

    Pearson's correlation of the residuals of the ranks of ``a`` and ``b`` after least
    squares on the ranks of the controls. It answers whether a score says more about
    quality than a baseline, such as the image's contrast or the gradient norm, does
    already. The p-value is from Student's t with n − 2 − k degrees of freedom.

    Args:
        a: one value per sample; NaN where there is none.
        b: the same.
        controls: k ≥ 1 such columns.
        bootstrap: number of resamples, 0 for no interval.
        level: coverage of the interval.
        seed: of the resampling.

    Returns:
        The correlation; undefined below 3 + k pairs, when a column is constant, and
        when the controls determine the ranks of ``a`` or ``b``.

    Raises:
        ValueError: as :func:`spearman`, and without any control.
    """
    if not controls:
        raise ValueError("partial_spearman needs at least one column to control for.")
    return _correlate([a, b, *controls], bootstrap, level, seed)


def resampled_spearman(
    a: npt.ArrayLike, b: npt.ArrayLike, *, resamples: int, seed: int = 0
) -> _Array:
    """Correlations of bootstrap resamples of the pairs, NaN where undefined.

    Columns of equal length are resampled alike under one seed, so that results of the
    same samples under several networks can be averaged resample by resample.

    Args:
        a: one value per sample.
        b: the same.
        resamples: how many.
        seed: of the resampling.

    Returns:
        Shape ``(resamples,)``.
    """
    columns = _columns([a, b])
    kept = columns[:, ~np.isnan(columns).any(0)]
    if kept.shape[1] < _FEWEST:
        return np.full(resamples, math.nan)
    return _bootstrap(kept, resamples, seed)


def _correlate(
    raw: list[npt.ArrayLike], bootstrap: int, level: float, seed: int
) -> Correlation:
    if bootstrap < 0 or not 0 < level < 1:
        raise ValueError(
            f"bootstrap must be at least 0 and level inside (0, 1), got {bootstrap} "
            f"and {level}."
        )
    columns = _columns(raw)
    kept = columns[:, ~np.isnan(columns).any(0)]
    n, controls = kept.shape[1], len(kept) - 2
    dropped = columns.shape[1] - n

    def undefined(reason: str) -> Correlation:
        nan = math.nan
        return Correlation(nan, n, nan, nan, nan, Status("undefined", reason), dropped)

    if n < _FEWEST + controls:
        missing = f", {dropped} more hold NaN" if dropped else ""
        return undefined(f"it needs {_FEWEST + controls} pairs or more{missing}")
    for name, column in zip(_names(controls), kept, strict=True):
        if column.min() == column.max():
            return undefined(f"the {name} column is constant")
    rho = float(_partial(kept[:, None])[0])
    if math.isnan(rho):
        return undefined("the controls determine the ranks of one of the columns")
    low = high = math.nan
    if bootstrap:
        draws = _bootstrap(kept, bootstrap, seed)
        draws = draws[~np.isnan(draws)]
        if len(draws) >= _LEAST_DEFINED * bootstrap:
            tail = (1 - level) / 2
            low, high = (float(q) for q in np.quantile(draws, [tail, 1 - tail]))
    status = OK
    if n < _FEW:
        status = Status("estimated", f"from {n} pairs only")
    p_value = _p_value(kept, rho)
    return Correlation(rho, n, p_value, low, high, status, dropped)


def _names(controls: int) -> list[str]:
    return ["first", "second", *(f"control {i + 1}" for i in range(controls))]


def _columns(raw: list[npt.ArrayLike]) -> _Array:
    columns = [np.asarray(c, dtype=np.float64) for c in raw]
    shapes = [c.shape for c in columns]
    if any(c.ndim != 1 for c in columns) or len(set(shapes)) != 1:
        raise ValueError(
            f"columns must be one-dimensional and equally long, got shapes {shapes}."
        )
    return np.stack(columns)


def _partial(columns: _Array) -> _Array:
    """Correlation of the first two of ``(columns, resamples, n)`` given the others."""
    ranks: _Array = np.asarray(rankdata(columns, axis=-1), dtype=np.float64)
    ranks = ranks - ranks.mean(-1, keepdims=True)
    variance = (ranks**2).sum(-1)
    for i in range(2, len(ranks)):
        # One control after another (Gram-Schmidt), each cleared of those before; what
        # those determine already, or what is constant, has nothing to take away.
        c = ranks[i]
        square = (c**2).sum(-1)
        useful = square > _EXPLAINED * np.maximum(variance[i], 1.0)
        for j in (0, 1, *range(i + 1, len(ranks))):
            slope = (ranks[j] * c).sum(-1) / np.where(useful, square, 1.0)
            ranks[j] -= np.where(useful, slope, 0.0)[:, None] * c
    a, b = ranks[0], ranks[1]
    squares = (a**2).sum(-1), (b**2).sum(-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        rho = np.clip((a * b).sum(-1) / np.sqrt(squares[0] * squares[1]), -1.0, 1.0)
        left = np.minimum(squares[0] / variance[0], squares[1] / variance[1])
    defined: _Array = np.where(left > _EXPLAINED, rho, math.nan)
    return defined


def _bootstrap(kept: _Array, resamples: int, seed: int) -> _Array:
    n = kept.shape[1]
    places = np.random.default_rng(seed).integers(0, n, (resamples, n))
    return _partial(kept[:, places])


@lru_cache(maxsize=32)
def _chance(first: tuple[float, ...], second: tuple[float, ...]) -> _Array:
    """|ρ| of all orders of two columns; without ties the same for all of a length.

    Args:
        first: ranks, sorted.
        second: the same.
    """
    orders = np.array(list(permutations(range(len(first)))))
    one = np.broadcast_to(np.array(first), orders.shape)
    values: _Array = np.abs(_partial(np.stack([one, np.array(second)[orders]])))
    return values


def _p_value(kept: _Array, rho: float) -> float:
    n, controls = kept.shape[1], len(kept) - 2
    if controls == 0 and n <= _EXACT_UP_TO:
        first, second = (tuple(sorted(rankdata(c).tolist())) for c in kept)
        return float(np.mean(_chance(first, second) >= abs(rho) - 1e-12))
    degrees = n - 2 - controls
    if abs(rho) == 1.0:
        t = math.inf
    else:
        t = abs(rho) * math.sqrt(degrees / ((1 - rho) * (1 + rho)))
    least = 2 / math.factorial(min(n, 170))
    return float(max(2 * stdtr(degrees, -t), least))
