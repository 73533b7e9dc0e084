from __future__ import annotations

import math

import pytest
import torch

from leakwatch.spectrum import lanczos, power

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
both_dtypes = pytest.mark.parametrize(
    ("dtype", "rounding"), [(torch.float32, 1e-6), (torch.float64, 1e-13)]
)


@by_name
@both_dtypes
@pytest.mark.parametrize("k", [1, 2, 5])
def test_every_case_is_right_and_converges(case, dtype, rounding, k):
    matrix = case.matrix().to(dtype)
    truth = eigenvalues_of(matrix)
    scale = float(truth[0])
    s = lanczos(matrix, k=k)
    k = min(k, len(matrix))
    assert s.eigenvalues.shape == (1, k)
    assert bool(s.converged.all())
    assert int(s.matvecs[0]) <= len(matrix)
    # Much tighter than the residuals, since errors are quadratic in them.
    torch.testing.assert_close(
        s.eigenvalues[0], truth[:k], rtol=0, atol=max(rounding, 1e-8) * scale
    )
    assert bool((s.residuals <= 1e-6 * scale).all())
    assert bool((s.eigenvalues >= 0).all())


@by_name
@both_dtypes
def test_smallest_end_is_right_or_not_claimed(case, dtype, rounding):
    matrix = case.matrix().to(dtype)
    truth = eigenvalues_of(matrix)[-1]
    for products in (4, None):
        s = lanczos(matrix, which="both", max_matvecs=products)
        error = float((s.lambda_min[0] - truth).abs())
        # The floor bounds what float32 products, or clamping, may change.
        if bool(s.lambda_min_converged[0]):
            assert error <= 1e-6 * abs(float(truth)) + float(s.floor[0])
        assert float(s.lambda_min[0] - truth) >= -float(s.floor[0])
        assert error <= float(s.lambda_min_residual[0]) + float(s.floor[0]) or (
            not s.lambda_min_converged[0]
        )
    if dtype == torch.float64:
        assert bool(s.lambda_min_converged[0])


@by_name
@both_dtypes
def test_no_eigenvalue_comes_twice(case, dtype, rounding):
    """All n products, where a plain Lanczos is full of ghosts."""
    matrix = case.matrix().to(dtype)
    n = len(matrix)
    truth = eigenvalues_of(matrix)
    s = lanczos(matrix, k=n, max_matvecs=n)
    near = (s.eigenvalues >= s.lambda_max[:, None] * (1 - 1e-5)).sum()
    expected = (truth >= truth[0] * (1 - 1e-5)).sum()
    assert int(near) == int(expected)
    # float32 products leave some residuals just above the tolerance, honestly.
    assert s.complete or dtype == torch.float32
    torch.testing.assert_close(
        s.eigenvalues[0], truth, rtol=0, atol=rounding * float(truth[0]) + 1e-300
    )


@pytest.mark.parametrize(
    ("multiplicity", "k"), [(1, 2), (2, 2), (2, 3), (3, 2), (3, 4)]
)
def test_multiplicity_is_counted_when_nothing_breaks_down(multiplicity, k):
    """One chain holds one copy; the second must come from a second chain."""
    values = torch.cat([blocks((2.0, multiplicity)), geometric(150, 1e4)])
    matrix = rotated(values)
    s = lanczos(matrix, k=k)
    assert bool(s.converged.all())
    assert int(s.matvecs[0]) < 60
    torch.testing.assert_close(
        s.eigenvalues[0], eigenvalues_of(matrix)[:k], rtol=0, atol=1e-8
    )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("n", "k"), [(20, 3), (7, 2), (12, 11)])
def test_no_chain_starts_where_there_is_no_room(n, k, seed):
    """Up to the last product, when all that is left already waits for its turn."""
    generator = torch.Generator().manual_seed(seed)
    j = torch.randn(3, 50, n, generator=generator, dtype=torch.float64)
    matrices = j.mT @ j
    s = lanczos(matrices, k=k, which="both")
    truth = eigenvalues_of(matrices)
    assert bool(s.converged.all())
    torch.testing.assert_close(s.eigenvalues, truth[:, :k], rtol=1e-12, atol=0)
    torch.testing.assert_close(s.lambda_min, truth[:, -1], rtol=1e-9, atol=0)


def test_second_eigenvalue_is_not_claimed_before_it_is_confirmed():
    values = torch.cat([blocks((2.0, 2)), geometric(150, 1e4)])
    s = lanczos(rotated(values), k=2, max_matvecs=14)
    assert float(s.residuals[0, 1]) < 1e-3
    assert float(s.eigenvalues[0, 1]) < 1.5  # the second copy of 2.0 was missed …
    assert s.converged.tolist() == [[True, False]]  # … and nothing else was said


@both_dtypes
def test_residuals_are_true(dtype, rounding):
    matrices = mixed_batch().to(dtype)
    s = lanczos(matrices, k=4, max_matvecs=15, eigenvectors=True)
    u = s.eigenvectors
    assert u is not None
    found = ~s.eigenvalues.isnan()
    true = (matrices.double() @ u - u * s.eigenvalues[:, None]).norm(dim=1)
    assert bool((true[found] <= 1.001 * s.residuals[found] + rounding).all())
    # And not merely safe: residuals of unconverged values are no larger than needed.
    first = (s.residuals > 1e-4) & (s.matvecs[:, None] == 15)
    assert bool((true[first] > 0.2 * s.residuals[first]).all())


def test_eigenvectors_are_orthonormal():
    s = lanczos(rotated(network_like(80, 1e4)), k=5, eigenvectors=True)
    u = s.eigenvectors
    assert u is not None
    torch.testing.assert_close(
        u[0].mT @ u[0], torch.eye(5).double(), rtol=0, atol=1e-12
    )


def test_samples_stop_one_by_one_and_finished_rows_are_not_used():
    # The operator returns NaN in every row that it is not asked for.
    matrices = mixed_batch()
    operator = Recording(matrices)
    s = lanczos(operator)
    assert torch.equal(s.matvecs, operator.counts)
    assert operator.counts.tolist()[0] == operator.counts.tolist()[3] == 1
    assert operator.calls == int(operator.counts.max())
    assert int(operator.counts.sum()) < 0.7 * 5 * operator.calls
    torch.testing.assert_close(
        s.lambda_max, eigenvalues_of(matrices)[:, 0], rtol=1e-8, atol=0
    )


@pytest.mark.parametrize("k", [1, 3])
def test_result_does_not_depend_on_the_batch(k):
    matrices = mixed_batch()
    together = lanczos(matrices, k=k)
    for i in range(len(matrices)):
        alone = lanczos(matrices[i], k=k)
        torch.testing.assert_close(
            alone.eigenvalues[0], together.eigenvalues[i], rtol=0, atol=1e-10
        )
        assert bool(together.converged[i].all())


@pytest.mark.parametrize("call", [0, 1, 4])
@pytest.mark.parametrize("k", [1, 3])
def test_operator_failing_on_one_row_does_not_hurt_the_others(call, k):
    matrices = mixed_batch()
    clean = lanczos(matrices, k=k, which="both")
    s = lanczos(Recording(matrices, fail=(4, call)), k=k, which="both")
    assert s.eigenvalues[4].isnan().all()
    assert s.residuals[4].isnan().all()
    assert not s.converged[4].any()
    assert not s.lambda_min_converged[4]
    assert int(s.matvecs[4]) == call + 1
    assert s.status(4)[0].startswith("failed:")
    assert s.lambda_min_status(4).startswith("failed:")
    torch.testing.assert_close(
        s.eigenvalues[:4], clean.eigenvalues[:4], rtol=0, atol=1e-14
    )
    assert torch.equal(s.converged[:4], clean.converged[:4])


def test_everything_failing():
    s = lanczos(Recording(torch.eye(4)[None], fail=(0, 0)), eigenvectors=True)
    assert s.eigenvalues.isnan().all()
    assert s.eigenvectors is not None
    assert s.eigenvectors.isnan().all()
    assert not s.converged.any()


def test_ten_products_beat_power_by_far():
    matrix = rotated(geometric(100, 6e4))
    truth = float(eigenvalues_of(matrix)[0])
    by_lanczos = abs(float(lanczos(matrix, max_matvecs=10).lambda_max) / truth - 1)
    by_power = abs(float(power(matrix, iterations=10).lambda_max) / truth - 1)
    assert by_lanczos < 1e-5
    assert by_power > 1e3 * by_lanczos


def test_smallest_of_a_decaying_spectrum_needs_all_products():
    matrix = rotated(geometric(100, 6e4))
    truth = float(eigenvalues_of(matrix)[-1])
    early = lanczos(matrix, which="both", max_matvecs=20)
    # Small against λ_1, and yet several times too large.
    assert float(early.lambda_min_residual) < 1e-2
    assert float(early.lambda_min) > 2 * truth
    assert not early.lambda_min_converged.any()
    late = lanczos(matrix, which="both")
    assert bool(late.lambda_min_converged.all())
    assert float(late.lambda_min) == pytest.approx(truth, rel=1e-9)


@pytest.mark.parametrize("scale", [1e-200, 1e-30, 1e20, 1e200])
def test_scale_does_not_matter(scale):
    matrix = rotated(network_like(30, 1e3))
    s = lanczos(scale * matrix, k=2, which="both")
    unit = lanczos(matrix, k=2, which="both")
    torch.testing.assert_close(
        s.eigenvalues / scale, unit.eigenvalues, rtol=1e-12, atol=0
    )
    assert bool(s.converged.all())
    assert bool(s.lambda_min_converged.all())


def test_values_not_found_are_nan():
    s = lanczos(rotated(geometric(20, 1e3)), k=5, max_matvecs=3)
    assert s.eigenvalues.isnan().tolist() == [[False, False, False, True, True]]
    assert not s.converged.any()
    assert s.status(0)[4].startswith("not converged: no value after 3 products")
    assert not s.complete


def test_more_than_n_asked_for():
    s = lanczos(torch.diag(torch.tensor([3.0, 2.0, 1.0])), k=10)
    torch.testing.assert_close(
        s.eigenvalues, torch.tensor([[3.0, 2.0, 1.0]]).double(), rtol=0, atol=1e-6
    )
    assert s.complete
    assert s.lambda_min_status(0) == "ok"


def test_operator_that_is_not_symmetric_does_not_converge():
    skewed = torch.eye(20, dtype=torch.float64)
    skewed += 0.3 * torch.randn(
        20, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    s = lanczos(Recording(skewed[None]), max_matvecs=20)
    assert not s.converged.any()
    assert float(s.residuals[0, 0]) > 1e-3


def test_indefinite_operator():
    matrix = rotated(torch.cat([geometric(20, 1e2), torch.tensor([-3.0, -0.1])]))
    s = lanczos(matrix, which="both")
    assert bool(s.converged.all())
    assert bool(s.lambda_min_converged.all())
    assert float(s.lambda_max) == pytest.approx(1.0, rel=1e-9)
    assert float(s.lambda_min) == pytest.approx(-3.0, rel=1e-9)


def test_float32_products_stop_at_their_own_rounding():
    matrix = rotated(network_like(200, 1e3)).float()
    s = lanczos(matrix, tol=1e-12)
    assert int(s.matvecs[0]) < 40
    assert not s.converged.any()
    assert float(s.lambda_max) == pytest.approx(1.0, rel=1e-6)


def test_random_state_is_left_alone_and_results_repeat():
    matrix = rotated(geometric(30, 1e2))
    before = torch.random.get_rng_state()
    a, b = lanczos(matrix), lanczos(matrix)
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.equal(a.eigenvalues, b.eigenvalues)
    other = lanczos(matrix, generator=torch.Generator().manual_seed(7))
    assert not torch.equal(a.residuals, other.residuals)
    torch.testing.assert_close(a.eigenvalues, other.eigenvalues, rtol=1e-10, atol=0)


@pytest.mark.parametrize("seed", range(6))
def test_any_starting_vector_will_do(seed):
    matrices = mixed_batch()
    generator = torch.Generator().manual_seed(seed)
    s = lanczos(matrices, k=2, generator=generator)
    assert bool(s.converged.all())
    torch.testing.assert_close(
        s.eigenvalues, eigenvalues_of(matrices)[:, :2], rtol=0, atol=1e-8
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"k": 0}, "k is 0"),
        ({"which": "smallest"}, "which is 'smallest'"),
        ({"tol": 0.0}, "tol is 0.0"),
        ({"tol": -1e-6}, "tol is -1e-06"),
        ({"tol": math.nan}, "tol is nan"),
        ({"max_matvecs": 0}, "max_matvecs is 0"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        lanczos(torch.eye(3), **arguments)


@pytest.mark.parametrize(
    "bad",
    [torch.ones(2, 3), torch.ones(2, 2).triu(), torch.full((2, 2), math.nan)],
)
def test_bad_matrix(bad):
    with pytest.raises(ValueError, match="expected"):
        lanczos(bad)
