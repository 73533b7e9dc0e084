from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from leakwatch.spectrum import Spectrum, precision_floor
from leakwatch.spectrum.result import clamp_rounding


def spectrum(**changes) -> Spectrum:
    fields = {
        "eigenvalues": torch.tensor([[4.0, 1.0], [2.0, 1e-9], [math.nan, math.nan]]),
        "residuals": torch.tensor([[1e-9, 1e-9], [1e-9, 1e-12], [math.nan, math.nan]]),
        "converged": torch.tensor([[True, False], [True, True], [False, False]]),
        "matvecs": torch.tensor([5, 6, 1]),
        "floor": torch.tensor([1e-8, 1e-8, math.nan]),
        "complete": False,
        "method": "lanczos",
    }
    return Spectrum(**(fields | changes))


SMALLEST = {
    "smallest": torch.tensor([0.5, 0.2, math.nan]),
    "smallest_residual": torch.tensor([1e-9, 0.3, math.nan]),
    "smallest_converged": torch.tensor([True, False, False]),
}


def test_status_says_what_each_value_is_worth():
    s = spectrum()
    assert s.status(0)[0] == "ok"
    assert s.status(0)[1].startswith("not converged: residual 1.0e-09 after 5 products")
    assert s.status(1)[0] == "ok"
    assert s.status(1)[1].startswith("unresolved: at or below 1.0e-08")
    assert [text.split(":")[0] for text in s.status(2)] == ["failed", "failed"]


def test_missing_value_of_a_good_sample_is_not_a_failure():
    s = spectrum(
        eigenvalues=torch.tensor([[4.0, math.nan]] * 3),
        converged=torch.tensor([[True, False]] * 3),
    )
    assert s.status(0)[1].startswith("not converged: no value after 5 products")


def test_resolved_needs_more_than_floor_and_residual():
    s = spectrum(residuals=torch.tensor([[5.0, 0.5], [1e-9, 1e-12], [0.0, 0.0]]))
    assert s.resolved.tolist() == [[False, True], [True, False], [False, False]]


def test_negative_value_clear_of_the_floor_is_resolved():
    s = spectrum(eigenvalues=torch.tensor([[4.0, -1.0]] * 3))
    assert bool(s.resolved[0, 1])


def test_smallest_end_not_asked_for_is_nan_and_says_so():
    s = spectrum()
    assert s.lambda_min.isnan().all()
    assert s.lambda_min_residual.isnan().all()
    assert not s.lambda_min_converged.any()
    assert not s.lambda_min_resolved.any()
    assert s.lambda_min_status(0).startswith("not computed: lanczos was not asked")


def test_smallest_end_of_an_iterative_solver():
    s = spectrum(**SMALLEST)
    torch.testing.assert_close(s.lambda_min[:2], torch.tensor([0.5, 0.2]))
    assert s.lambda_min_converged.tolist() == [True, False, False]
    assert s.lambda_min_resolved.tolist() == [True, False, False]
    assert s.lambda_min_status(0) == "ok"
    assert s.lambda_min_status(1).startswith("not converged: residual 3.0e-01")
    assert s.lambda_min_status(2).startswith("failed:")


def test_smallest_end_of_a_complete_spectrum_is_its_last_column():
    s = spectrum(complete=True)
    assert float(s.lambda_min[0]) == 1.0
    assert float(s.lambda_min_residual[1]) == pytest.approx(1e-12)
    assert s.lambda_min_converged.tolist() == [False, True, False]
    assert s.lambda_min_status(1) == s.status(1)[1]
    assert float(s.lambda_max[0]) == 4.0


def test_at_and_select_keep_every_field():
    s = spectrum(**SMALLEST, eigenvectors=torch.arange(18.0).reshape(3, 3, 2))
    for picked in (s.at(1), s.at(-2), s.select(torch.tensor([False, True, False]))):
        assert len(picked) == 1
        for field in dataclasses.fields(s):
            one, whole = getattr(picked, field.name), getattr(s, field.name)
            if isinstance(whole, torch.Tensor):
                torch.testing.assert_close(one, whole[1:2], rtol=0, atol=0)
            else:
                assert one == whole
    assert s.select([2, 0]).matvecs.tolist() == [1, 5]


@pytest.mark.parametrize("i", [3, -4])
def test_sample_out_of_range(i):
    with pytest.raises(IndexError, match="batch has 3"):
        spectrum().status(i)


def test_floor_adds_its_three_sources():
    scale = torch.tensor([2.0, 0.0], dtype=torch.float64)
    expected = 2.0 * (100 * 2.0**-52 + 10 * 1e-7 + 100 * 1e-10)
    torch.testing.assert_close(
        precision_floor(scale, 100, 1e-7, 1e-5),
        torch.tensor([expected, 0.0], dtype=torch.float64),
        rtol=1e-14,
        atol=0.0,
    )


def test_only_rounding_is_clamped():
    values = torch.tensor([1.0, 1e-9, -1e-9, -1e-3, math.nan])
    clamped = clamp_rounding(values, torch.tensor(1e-8))
    torch.testing.assert_close(
        clamped, torch.tensor([1.0, 1e-9, 0.0, -1e-3, math.nan]), equal_nan=True
    )
