from __future__ import annotations

import math

import pytest
import torch

from leakwatch.spectrum import power

from .cases import (
    CASES,
    Recording,
    blocks,
    eigenvalues_of,
    geometric,
    mixed_batch,
    network_like,
    rotated,
)

by_name = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


@by_name
@both_dtypes
@pytest.mark.parametrize("iterations", [1, 50])
def test_right_or_not_claimed(case, dtype, iterations):
    matrix = case.matrix().to(dtype)
    truth = eigenvalues_of(matrix)
    s = power(matrix, iterations=iterations, smallest=True)
    rounding = float(s.floor[0])
    assert torch.isfinite(s.eigenvalues).all()
    assert torch.isfinite(s.lambda_min).all()
    # A Rayleigh quotient lies between the ends of the spectrum, always.
    assert float(s.lambda_max[0]) <= float(truth[0]) + rounding
    assert float(s.lambda_min[0]) >= float(truth[-1]) - rounding
    if bool(s.converged[0, 0]):
        assert float(s.lambda_max[0] - truth[0]) == pytest.approx(
            0, abs=1e-6 * float(truth[0]) + rounding
        )
    if bool(s.lambda_min_converged[0]):
        assert float(s.lambda_min[0] - truth[-1]) == pytest.approx(
            0, abs=2e-6 * float(truth[-1]) + rounding
        )
    nearest = (truth - s.eigenvalues[0]).abs().min()
    assert float(nearest) <= float(s.residuals[0, 0]) + rounding


@pytest.mark.parametrize(
    "name",
    ["network-like", "double-top", "identity", "zero", "rank-one", "one-by-one"],
)
def test_well_separated_tops_converge(name):
    case = next(case for case in CASES if case.name == name)
    s = power(case.matrix(), iterations=100)
    assert bool(s.converged.all())
    torch.testing.assert_close(
        s.lambda_max, eigenvalues_of(case.matrix())[:1], rtol=1e-12, atol=0
    )


def test_cluster_gives_false_and_not_a_confident_number():
    s = power(rotated(1 + 1e-3 * geometric(30, 10.0)), smallest=True)
    assert s.converged.tolist() == [[False]]
    assert s.lambda_min_converged.tolist() == [False]
    assert s.status(0)[0].startswith("not converged: residual")
    assert float(s.residuals[0, 0]) > 1e-5


def test_shift_at_the_wrong_end_of_a_cluster_is_not_believed():
    """λ_1 too low by more than half the width: the iteration settles on λ_1 itself."""
    matrix = rotated(torch.cat([blocks((1.0, 1)), 1 - 1e-3 * blocks((1.0, 200))]))
    s = power(matrix, iterations=400, tol=1e-3, smallest=True)
    exhausted = power(matrix, iterations=3, smallest=True)
    for result in (s, exhausted):
        wrong = float((result.lambda_min - (1 - 1e-3)).abs()) > 1e-3
        assert not (wrong and bool(result.lambda_min_converged))


def test_published_recipe_overestimates_the_smallest_eigenvalue():
    matrix = rotated(geometric(100, 6e4))
    truth = float(eigenvalues_of(matrix)[-1])
    for iterations in (50, 500):
        s = power(matrix, iterations=iterations, smallest=True)
        assert float(s.lambda_min) > 5 * truth
        assert not s.lambda_min_converged.any()
        assert s.matvecs.tolist() == [2 * iterations]
        assert s.lambda_min_status(0).startswith("not converged")


def test_smallest_end_when_the_recipe_can_work():
    s = power(
        rotated(blocks((3.0, 1), (2.0, 1), (0.5, 4))), iterations=80, smallest=True
    )
    assert bool(s.lambda_min_converged.all())
    assert float(s.lambda_min) == pytest.approx(0.5, rel=1e-10)


def test_residual_bounds_the_error():
    matrix = rotated(network_like(50, 1e3))
    for iterations in (2, 10, 30):
        s = power(matrix, iterations=iterations)
        residual = float(s.residuals[0, 0])
        nearest = float((eigenvalues_of(matrix) - float(s.lambda_max)).abs().min())
        assert nearest <= residual + 1e-14
        if iterations > 2:  # settled on λ_1, whose gap is 0.45
            assert abs(float(s.lambda_max) - 1.0) <= residual**2 / 0.45 + 1e-14
        assert s.matvecs.tolist() == [iterations]


def test_samples_stop_one_by_one_and_finished_rows_are_not_used():
    matrices = mixed_batch()
    operator = Recording(matrices)
    s = power(operator, iterations=60, tol=1e-4)
    counts = operator.counts.tolist()
    assert s.matvecs.tolist() == counts
    assert counts[0] == counts[3] == 1
    assert 1 < counts[1] < 60
    assert bool(s.converged[:2].all())
    torch.testing.assert_close(
        s.lambda_max[:2], eigenvalues_of(matrices)[:2, 0], rtol=1e-6, atol=0
    )


def test_without_tol_every_iteration_is_used():
    s = power(rotated(network_like(20, 1e2)), iterations=70)
    assert s.matvecs.tolist() == [70]


@pytest.mark.parametrize("call", [0, 5, 55])
def test_operator_failing_on_one_row_does_not_hurt_the_others(call):
    matrices = mixed_batch()
    clean = power(matrices, smallest=True)
    s = power(Recording(matrices, fail=(1, call)), smallest=True)
    others = [0, 2, 3, 4]
    assert s.lambda_min[1].isnan()
    assert not s.lambda_min_converged[1]
    if call < 50:
        assert s.lambda_max[1].isnan()
        assert not s.converged[1].any()
        assert int(s.matvecs[1]) == call + 1
        assert s.lambda_min_status(1).startswith("failed:")
    else:  # λ_1 was already known
        assert bool(s.converged[1].all())
    torch.testing.assert_close(
        s.eigenvalues[others], clean.eigenvalues[others], rtol=0, atol=1e-14
    )
    torch.testing.assert_close(
        s.lambda_min[others], clean.lambda_min[others], rtol=0, atol=1e-14
    )


@pytest.mark.parametrize("scale", [1e-200, 1e-30, 1e20, 1e200])
def test_scale_does_not_matter(scale):
    matrix = rotated(network_like(30, 1e3))
    s, unit = power(scale * matrix), power(matrix)
    torch.testing.assert_close(
        s.eigenvalues / scale, unit.eigenvalues, rtol=1e-12, atol=0
    )
    assert torch.equal(s.converged, unit.converged)


def test_random_state_is_left_alone_and_results_repeat():
    matrix = rotated(geometric(30, 1e2))
    before = torch.random.get_rng_state()
    a, b = power(matrix), power(matrix)
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.equal(a.eigenvalues, b.eigenvalues)
    other = power(matrix, generator=torch.Generator().manual_seed(7))
    assert not torch.equal(a.residuals, other.residuals)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"iterations": 0}, "iterations is 0"),
        ({"tol": 0.0}, "tol is 0.0"),
        ({"tol": math.nan}, "tol is nan"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        power(torch.eye(3), **arguments)


@pytest.mark.parametrize(
    "bad",
    [torch.ones(2, 3), torch.ones(2, 2).triu(), torch.full((2, 2), math.nan)],
)
def test_bad_matrix(bad):
    with pytest.raises(ValueError, match="expected"):
        power(bad)
