from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import norm, t

from leakwatch.reporting import Quantity
from leakwatch.studies.initializations.ranking import (
    rank,
    resampled_means,
    widened_interval,
)

MORE = Quantity("psnr", unit="dB", direction="higher = more exposed")
LESS = Quantity("mse", unit="pixel²", direction="higher = less exposed")


def noisy(*means: float, seeds: int = 4, samples: int = 8) -> np.ndarray:
    random = np.random.default_rng(3)
    shared = random.normal(size=(1, 1, samples))
    spread = 0.2 * random.normal(size=(len(means), seeds, samples))
    return np.array(means)[:, None, None] + shared + spread


def test_order_follows_the_direction() -> None:
    values = noisy(0.0, 4.0, 0.01)
    up = rank(values, ["a", "b", "c"], MORE, log=False)
    assert up.ranked[0].scheme == "b"
    assert up.told_apart("a", "b")
    assert up.told_apart("b", "c")
    assert not up.told_apart("a", "c")
    assert up.order in ("b > a ≈ c", "b > c ≈ a")
    down = rank(values, ["a", "b", "c"], LESS, log=False)
    assert [r.scheme for r in down.ranked] == [r.scheme for r in up.ranked][::-1]
    first = up.ranked[0]
    assert first.mean == pytest.approx(values[1].mean(), rel=1e-12)
    assert first.low < first.mean < first.high
    assert (first.used, first.count) == (32, 32)


def test_logarithms_give_geometric_means() -> None:
    values = np.log10(np.array([[[1.0, 100.0]], [[10.0, 1000.0]]]))
    found = rank(values, ["a", "b"], LESS, log=True)
    assert [r.mean for r in found.ranked] == pytest.approx([10.0, 100.0])


def test_equal_initialisations_are_seldom_told_apart() -> None:
    random = np.random.default_rng(0)
    apart = 0
    for _ in range(120):
        values = random.normal(size=(2, 3, 1)) + random.normal(size=(1, 1, 6))
        values = values + 0.3 * random.normal(size=(2, 3, 6))
        found = rank(values, ["a", "b"], MORE, log=False, resamples=400)
        apart += found.told_apart("a", "b")
    # Nominally 5 %; at 5 % more than 14 of 120 happen once in 1,000 times.
    assert apart <= 14


def test_clear_differences_are_told_apart_with_few_seeds() -> None:
    found = rank(noisy(0.0, 9.0, 20.0, seeds=3), ["a", "b", "c"], MORE, log=False)
    assert found.order == "c > b > a"


def test_what_is_mostly_missing_is_unknown_and_not_safe() -> None:
    values = noisy(0.0, 5.0)
    values[0, :, 1:] = math.nan
    found = rank(values, ["a", "b"], MORE, log=False)
    assert [r.scheme for r in found.ranked] == ["b"]
    assert [(r.scheme, r.used) for r in found.unknown] == [("a", 4)]
    assert "a: not known, which is not safe; 4 of 32 values" in str(found)
    values[:] = math.nan
    nothing = rank(values, ["a", "b"], MORE, log=False)
    assert nothing.order == ""
    assert len(nothing.unknown) == 2


def test_one_of_everything_tells_nothing_apart() -> None:
    found = rank(np.array([[[0.0]], [[9.0]]]), ["a", "b"], MORE, log=False)
    assert found.order == "b ≈ a"
    assert math.isnan(found.ranked[0].low)
    assert found.notes == ("one seed and one sample: nothing can be told apart.",)
    assert "[not known, not known]" in str(found)


def test_mistakes() -> None:
    with pytest.raises(ValueError, match="does not say by itself which end"):
        rank(noisy(0.0), ["a"], Quantity("x"), log=False)
    with pytest.raises(ValueError, match=r"level must lie in \(0, 1\), got 95"):
        rank(noisy(0.0), ["a"], MORE, log=False, level=95)


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
