from __future__ import annotations

import math

import pytest
import torch

from leakwatch.spectrum import exact
from leakwatch.spectrum import exact as exact_function

from .cases import (
    CASES,
    Recording,
    blocks,
    eigenvalues_of,
    geometric,
    mixed_batch,
    rotated,
)

EPS32 = float(torch.finfo(torch.float32).eps)
by_name = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@by_name
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("eigenvectors", [False, True])
def test_every_case(case, dtype, eigenvectors):
    matrix = case.matrix().to(dtype)
    truth = eigenvalues_of(matrix)
    scale = float(truth.abs().max())
    s = exact(matrix, eigenvectors=eigenvectors)
    assert s.eigenvalues.dtype == torch.float64
    assert s.complete
    assert s.method == "exact"
    assert s.matvecs.tolist() == [0]
    assert bool(s.converged.all())
    floor = float(s.floor[0])
    # The only difference allowed besides float64 rounding is the clamping of noise.
    kept = truth.abs() > floor
    torch.testing.assert_close(
        s.eigenvalues[0][kept], truth[kept], rtol=0, atol=1e-14 * scale
    )
    assert bool((s.eigenvalues[0][~kept].abs() <= floor).all())
    assert bool((s.eigenvalues >= 0).all())
    assert bool((s.eigenvalues.diff(dim=1) <= 0).all())
    assert bool((s.residuals <= 100 * len(matrix) * 2.3e-16 * scale).all())


@by_name
def test_no_value_comes_twice(case):
    values = exact(case.matrix()).eigenvalues[0]
    near = (values >= values[0] - 1e-6 * values[0].abs()).sum()
    assert int(near) == case.multiplicity


def test_eigenvectors_are_orthonormal_and_fit():
    matrices = torch.stack([rotated(geometric(20, 1e3), seed) for seed in range(3)])
    s = exact(matrices, eigenvectors=True)
    u = s.eigenvectors
    assert u is not None
    torch.testing.assert_close(
        u.mT @ u, torch.eye(20).double().expand(3, 20, 20), rtol=0, atol=1e-13
    )
    torch.testing.assert_close(
        (matrices @ u - u * s.eigenvalues[:, None]).norm(dim=1),
        s.residuals,
        rtol=1e-3,
        atol=1e-17,
    )


def test_operator_by_products_equals_matrix():
    matrices = mixed_batch(12)
    operator = Recording(matrices)
    s = exact(operator)
    assert s.matvecs.tolist() == [12] * 5
    assert operator.counts.tolist() == [12] * 5
    torch.testing.assert_close(
        s.eigenvalues, exact(matrices).eigenvalues, rtol=0, atol=1e-14
    )


def test_operator_with_dense_is_not_multiplied():
    class Dense(Recording):
        def dense(self):
            return self._matrices.double()

    operator = Dense(mixed_batch(12).float())
    s = exact(operator)
    assert operator.calls == 0
    assert s.matvecs.tolist() == [0] * 5
    # float64 entries from a float32 operator: no better than float32 unless stated.
    float32_floor = exact(mixed_batch(12).float()).floor
    torch.testing.assert_close(s.floor, float32_floor, rtol=1e-5, atol=0)
    assert float(exact(operator, factor_eps=EPS32).floor[1]) < 1e-11


def test_wrong_dense_is_refused():
    class Dense(Recording):
        def dense(self):
            return self._matrices[:, :2, :2]

    with pytest.raises(ValueError, match="dense"):
        exact(Dense(torch.eye(3)[None]))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_sample_that_is_not_finite_does_not_hurt_the_others(bad):
    matrices = mixed_batch(10)
    clean = exact(matrices)
    broken = matrices.clone()
    broken[1, 3, 4] = bad
    s = exact(broken)
    good = [0, 2, 3, 4]
    assert s.eigenvalues[1].isnan().all()
    assert s.converged.all(1).tolist() == [True, False, True, True, True]
    assert not s.converged[1].any()
    torch.testing.assert_close(
        s.eigenvalues[good], clean.eigenvalues[good], rtol=0, atol=0
    )
    assert s.status(1)[0].startswith("failed:")


def test_operator_failing_on_one_row():
    matrices = mixed_batch(10)
    operator = Recording(matrices, fail=(2, 4))
    s = exact(operator)
    assert s.eigenvalues[2].isnan().all()
    assert operator.counts.tolist() == [10, 10, 5, 10, 10]
    torch.testing.assert_close(
        s.eigenvalues[4], exact(matrices[4]).eigenvalues[0], rtol=0, atol=1e-15
    )


def test_eigensolver_that_gives_up_costs_one_sample(monkeypatch):
    matrices = torch.stack([rotated(geometric(5, 10.0), seed) for seed in range(3)])
    real, poison = torch.linalg.eigvalsh, float(matrices[1, 0, 0])

    def stubborn(h):
        if float(h[0, 0]) == poison:
            raise torch.linalg.LinAlgError("failed to converge")
        return real(h)

    monkeypatch.setattr(torch.linalg, "eigvalsh", stubborn)
    s = exact_function(matrices)
    assert s.converged.all(1).tolist() == [True, False, True]
    assert s.eigenvalues[1].isnan().all()


def test_eigenvectors_that_can_not_be_found_cost_one_sample(monkeypatch):
    matrices = torch.stack([rotated(geometric(5, 10.0), seed) for seed in range(3)])
    real, poison = torch.linalg.eigh, float(matrices[1, 0, 0])

    def stubborn(h):
        if float(h[0, 0]) == poison:
            raise torch.linalg.LinAlgError("failed to converge")
        return real(h)

    monkeypatch.setattr(torch.linalg, "eigh", stubborn)
    s = exact_function(matrices, eigenvectors=True)
    assert s.eigenvalues.isnan().all(1).tolist() == [False, True, False]
    assert s.eigenvectors.isnan().flatten(1).all(1).tolist() == [False, True, False]
    torch.testing.assert_close(
        s.eigenvalues[2], real(matrices[2])[0].flip(0), rtol=0, atol=0
    )


def test_clearly_negative_eigenvalue_is_kept_and_sorted():
    matrix = rotated(torch.tensor([-0.5, 2.0, 0.0, 1.0]))
    s = exact(matrix)
    torch.testing.assert_close(
        s.eigenvalues[0],
        torch.tensor([2.0, 1.0, 0.0, -0.5], dtype=torch.float64),
        rtol=0,
        atol=1e-14,
    )
    assert [t.split(":")[0] for t in s.status(0)] == ["ok", "ok", "unresolved", "ok"]


def test_rounding_in_float32_entries_is_unresolved_not_negative():
    deficient = torch.cat([geometric(10, 50.0), blocks((0.0, 30))])
    s = exact(rotated(deficient).float())
    assert s.resolved.sum(1).tolist() == [10]
    assert bool((s.eigenvalues >= 0).all())


@pytest.mark.parametrize(("rows", "columns"), [(80, 50), (200, 100), (40, 60)])
def test_factor_floor_covers_float32_jacobians(rows, columns):
    """H from a float32 factor spans 12 decades, and the floor says how many hold."""
    rank = min(rows, columns)
    generator = torch.Generator().manual_seed(1)
    left, _ = torch.linalg.qr(
        torch.randn(rows, rank, generator=generator, dtype=torch.float64)
    )
    right, _ = torch.linalg.qr(
        torch.randn(columns, rank, generator=generator, dtype=torch.float64)
    )
    sigma = geometric(rank, 1e6)
    j = ((left * sigma) @ right.mT).float().double()
    truth = torch.cat(
        [sigma.square(), torch.zeros(columns - rank, dtype=torch.float64)]
    )
    s = exact(j.mT @ j, factor_eps=EPS32)
    floor = float(s.floor[0])
    error = (s.eigenvalues[0] - truth).abs()
    assert bool((error <= 2 * (truth * floor).sqrt() + floor).all())
    resolved = s.resolved[0]
    assert bool((error[resolved] <= 0.01 * truth[resolved]).all())
    assert not resolved[rank:].any()
    # Worth having: it resolves what float32 entries of H could not.
    plain = exact((j.float().mT @ j.float()).double(), arithmetic_eps=EPS32)
    assert int(resolved.sum()) > 1.6 * int(plain.resolved.sum())
    plain_error = (plain.eigenvalues[0] - truth).abs()
    assert bool((plain_error <= plain.floor[0]).all())


def test_gradients_are_not_tracked():
    matrix = torch.eye(3, requires_grad=True)
    assert not exact(matrix, eigenvectors=True).eigenvalues.requires_grad


@pytest.mark.parametrize("name", ["arithmetic_eps", "factor_eps"])
@pytest.mark.parametrize("value", [-1e-7, 1.0, math.nan])
def test_bad_epsilon(name, value):
    with pytest.raises(ValueError, match=name):
        exact(torch.eye(2), **{name: value})


@pytest.mark.parametrize(
    "bad", [torch.ones(2, 3), torch.ones(2, 2).int(), torch.ones(2, 2).triu()]
)
def test_bad_matrix(bad):
    with pytest.raises(ValueError, match="expected"):
        exact(bad)
