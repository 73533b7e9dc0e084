from __future__ import annotations

import pytest
import torch

from leakwatch.spectrum._krylov import KrylovBasis
from leakwatch.spectrum.operators import norm

from .cases import Recording, geometric, mixed_batch, rotated


def grown(matrices, steps, starts=(), newest=True, limit=40):
    """A basis of ``steps`` vectors, with a new chain after each step in ``starts``."""
    basis = KrylovBasis(Recording(matrices), limit, torch.Generator().manual_seed(0))
    active = torch.ones(len(matrices), dtype=torch.bool)
    for step in range(1, steps + 1):
        basis.expand(active)
        if step < steps:
            start = active & (step in starts)
            basis.advance(active, start=start, newest=active & newest)
    return basis


@pytest.mark.parametrize("starts", [(), (7,), (5, 6, 19)])
@pytest.mark.parametrize("newest", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_basis_is_orthonormal_with_several_chains_and_breakdowns(starts, newest, dtype):
    basis = grown(mixed_batch().to(dtype), 40, starts, newest)
    q = basis.vectors[:, :40]
    torch.testing.assert_close(
        q @ q.mT, torch.eye(40).double().expand(5, 40, 40), rtol=0, atol=1e-13
    )


@pytest.mark.parametrize("newest", [False, True])
def test_projection_holds_the_operator(newest):
    """With a full basis Q M Qᵀ is H itself, whatever chains it came from."""
    matrices = mixed_batch()
    basis = grown(matrices, 40, starts=(9, 20), newest=newest)
    q = basis.vectors[:, :40]
    m = basis.projected[:, :40, :40]
    torch.testing.assert_close(q.mT @ m @ q, matrices, rtol=0, atol=1e-12)
    # Nothing is outside a full basis; the bound knows it up to what it doubts.
    assert bool((basis.loose[:, :40] <= 1e-7).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_recurrence_is_exact_for_the_products_as_computed(dtype):
    matrices = rotated(geometric(40, 1e3))[None].to(dtype)
    basis = grown(matrices, 12)
    q = basis.vectors[0, :12]
    products = (matrices[0] @ q.to(dtype).mT).double()
    remainder = products - q.mT @ basis.projected[0, :12, :12]
    inside = remainder[:, :-1].norm(dim=0)
    # bmm and matmul round float32 sums differently, hence not 1e-15 there.
    assert float(inside.max()) < (1e-6 if dtype == torch.float32 else 1e-14)
    torch.testing.assert_close(
        remainder[:, -1].norm(), basis.loose[0, 11], rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize(("n", "steps", "start"), [(30, 25, 6), (12, 11, 4)])
def test_loose_bounds_what_waits_outside(n, steps, start):
    """Close, but never below: also one vector short of a full basis."""
    matrix = rotated(geometric(n, 1e2))
    basis = grown(matrix[None], steps, starts=(start,), limit=n)
    q = basis.vectors[0, :steps]
    outside = matrix @ q.mT
    left = norm(outside - q.mT @ (q @ outside), dim=0)
    loose = basis.loose[0, :steps]
    assert bool((left <= loose + 1e-14).all())
    assert bool((loose <= 1.01 * left + 1e-7).all())
    assert int((loose > 1e-6).sum()) <= 2
    assert float(left[start - 1]) > 1e-6


def test_waiting_chain_goes_on_where_it_stopped():
    matrix = rotated(geometric(30, 1e2))
    alternating = grown(matrix[None], 12, starts=(4,), newest=False, limit=30)
    waited = grown(matrix[None], 12, starts=(4,), newest=True, limit=30)
    # Seven more of its own vectors, or four more and four of the other chain.
    krylov = grown(matrix[None], 8, limit=30).vectors[0, :8]
    inside = alternating.vectors[0, :12]
    torch.testing.assert_close(
        (krylov @ inside.mT).norm(dim=1), torch.ones(8).double(), rtol=0, atol=1e-9
    )
    inside = waited.vectors[0, :12]
    assert float((krylov[5] @ inside.mT).norm()) < 0.99


def test_samples_share_random_vectors():
    matrices = mixed_batch()
    together = grown(matrices, 10, starts=(3,))
    for i in range(5):
        alone = grown(matrices[i : i + 1], 10, starts=(3,))
        torch.testing.assert_close(
            alone.vectors[0, :4], together.vectors[i, :4], rtol=0, atol=1e-12
        )


def test_invariant_subspace_is_seen_and_failure_named():
    operator = Recording(mixed_batch(), fail=(1, 1))
    basis = KrylovBasis(operator, 40, torch.Generator().manual_seed(0))
    active = torch.ones(5, dtype=torch.bool)
    basis.expand(active)
    assert basis.stuck.tolist() == [True, False, False, True, False]
    assert not basis.failed.any()
    basis.advance(active, start=~active, newest=~active)
    assert basis.chain_start.tolist() == [1, 0, 0, 1, 0]
    basis.expand(active)
    assert basis.failed.tolist() == [False, True, False, False, False]
    assert bool(torch.isfinite(basis.vectors).all())
    assert basis.matvecs.tolist() == [2] * 5
