from __future__ import annotations

import math

import pytest
import torch

from leakwatch.defenses import Budget, expected_norm
from leakwatch.defenses.budget import Unit


def test_units_state_the_same_mean_square() -> None:
    norm, size = torch.tensor([2.0, 5.0]).double(), 100
    assert Budget(0.5, "norm").variance(norm, size).tolist() == [0.25, 0.25]
    assert Budget(0.5, "relative").variance(norm, size).tolist() == [1.0, 6.25]
    assert Budget(0.5, "std").variance(norm, size).tolist() == [25.0, 25.0]


@pytest.mark.parametrize("unit", ["norm", "relative", "std"])
@pytest.mark.parametrize("other", ["norm", "relative", "std"])
def test_a_change_of_unit_keeps_the_mean_square(unit: Unit, other: Unit) -> None:
    budget = Budget(0.3, unit)
    changed = budget.to(other, norm=7.0, size=123)
    assert changed.unit == other
    norm = torch.tensor([7.0]).double()
    torch.testing.assert_close(
        changed.variance(norm, 123), budget.variance(norm, 123), rtol=1e-14, atol=0.0
    )
    back = changed.to(unit, norm=7.0, size=123)
    assert back.value == pytest.approx(0.3, rel=1e-14)


def test_a_relative_budget_of_a_vanishing_gradient_has_no_other_unit() -> None:
    with pytest.raises(ValueError, match="norm is 0"):
        Budget(0.1, "relative").to("std", norm=0.0, size=4)
    with pytest.raises(ValueError, match="norm is 0"):
        Budget(0.1, "std").to("relative", norm=0.0, size=4)
    assert Budget(0.1, "std").to("norm", norm=0.0, size=4) == Budget(0.2, "norm")


def test_bad_budgets_say_what_was_given() -> None:
    with pytest.raises(ValueError, match=r"at least 0 and finite, got -1"):
        Budget(-1, "norm")
    with pytest.raises(ValueError, match="'norm', 'relative', 'std', got 'variance'"):
        Budget(1.0, "variance")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"must be a number.*got 'big'"):
        Budget("big")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"must be a number.*got True"):
        Budget(True)
    with pytest.raises(ValueError, match="finite"):
        Budget(math.inf)


@pytest.mark.parametrize(
    ("size", "exact"),
    [
        (1, math.sqrt(2 / math.pi)),
        (2, math.sqrt(math.pi / 2)),
        (3, 2 * math.sqrt(2 / math.pi)),
        (4, 3 / 2 * math.sqrt(math.pi / 2)),
    ],
)
def test_the_mean_norm_is_that_of_a_chi_distribution(size: int, exact: float) -> None:
    assert expected_norm(2.0, size) == pytest.approx(2 * exact, rel=1e-14)


def test_the_mean_norm_obeys_its_recurrence_where_the_series_takes_over() -> None:
    # μ_d μ_{d+1} = d follows from Γ(z + 1) = z Γ(z).
    for size in (998, 999, 1000, 100_000):
        product = expected_norm(1.0, size) * expected_norm(1.0, size + 1)
        assert product == pytest.approx(size, rel=1e-11)


def test_the_mean_norm_is_below_the_root_mean_square() -> None:
    drawn = torch.randn(
        20_000, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    norms = drawn.norm(dim=1)
    error = 4 * float(norms.std()) / math.sqrt(len(norms))
    assert abs(float(norms.mean()) - expected_norm(1.0, 5)) < error
    assert expected_norm(1.0, 5) < math.sqrt(5) - error
