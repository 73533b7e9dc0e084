from __future__ import annotations

import math

import numpy as np
import pytest

from leakwatch.reporting import (
    ClassSummary,
    Column,
    Quantity,
    spread_of_classes,
    summarize,
    summarize_classes,
    worst_samples,
)
from leakwatch.reporting.statistics.aggregates import quantile


def column(
    values: list[float],
    statuses: list[str] | None = None,
    labels: list[int | None] | None = None,
) -> Column:
    count = len(values)
    return Column(
        samples=tuple(range(10, 10 + count)),
        labels=tuple(labels or [0] * count),
        values=np.array(values, np.float64),
        statuses=tuple(statuses or ["ok"] * count),
    )


def means(*values: float) -> list[ClassSummary]:
    return [
        ClassSummary(label, 1, 0 if math.isnan(value) else 1, value, value, "")
        for label, value in enumerate(values)
    ]


@pytest.mark.parametrize("q", [0.0, 0.05, 0.3, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("count", [1, 2, 7, 32])
def test_quantile_agrees_with_numpy_on_finite_values(q: float, count: int) -> None:
    values = np.random.default_rng(count).normal(size=count)
    assert quantile(values, q) == pytest.approx(np.quantile(values, q), rel=1e-12)


def test_quantile_with_infinities() -> None:
    inf = math.inf
    assert quantile([-inf, 0.0, inf], 0.5) == 0.0
    assert quantile([0.0, inf], 0.5) == inf
    assert quantile([inf, inf], 0.3) == inf
    assert math.isnan(quantile([-inf, inf], 0.5))
    with pytest.raises(ValueError, match="at least one value"):
        quantile([], 0.5)
    with pytest.raises(ValueError, match="q from 0 to 1"):
        quantile([1.0], 1.5)


@pytest.mark.parametrize(
    ("sign", "worst", "sample"), [(1, 9.0, 12), (-1, 1.0, 10), (0, math.nan, None)]
)
def test_worst_is_the_exposed_end(sign: int, worst: float, sample: int | None) -> None:
    summary = summarize(column([1.0, 4.0, 9.0]), sign)
    assert summary.worst == pytest.approx(worst, nan_ok=True)
    assert summary.worst_sample == sample
    assert (summary.median, summary.count, summary.used) == (4.0, 3, 3)
    assert bool(summary.reason) is (sign == 0)


def test_unusable_values_are_excluded_and_counted() -> None:
    found = summarize(
        column(
            [1.0, 100.0, math.nan, 3.0, 200.0, math.nan],
            ["ok", "unresolved: floor", "ok", "estimated: loose", "failed", "failed"],
        ),
        sign=1,
    )
    assert (found.count, found.used, found.estimated) == (6, 2, 1)
    assert found.excluded == {"unresolved": 1, "not a number": 1, "failed": 2}
    assert (found.median, found.worst, found.worst_sample) == (2.0, 3.0, 13)
    assert found.p05 == pytest.approx(1.1)
    assert found.p95 == pytest.approx(2.9)


@pytest.mark.parametrize("values", [[0.0, 0.0], [math.nan, math.nan]])
def test_nothing_usable_is_nan_with_a_reason_never_zero(values: list[float]) -> None:
    found = summarize(column(values, ["failed: a", "unresolved: b"]), sign=1)
    for value in (found.median, found.p05, found.p95, found.worst):
        assert math.isnan(value)
    assert found.worst_sample is None
    assert found.reason == "no usable value: 1 failed, 1 unresolved"


def test_worst_samples_are_ranked_and_ties_keep_their_order() -> None:
    data = column([5.0, 7.0, 7.0, math.inf, 9.0], ["ok", "ok", "ok", "ok", "failed: x"])
    assert worst_samples(data, 1, 3) == [13, 11, 12]
    assert worst_samples(data, -1, 2) == [10, 11]
    assert worst_samples(data, -1, 99) == [10, 11, 12, 13]
    assert worst_samples(data, 0, 3) == []


def test_classes_are_summarised_apart() -> None:
    found = summarize_classes(
        column(
            [1.0, 2.0, 6.0, 5.0, 8.0, 4.0],
            ["ok", "ok", "ok", "failed: x", "ok", "ok"],
            [3, 3, 3, 1, None, 0],
        )
    )
    assert [row.label for row in found] == [0, 1, 3]
    assert (found[2].mean, found[2].median, found[2].used) == (3.0, 2.0, 3)
    assert math.isnan(found[1].mean)
    assert found[1].reason == "no usable value among 1 samples"


def test_class_means_with_infinities_and_huge_values() -> None:
    inf, big = math.inf, 1.7e308
    data = column([1.0, inf, inf, -inf, big, big], labels=[0, 0, 1, 1, 2, 2])
    zero, one, two = summarize_classes(data)
    assert zero.mean == inf
    assert math.isnan(one.mean)
    assert two.mean == big


def test_spread_by_hand() -> None:
    spread = spread_of_classes(means(2.0, 6.0, 4.0, math.nan))
    assert (spread.highest, spread.lowest) == (1, 0)
    assert (spread.difference, spread.ratio) == (4.0, 3.0)
    # Sum over ordered pairs |a - b| = 16, over 2 * n * sum = 2 * 3 * 12.
    assert spread.gini == pytest.approx(16 / 72)
    assert spread.reason == ""


def test_gini_bounds() -> None:
    assert spread_of_classes(means(3.0, 3.0, 3.0)).gini == 0.0
    only_one = spread_of_classes(means(0.0, 0.0, 0.0, 5.0))
    assert only_one.gini == pytest.approx(0.75)
    assert math.isnan(only_one.ratio)
    assert only_one.reason == "ratio undefined: the lowest mean is zero"
    huge = spread_of_classes(means(1.7e308, 1.7e308, 0.85e308))
    assert huge.gini == pytest.approx(spread_of_classes(means(2.0, 2.0, 1.0)).gini)


@pytest.mark.parametrize(
    ("values", "unit", "reason"),
    [
        ((1.0,), "", "2 are needed"),
        ((1.0, math.nan), "", "1 classes have a usable value"),
        ((1.0, -1.0), "", "negative"),
        ((0.0, 0.0), "", "all class means are zero"),
        ((1.0, math.inf), "", "infinite"),
        ((10.0, 20.0), "dB", "decibels"),
    ],
)
def test_spread_is_undefined_with_a_reason(
    values: tuple[float, ...], unit: str, reason: str
) -> None:
    spread = spread_of_classes(means(*values), Quantity("q", unit=unit))
    assert math.isnan(spread.ratio)
    assert math.isnan(spread.gini)
    assert reason in spread.reason


def test_decibels_keep_their_difference() -> None:
    spread = spread_of_classes(means(10.0, 14.5), Quantity("q", unit="dB"))
    assert spread.difference == 4.5
