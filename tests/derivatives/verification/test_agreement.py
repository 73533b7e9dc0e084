from __future__ import annotations

import math

import pytest
import torch

from leakwatch.derivatives.verification.agreement import TOLERANCES, agreement

ROWS = torch.tensor([[1.0, 2.0, 2.0], [1e-12, 0.0, 0.0]])


@pytest.mark.parametrize("quantity", TOLERANCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_limit_is_a_share_of_each_rows_size(
    quantity: str, dtype: torch.dtype
) -> None:
    tolerance = TOLERANCES[quantity]  # type: ignore[index]
    share = tolerance.share(dtype)
    rows = ROWS.to(dtype)[:1] * 1e6  # beside which a floor is nothing
    within = agreement(rows * (1 + share / 2), rows, quantity)  # type: ignore[arg-type]
    beyond = agreement(rows * (1 + 2 * share), rows, quantity)  # type: ignore[arg-type]
    assert within.holds
    assert within.reason == ""
    assert not beyond.holds
    assert beyond.relative == pytest.approx(2 * share, rel=0.05)
    assert beyond.reason.startswith("differs by")
    assert tolerance.why


def test_a_large_row_does_not_hide_a_small_one() -> None:
    off = ROWS.clone()
    off[1] *= 2
    assert not agreement(off, ROWS, "attack's gradient").holds
    # A floor is for quantities of size one, beside which this row is zero.
    assert agreement(off, ROWS, "derivative").holds


def test_the_size_of_a_row_can_be_that_of_what_cancels_in_it() -> None:
    slope, size = torch.tensor([1e-6]), torch.tensor([1.0])
    assert not agreement(2 * slope, slope, "update's gradient").holds
    assert agreement(2 * slope, slope, "update's gradient", size=size).holds


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_what_is_not_finite_is_wrong_where_the_reference_is_finite(
    broken: float,
) -> None:
    off = ROWS.clone()
    off[0, 1] = broken
    compared = agreement(off, ROWS, "attack's gradient")
    assert not compared.holds
    assert compared.conclusive
    assert compared.reason == "is not finite"
    assert compared.relative == compared.gap == math.inf


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_reference_that_is_not_finite_shows_nothing(broken: float) -> None:
    reference = ROWS.clone()
    reference[0, 1] = broken
    compared = agreement(ROWS, reference, "attack's gradient")
    assert compared.holds
    assert not compared.conclusive
    reference[1] *= 2
    assert not agreement(ROWS, reference, "attack's gradient").holds


def test_two_zeros_agree() -> None:
    zero = torch.zeros(2, 3)
    compared = agreement(zero, zero, "attack's gradient")
    assert compared.holds
    assert compared.relative == 0
