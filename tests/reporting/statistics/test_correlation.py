"""Rank correlations against scipy, closed forms and explicit residuals."""

from __future__ import annotations

import math
from itertools import permutations

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats

from leakwatch.reporting.statistics.correlation import (
    partial_spearman,
    resampled_spearman,
    spearman,
)

Columns = npt.NDArray[np.float64]


def normal(n: int, seed: int, rho: float = 0.6) -> tuple[Columns, Columns]:
    a, b = np.random.default_rng(seed).normal(size=(2, n))
    return a, rho * a + math.sqrt(1 - rho**2) * b


@pytest.mark.parametrize("n", [9, 20, 100])
@pytest.mark.parametrize("ties", [False, True])
def test_rho_and_p_value_equal_scipys(n: int, ties: bool) -> None:
    a, b = normal(n, seed=n)
    if ties:
        a, b = np.round(a), np.round(2 * b)
    ours, theirs = spearman(a, b, bootstrap=0), stats.spearmanr(a, b)
    assert ours.rho == pytest.approx(theirs.statistic, rel=1e-12)
    assert ours.p_value == pytest.approx(theirs.pvalue, rel=1e-9)
    assert (ours.n, ours.dropped) == (n, 0)
    assert math.isnan(ours.low)


@pytest.mark.parametrize("seed", range(3))
def test_small_samples_have_exact_p_values(seed: int) -> None:
    a, b = normal(6, seed)
    found = spearman(a, b, bootstrap=0)
    values = [stats.spearmanr(a, b[list(p)]).statistic for p in permutations(range(6))]
    expected = np.mean(np.abs(values) >= abs(found.rho) - 1e-9)
    assert found.p_value == pytest.approx(expected, rel=1e-12)
    assert found.status.word == "estimated"
    assert "6 pairs" in found.status.reason


def test_three_ordered_pairs_prove_nothing() -> None:
    found = spearman([1, 2, 3], [4, 5, 6])
    assert found.rho == 1.0
    assert found.p_value == pytest.approx(1 / 3)


def test_perfect_order_has_the_p_value_of_its_permutations() -> None:
    found = spearman(range(9), range(9))
    assert found.p_value == pytest.approx(2 / math.factorial(9))
    assert spearman(range(300), range(300)).p_value < 1e-300


def test_monotone_data_have_an_interval_of_no_width() -> None:
    x = np.arange(1.0, 31.0)
    up, down = spearman(x, np.log(x)), spearman(x, -(x**3))
    assert (up.rho, up.low, up.high) == (1.0, 1.0, 1.0)
    assert (down.rho, down.low, down.high) == (-1.0, -1.0, -1.0)
    assert up.clear
    assert down.clear


def test_interval_has_the_width_of_the_sampling_distribution() -> None:
    # Fisher: atanh(ρ) has a standard deviation of about √((1 + ρ²/2)/(n − 3)).
    a, b = normal(400, seed=1)
    found = spearman(a, b, bootstrap=2000)
    centre, deviation = math.atanh(found.rho), math.sqrt((1 + found.rho**2 / 2) / 397)
    assert found.low == pytest.approx(math.tanh(centre - 1.96 * deviation), abs=0.02)
    assert found.high == pytest.approx(math.tanh(centre + 1.96 * deviation), abs=0.02)


def test_interval_covers_as_often_as_it_says() -> None:
    truth = 6 / math.pi * math.asin(0.6 / 2)  # Spearman's ρ of a bivariate normal
    hits = 0
    for seed in range(200):
        found = spearman(*normal(60, seed), bootstrap=300, level=0.9, seed=seed)
        hits += found.low <= truth <= found.high
    # Binomial: 180 ± 3·4.2, and percentile intervals of n = 60 cover a little less.
    assert 160 <= hits <= 193


def test_independent_columns_are_not_clear() -> None:
    a, _ = normal(200, 3)
    b, _ = normal(200, 4)
    found = spearman(a, b)
    assert found.low < 0 < found.high
    assert found.p_value > 0.05
    assert not found.clear


def test_resampling_is_reproducible_and_seeded_apart() -> None:
    a, b = normal(30, 0)
    state = np.random.get_state(legacy=False)
    first, again, other = (spearman(a, b, seed=s) for s in (0, 0, 1))
    assert first == again
    assert (first.low, first.high) != (other.low, other.high)
    after = np.random.get_state(legacy=False)
    np.testing.assert_array_equal(state["state"]["key"], after["state"]["key"])


def test_pairs_with_nan_are_dropped_and_counted() -> None:
    a, b = normal(30, 0)
    holes = a.copy(), b.copy()
    holes[0][[3, 8]] = np.nan
    holes[1][[8, 20]] = np.nan
    kept = np.delete(np.arange(30), [3, 8, 20])
    found, expected = spearman(*holes), spearman(a[kept], b[kept])
    assert (found.rho, found.low, found.high) == (
        expected.rho,
        expected.low,
        expected.high,
    )
    assert (found.n, found.dropped) == (27, 3)


def test_infinities_have_a_rank() -> None:
    assert spearman([1, 2, 3, math.inf], [1, 2, 3, 4]).rho == 1.0


@pytest.mark.parametrize(
    ("a", "b", "why"),
    [
        ([], [], "3 pairs or more"),
        ([1, 2], [1, 2], "3 pairs or more"),
        ([1, 2, math.nan], [1, 2, 3], "1 more hold NaN"),
        ([5, 5, 5, 5], [1, 2, 3, 4], "first column is constant"),
        ([1, 2, 3, 4], [5, 5, 5, 5], "second column is constant"),
        ([1, 1, 1, 9], [1, 2, 3, math.nan], "first column is constant"),
    ],
)
def test_undefined_says_why(a: list[float], b: list[float], why: str) -> None:
    found = spearman(a, b)
    assert found.status.word == "undefined"
    assert why in found.status.reason
    for value in (found.rho, found.p_value, found.low, found.high):
        assert math.isnan(value)
    assert not found.clear
    assert "undefined" in str(found)


def test_no_interval_from_resamples_that_are_mostly_constant() -> None:
    # 19 of 20 values equal: a resample misses the other one with (19/20)²⁰ = 36 %;
    # with two such columns on different samples it misses one of both with 60 %.
    a, b = np.zeros(20), np.zeros(20)
    a[0], b[1] = 1.0, 1.0
    found = spearman(a, b)
    assert found.rho == pytest.approx(-1 / 19)
    assert math.isnan(found.low)
    share = np.isnan(resampled_spearman(a, b, resamples=4000)).mean()
    assert share == pytest.approx(2 * 0.95**20 - 0.9**20, abs=0.03)


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="equally long"):
        spearman([1, 2, 3], [1, 2])
    with pytest.raises(ValueError, match="one-dimensional"):
        spearman([[1, 2, 3]], [[1, 2, 3]])
    with pytest.raises(ValueError, match="bootstrap must be"):
        spearman([1, 2, 3], [1, 2, 3], bootstrap=-1)
    with pytest.raises(ValueError, match="level inside"):
        spearman([1, 2, 3], [1, 2, 3], level=1.0)
    with pytest.raises(ValueError, match="control for"):
        partial_spearman([1, 2, 3], [1, 2, 3])


@pytest.mark.parametrize("controls", [1, 3])
def test_partial_correlation_is_that_of_least_squares_residuals(controls: int) -> None:
    rng = np.random.default_rng(controls)
    shared = rng.normal(size=50)
    a, b = shared + rng.normal(size=50), shared + rng.normal(size=50)
    held = [shared + 0.5 * rng.normal(size=50) for _ in range(controls)]
    ranks = [stats.rankdata(c) for c in (a, b, *held)]
    design = np.stack([np.ones(50), *ranks[2:]], axis=1)
    residuals = [
        r - design @ np.linalg.lstsq(design, r, rcond=None)[0] for r in ranks[:2]
    ]
    expected = stats.pearsonr(*residuals)
    found = partial_spearman(a, b, *held)
    assert found.rho == pytest.approx(expected.statistic, abs=1e-10)
    t = abs(found.rho) * math.sqrt((48 - controls) / (1 - found.rho**2))
    assert found.p_value == pytest.approx(2 * stats.t.sf(t, 48 - controls), rel=1e-9)
    assert found.low < found.rho < found.high
    assert found.rho < spearman(a, b).rho


def test_a_repeated_or_constant_control_changes_nothing() -> None:
    rng = np.random.default_rng(0)
    a, b, c = rng.normal(size=(3, 30))
    once, twice = partial_spearman(a, b, c), partial_spearman(a, b, c, 2 * c + 1)
    assert twice.rho == pytest.approx(once.rho, abs=1e-12)
    constant = partial_spearman(a, b, c, np.ones(30))
    assert constant.status.word == "undefined"
    assert "control 2" in constant.status.reason


def test_what_the_control_determines_is_undefined() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 30))
    found = partial_spearman(a, b, np.exp(a))
    assert found.status.word == "undefined"
    assert "determine the ranks" in found.status.reason
