"""Summaries over samples and classes, for the loggers and for the report alike.

Values whose status is not usable never enter a summary; they are counted. Where
nothing is left the result is NaN with a reason, never zero.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import final

import numpy as np
import numpy.typing as npt

from leakwatch.reporting.ledger.rows import status_word
from leakwatch.reporting.ledger.table import Column
from leakwatch.reporting.quantities import Quantity


@final
@dataclass(frozen=True)
class Summary:
    """A quantity over the samples of one probe step, in its own unit.

    Args:
        count: Samples recorded.
        used: Samples with a usable value; the rest is in ``excluded``.
        estimated: How many of ``used`` are estimates.
        excluded: Status word to number of samples; an ``ok`` that is NaN counts
            as ``not a number``.
        median: Median over the used samples.
        p05: 5th percentile, linearly interpolated.
        p95: 95th percentile.
        worst: Value at the most exposed end; NaN without a direction.
        worst_sample: Data-set index of the most exposed sample.
        reason: Why numbers are NaN; empty if none is.
        bounds: How many of ``used`` are bounds: with any, exposure is at least what
            the numbers say.
        worst_estimated: Whether the worst value is an estimate.
    """

    count: int
    used: int
    estimated: int
    excluded: Mapping[str, int]
    median: float
    p05: float
    p95: float
    worst: float
    worst_sample: int | None
    reason: str
    bounds: int = 0
    worst_estimated: bool = False

    @property
    def median_estimated(self) -> bool:
        """Whether most of the values that the median is of are estimates."""
        return 2 * self.estimated > self.used


@final
@dataclass(frozen=True)
class ClassSummary:
    """A quantity over the samples of one class; NaN with a reason if none is usable.

    Args:
        label: The class.
        count: Samples recorded.
        used: Samples with a usable value.
        mean: Mean over the used samples.
        median: Median over the used samples.
        reason: Why numbers are NaN; empty if none is.
        bounds: How many of ``used`` are bounds.
        estimated: Whether most of ``used`` are estimates.
    """

    label: int
    count: int
    used: int
    mean: float
    median: float
    reason: str
    bounds: int = 0
    estimated: bool = False


@final
@dataclass(frozen=True)
class Spread:
    """How unequally classes are exposed.

    Args:
        highest: Class with the highest mean.
        lowest: Class with the lowest mean.
        difference: Highest mean minus lowest mean, in the unit of the quantity.
        ratio: Highest mean over lowest mean, from 1.
        gini: Gini coefficient of the class means, from 0 (all equal) to
            1 − 1/classes.
        reason: Why one of them is NaN; empty if none is.
    """

    highest: int | None
    lowest: int | None
    difference: float
    ratio: float
    gini: float
    reason: str


def quantile(values: Sequence[float] | npt.NDArray[np.float64], q: float) -> float:
    """Return a quantile by linear interpolation, infinities allowed.

    Equals ``numpy.quantile`` on finite values, which gives NaN between equal
    infinities.

    Raises:
        ValueError: If ``values`` is empty or ``q`` is outside [0, 1].

    Example:
        >>> quantile([1.0, 2.0, 4.0], 0.75)
        3.0
        >>> quantile([1.0, float("inf"), float("inf")], 0.75)
        inf
    """
    if len(values) == 0 or not 0.0 <= q <= 1.0:
        raise ValueError(
            f"quantile {q} of {len(values)} values: expected at least one value and "
            "q from 0 to 1"
        )
    ordered = sorted(float(value) for value in values)
    place = q * (len(ordered) - 1)
    low, weight = math.floor(place), place - math.floor(place)
    if weight == 0.0 or ordered[low] == ordered[low + 1]:
        return ordered[low]
    if math.isfinite(ordered[low]) and math.isfinite(ordered[low + 1]):
        return ordered[low] + weight * (ordered[low + 1] - ordered[low])
    return (1.0 - weight) * ordered[low] + weight * ordered[low + 1]


def count_excluded(column: Column) -> dict[str, int]:
    """Count unusable values by status word."""
    return dict(Counter(value.trouble for value in compress(column, ~column.usable)))


def summarize(column: Column, sign: int) -> Summary:
    """Summarise one quantity at one probe step.

    Args:
        column: The values with their statuses.
        sign: +1 if higher is more exposed, -1 if less, 0 if unknown: see
            `leakwatch.reporting.quantities.Quantity.sign`.

    Example:
        >>> column = Column((4, 9), (0, 1), np.array([10.0, 20.0]), ("ok", "ok"))
        >>> summary = summarize(column, sign=1)
        >>> summary.median, summary.worst, summary.worst_sample
        (15.0, 20.0, 9)
    """
    values = column.values[column.usable]
    excluded = count_excluded(column)
    low, median, high = (
        quantile(values, q) if values.size else math.nan for q in (0.05, 0.5, 0.95)
    )
    worst = next(iter(worst_samples(column, sign, k=1)), None)
    reason = "" if sign else "no worst value: which end is exposed is not known"
    if not values.size:
        reason = f"no usable value: {describe_counts(excluded) or 'no samples'}"
    return Summary(
        count=len(column.samples),
        used=int(values.size),
        estimated=sum(
            status_word(status) == "estimated"
            for status in compress(column.statuses, column.usable)
        ),
        excluded=excluded,
        median=median,
        p05=low,
        p95=high,
        worst=math.nan if worst is None else column.at(worst).value,
        worst_sample=worst,
        reason=reason,
        bounds=int(column.bounds.sum()),
        worst_estimated=worst is not None and column.at(worst).estimated,
    )


def describe_counts(excluded: Mapping[str, int]) -> str:
    """Return counts as words.

    Example:
        >>> describe_counts({"unresolved": 3, "failed": 1})
        '3 unresolved, 1 failed'
    """
    return ", ".join(f"{number} {word}" for word, number in excluded.items())


def worst_samples(column: Column, sign: int, k: int) -> list[int]:
    """Return the data-set indices of the ``k`` most exposed samples, worst first.

    Ties keep the order of the ledger. Without a direction (``sign`` 0) nobody
    knows which end is exposed, and the list is empty.
    """
    if sign == 0:
        return []
    places = np.flatnonzero(column.usable)
    order = np.argsort(-sign * column.values[places], kind="stable")
    return [column.samples[place] for place in places[order][:k]]


def summarize_classes(column: Column) -> list[ClassSummary]:
    """Summarise each class that has samples, by label; unlabelled samples are left out.

    A mean over infinities of both signs is NaN.
    """
    summaries: list[ClassSummary] = []
    for label in sorted({label for label in column.labels if label is not None}):
        members = column.where(np.array([y == label for y in column.labels], bool))
        values = members.values[members.usable]
        mean, median, reason = math.nan, math.nan, ""
        if values.size:
            mean, median = _mean(values), quantile(values, 0.5)
        else:
            reason = f"no usable value among {len(members.samples)} samples"
        summaries.append(
            ClassSummary(
                label=label,
                count=len(members.samples),
                used=int(values.size),
                mean=mean,
                median=median,
                reason=reason,
                bounds=int(members.bounds.sum()),
                estimated=2 * sum(v.estimated for v in members) > values.size,
            )
        )
    return summaries


def spread_of_classes(
    classes: Sequence[ClassSummary], quantity: Quantity | None = None
) -> Spread:
    """Compare class means.

    Ratio and Gini coefficient are defined for finite, non-negative values on a
    scale with a true zero: not for decibels, where the difference is the measure.
    Classes without a usable value are left out.

    Example:
        >>> rows = [ClassSummary(0, 1, 1, 1.0, 1.0, ""),
        ...         ClassSummary(1, 1, 1, 3.0, 3.0, "")]
        >>> spread = spread_of_classes(rows)
        >>> spread.ratio, spread.gini
        (3.0, 0.25)
    """
    nan = math.nan
    usable = [row for row in classes if not math.isnan(row.mean)]
    if len(usable) < 2:
        reason = f"undefined: {len(usable)} classes have a usable value, 2 are needed"
        return Spread(None, None, nan, nan, nan, reason)
    high = max(usable, key=lambda row: row.mean)
    low = min(usable, key=lambda row: row.mean)
    means = np.array([row.mean for row in usable])
    difference = high.mean - low.mean if np.isfinite(means).all() else nan
    ratio = gini = nan
    if not np.isfinite(means).all():
        reason = "undefined: a class mean is infinite"
    elif quantity is not None and quantity.logarithmic:
        reason = "undefined for decibels: read the difference"
    elif low.mean < 0.0:
        reason = "undefined: a class mean is negative"
    elif high.mean == 0.0:
        reason = "undefined: all class means are zero"
    else:
        gini = _gini(means)
        reason = "" if low.mean > 0.0 else "ratio undefined: the lowest mean is zero"
        ratio = high.mean / low.mean if low.mean > 0.0 else nan
    return Spread(high.label, low.label, difference, ratio, gini, reason)


def _mean(values: npt.NDArray[np.float64]) -> float:
    if np.isfinite(values).all():
        try:
            return math.fsum(values) / values.size
        except OverflowError:
            return math.fsum(values / values.size)
    # np.mean warns where infinities of both signs meet.
    infinite = {float(value) for value in values if np.isinf(value)}
    return infinite.pop() if len(infinite) == 1 else math.nan


def _gini(means: npt.NDArray[np.float64]) -> float:
    # A power of two keeps every digit and lets the sums of the largest floats fit.
    scaled = np.ldexp(means, -int(np.frexp(means.max())[1]))
    differences = np.abs(scaled[:, None] - scaled[None, :]).sum()
    return float(differences / (2.0 * means.size * scaled.sum()))
