from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import norm, t

from leakwatch.studies.initializations.resampling import (
    resampled_means,
    widened_interval,
)


@pytest.mark.parametrize("shape", [(1, 4, 1), (1, 1, 5)])
def test_the_spread_is_the_unbiased_one(shape: tuple[int, int, int]) -> None:
    values = np.random.default_rng(0).normal(size=shape)
    draws = resampled_means(values, resamples=60_000)[0]
    n = values.size
    assert draws.mean() == pytest.approx(values.mean(), abs=0.01)
    assert draws.var() == pytest.approx(values.var(ddof=1) / n, rel=0.03)


def test_two_factors_add_their_spreads() -> None:
    seeds, samples = np.array([0.0, 1.0, 5.0]), np.array([0.0, 2.0, 3.0, 7.0])
    values = (seeds[:, None] + samples)[None]
    draws = resampled_means(values, resamples=60_000)[0]
    expected = seeds.var(ddof=1) / 3 + samples.var(ddof=1) / 4
    assert draws.var() == pytest.approx(expected, rel=0.03)


def test_groups_share_samples_but_not_seeds() -> None:
    samples = np.random.default_rng(0).normal(size=(1, 1, 8))
    both = resampled_means(np.concatenate([samples, samples + 2]))
    np.testing.assert_allclose(both[1] - both[0], 2.0, rtol=1e-12)
    seeds = np.random.default_rng(0).normal(size=(1, 6, 1))
    first, second = resampled_means(np.concatenate([seeds, seeds]), resamples=20_000)
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.03


def test_missing_values_have_no_weight() -> None:
    values = np.array([[[1.0, math.nan, 3.0]], [[math.nan] * 3]])
    draws = resampled_means(values, resamples=500)
    known = draws[0][~np.isnan(draws[0])]
    assert set(np.round(known, 9)) == {1.0, 2.0, 3.0}
    assert np.isnan(draws[0]).mean() == pytest.approx(1 / 9, abs=0.05)
    assert np.isnan(draws[1]).all()
    assert widened_interval(draws[1], math.nan, 0.9, 2) != (0.0, 0.0)
    assert all(map(math.isnan, widened_interval(draws[1], math.nan, 0.9, 2)))


def test_widening_is_that_of_students_t() -> None:
    draws = np.random.default_rng(0).normal(size=400_000)
    low, high = widened_interval(draws, 0.0, 0.95, 2)
    assert high == pytest.approx(t.ppf(0.975, 2), rel=0.02)
    assert low == pytest.approx(-t.ppf(0.975, 2), rel=0.02)
    plain = widened_interval(draws, 0.0, 0.95, 10**7)
    assert plain[1] == pytest.approx(norm.ppf(0.975), rel=0.02)
    assert all(map(math.isnan, widened_interval(draws, 0.0, 0.95, 0)))


def test_shapes() -> None:
    with pytest.raises(ValueError, match=r"groups, seeds, samples.*\(2, 3\)"):
        resampled_means(np.zeros((2, 3)))
    with pytest.raises(ValueError, match="not empty"):
        resampled_means(np.zeros((2, 0, 3)))
