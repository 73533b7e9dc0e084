"""Intervals and correlations against scipy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from leakwatch.reproduction.intervals import (
    bootstrapped,
    mean_interval,
    median_interval,
    rank_correlations,
)


def test_rank_correlations_are_those_of_scipy() -> None:
    stream = np.random.default_rng(0)
    a, b = stream.integers(0, 9, (2, 3, 30)).astype(float)
    b[1, 4] = math.nan
    got = rank_correlations(a, b)
    for i in range(3):
        good = ~np.isnan(b[i])
        expected = stats.spearmanr(a[i][good], b[i][good]).statistic
        assert got[i] == pytest.approx(expected)
    assert math.isnan(rank_correlations([1.0, 2.0, 3.0], [5.0, 5.0, 5.0]))
    assert math.isnan(rank_correlations([1.0, 2.0], [1.0, 2.0]))


def test_a_mean_has_the_interval_of_student() -> None:
    values = np.random.default_rng(0).normal(3, 2, 12)
    low, high = stats.t.interval(0.95, 11, values.mean(), stats.sem(values))
    got = mean_interval([*values, math.nan])
    assert got == pytest.approx((values.mean(), low, high), rel=1e-5)
    assert mean_interval([2.0]) == (2.0, None, None)
    assert mean_interval([math.nan]) == (None, None, None)


def test_bootstraps_cover_a_mean_as_often_as_they_say() -> None:
    stream = np.random.default_rng(0)
    inside = 0
    for _ in range(200):
        values = stream.normal(0, 1, 60)

        def mean(i: Any, values: Any = values) -> float:
            return float(values[i].mean())

        _, low, high = bootstrapped(mean, 60, draws=200)
        assert low is not None
        assert high is not None
        inside += low <= 0 <= high
    # 95 % of 200 and three standard deviations of their number.
    assert 180 <= inside <= 199


def test_images_are_drawn_with_all_their_values() -> None:
    once = np.random.default_rng(0).normal(0, 1, 25)
    again = np.tile(once, (4, 1))
    assert median_interval(again) == median_interval(once)
    assert median_interval([math.nan, math.nan]) == (None, None, None)
