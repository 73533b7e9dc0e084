"""The basis that Lanczos grows: orthonormal, and exact for the products it saw."""

from __future__ import annotations

import pytest
import torch

from leakwatch.spectrum.lanczos import _Basis

from .cases import Recording, geometric, mixed_batch, rotated


def grown(matrices, steps, starts=(), newest=True):
    """A basis of ``steps`` vectors, with a new chain after each step in ``starts``."""
    batch = len(matrices)
    basis = _Basis(Recording(matrices), torch.Generator().manual_seed(0))
    active = torch.ones(batch, dtype=torch.bool)
    lane = torch.zeros(batch, dtype=torch.int64)
    lanes = [1] * batch
    for step in range(1, steps + 1):
        basis.step(lane, active)
        for i in range(batch):
            ready = basis.open[i].nonzero().flatten().tolist()
            if step < steps and (step in starts or not ready):
                basis.start(i, lanes[i])
                lane[i] = lanes[i]
                lanes[i] += 1
            elif ready:
                lane[i] = ready[-1] if newest else ready[(step + 1) % len(ready)]
    return basis


@pytest.mark.parametrize("starts", [(), (7,), (5, 6, 19)])
@pytest.mark.parametrize("newest", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_basis_is_orthonormal_with_several_chains_and_breakdowns(starts, newest, dtype):
    basis = grown(mixed_batch().to(dtype), 40, starts, newest)
    q = basis.vectors
    torch.testing.assert_close(
        q @ q.mT, torch.eye(40).double().expand(5, 40, 40), rtol=0, atol=1e-13
    )


@pytest.mark.parametrize("newest", [False, True])
def test_projection_holds_the_operator(newest):
    """With a full basis Q M Qᵀ is H itself, whatever chains it came from."""
    matrices = mixed_batch()
    basis = grown(matrices, 40, starts=(9, 20), newest=newest)
    q, m = basis.vectors, basis.projected
    torch.testing.assert_close(q.mT @ m @ q, matrices, rtol=0, atol=1e-12)
    assert not basis.open.any()


@pytest.mark.parametrize("starts", [(), (4,), (3, 8)])
@pytest.mark.parametrize("newest", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_recurrence_is_exact_for_the_products_as_computed(dtype, newest, starts):
    """H Q = Q M + W C, also where chains wait outside."""
    matrices = rotated(geometric(40, 1e3))[None].to(dtype)
    basis = grown(matrices, 12, starts, newest)
    q = basis.vectors[0]
    products = (matrices[0] @ q.to(dtype).mT).double()
    held = q.mT @ basis.projected[0] + basis.waiting[0].mT @ basis.coupling[0]
    # bmm and matmul round float32 sums differently, hence not 1e-14 there.
    tolerance = 1e-6 if dtype == torch.float32 else 1e-14
    assert float((products - held).norm(dim=0).max()) < tolerance
    waiting = basis.waiting[0]
    torch.testing.assert_close(
        waiting @ waiting.mT, torch.eye(len(waiting)).double(), rtol=0, atol=1e-13
    )


def test_waiting_chain_goes_on_where_it_stopped():
    matrix = rotated(geometric(30, 1e2))
    alternating = grown(matrix[None], 12, starts=(4,), newest=False)
    waited = grown(matrix[None], 12, starts=(4,), newest=True)
    # Seven more of its own vectors, or four more and four of the other chain.
    krylov = grown(matrix[None], 8).vectors[0]
    inside = alternating.vectors[0]
    torch.testing.assert_close(
        (krylov @ inside.mT).norm(dim=1), torch.ones(8).double(), rtol=0, atol=1e-9
    )
    inside = waited.vectors[0]
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
    basis = _Basis(operator, torch.Generator().manual_seed(0))
    active = torch.ones(5, dtype=torch.bool)
    lane = torch.zeros(5, dtype=torch.int64)
    basis.step(lane, active)
    assert basis.open[:, 0].tolist() == [False, True, True, False, True]
    assert not basis.failed.any()
    for i in (0, 3):
        basis.start(i, 1)
        lane[i] = 1
    basis.step(lane, active)
    assert basis.failed.tolist() == [False, True, False, False, False]
    assert bool(torch.isfinite(basis.vectors).all())
    assert basis.matvecs.tolist() == [2] * 5
