"""Damped least squares at every ε from one space, against dense solves."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from leakwatch.spectrum import damped

from .cases import Case, geometric, mixed_batch, network_like, rotated
from .factors import FACTORS, RecordingFactor, factor

by_name = pytest.mark.parametrize("case", FACTORS, ids=lambda case: case.name)
DAMPINGS = (1e-1, 1e-2, 1e-4)


def right_hand_side(rows: int, batch: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(batch, rows, generator=generator, dtype=torch.float64)


def solved(j: Tensor, b: Tensor, epsilon: float) -> Tensor:
    left, sigma, right = torch.linalg.svd(j.double(), full_matrices=False)
    return right.mT @ (sigma / (sigma.square() + epsilon) * (left.mT @ b))


@by_name
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("products", [4, 200])
def test_every_damping_from_one_space(
    case: Case, dtype: torch.dtype, products: int
) -> None:
    """Within the stated bound, and to 1e-6 when the products were enough."""
    j = factor(case.matrix()).to(dtype)
    b, n = right_hand_side(len(j)), j.shape[1]
    scale = float(torch.linalg.matrix_norm(j.double(), 2)) ** 2 or 1.0
    epsilons = tuple(e * scale for e in DAMPINGS)
    found = damped(j, b, epsilons=epsilons, max_matvecs=products, tol=1e-7)[0]
    assert found is not None
    assert found.products <= min(products, n)
    rounding = 1e-8 if dtype == torch.float64 else 2e-3
    for epsilon in (*epsilons, 3e-3 * scale):  # the last one was not announced
        x = solved(j, b[0], epsilon)
        got = found.at(epsilon)
        size = float(x.norm())
        assert abs(got.value - size) <= got.error * 1.001 + rounding * size
        assert got.length == got.value
        if products == 200:
            assert got.error <= 1e-5 * size
            misfit = float((b[0] - j.double() @ x).norm())
            assert got.misfit == pytest.approx(misfit, rel=1e-3)


def test_the_vector_and_what_it_was_before() -> None:
    """x(ε) itself; after fewer products, as if they had stopped there."""
    j, b = factor(rotated(network_like(40, 1e4))), right_hand_side(47)
    epsilon = 1e-3
    found = damped(j, b, epsilons=(epsilon,), tol=1e-10, keep=True)[0]
    assert found is not None
    torch.testing.assert_close(
        found.vector(epsilon), solved(j, b[0], epsilon), rtol=1e-7, atol=1e-9
    )
    for steps in (0, 5, found.products):
        before = found.earlier(steps)
        assert before.products == steps
        if steps:
            short = damped(j, b, epsilons=(0.0,), max_matvecs=steps, keep=True)[0]
            assert short is not None
            expected, number = short.vector(epsilon), short.at(epsilon)
            torch.testing.assert_close(before.vector(epsilon), expected)
            assert before.at(epsilon).error == pytest.approx(number.error, abs=1e-9)
        else:
            assert not bool(before.vector(epsilon).any())
    with pytest.raises(ValueError, match="between 0 and"):
        found.earlier(found.products + 1)
    forgotten = damped(j, b, epsilons=(epsilon,))[0]
    assert forgotten is not None
    with pytest.raises(ValueError, match="keep=True"):
        forgotten.vector(epsilon)
    with pytest.raises(ValueError, match="keep=True"):
        forgotten.earlier(1)


def test_distance_to_a_point() -> None:
    j, b = factor(rotated(network_like(40, 1e4))), right_hand_side(47)
    centre = right_hand_side(40)
    found = damped(j, b, epsilons=(1e-3,), centre=centre, tol=1e-8)[0]
    assert found is not None
    for epsilon in (1e-1, 1e-3):
        want = float((solved(j, b[0], epsilon) - centre[0]).norm())
        assert found.at(epsilon).value == pytest.approx(want, rel=1e-8)


def test_without_damping_the_bound_needs_the_smallest_eigenvalue() -> None:
    j, b = factor(rotated(network_like(40, 1e2))), right_hand_side(47)
    lam = float(torch.linalg.svdvals(j)[-1]) ** 2
    few = damped(j, b, max_matvecs=10)[0]
    assert few is not None
    want = float(solved(j, b[0], 0.0).norm())
    assert math.isinf(few.at(0.0).error)
    bounded = few.at(0.0, 0.99 * lam)
    assert abs(bounded.value - want) <= bounded.error < math.inf
    lower = torch.tensor([0.99 * lam])
    enough = damped(j, b, lower=lower, tol=1e-6)[0]
    assert enough is not None
    assert enough.products < 40
    assert enough.at(0.0).value == pytest.approx(want, rel=1e-6)


def test_what_an_error_of_the_factor_does() -> None:
    """Shifted singular values enclose what a perturbed J gives, to first order."""
    j, b = factor(rotated(geometric(20, 1e4))), right_hand_side(27)
    found = damped(j, b, tol=1e-10)[0]
    assert found is not None
    error = 1e-4
    size = [found.at(1e-6, shift=s).value for s in (-error, 0.0, error)]
    assert size[0] > size[1] > size[2]
    assert found.at(1e-6).value == size[1]
    inverse = (j.mT @ j + 1e-6 * torch.eye(20).double()).inverse()
    want = float(torch.linalg.matrix_norm(inverse))
    assert found.amplification(1e-6, 0.0, 20) == pytest.approx(want, rel=1e-6)
    assert math.isinf(found.amplification(0.0, 0.0, 21))


def test_dampings_of_their_own_and_one_that_fails() -> None:
    j = torch.stack([factor(m) for m in mixed_batch()])
    b = right_hand_side(47, batch=5)
    epsilons = torch.tensor([[1e-1], [1e-4], [1e-4], [1.0], [1e-2]])
    clean = damped(j, b, epsilons=epsilons)
    broken = damped(RecordingFactor(j, fail=(4, 3)), b, epsilons=epsilons)
    assert broken[4] is None
    for i in range(4):
        epsilon = float(epsilons[i])
        want = float(solved(j[i], b[i], epsilon).norm())
        alone = damped(j[i], b[i : i + 1], epsilons=(epsilon,))
        for found in (clean[i], broken[i], alone[0]):
            assert found is not None
            assert found.at(epsilon).value == pytest.approx(want, rel=1e-3)


@pytest.mark.parametrize("scale", [1e-40, 1e40])
def test_scale_does_not_matter(scale: float) -> None:
    j, b = factor(rotated(network_like(30, 1e3))), right_hand_side(37)
    found = damped(j * scale, b / scale, epsilons=(1e-3 * scale**2,))[0]
    one = damped(j, b, epsilons=(1e-3,))[0]
    assert found is not None
    assert one is not None
    ours = found.at(1e-3 * scale**2).value * scale * scale
    assert ours == pytest.approx(one.at(1e-3).value, rel=1e-9)


def test_nothing_to_solve() -> None:
    """b = 0, and a b that J doesn't reach."""
    j = torch.diag(torch.tensor([1.0, 2.0, 0.0], dtype=torch.float64))
    for b in ([0.0, 0.0, 0.0], [0.0, 0.0, 3.0]):
        found = damped(j, torch.tensor([b]).double())[0]
        assert found is not None
        assert found.at(1e-3).value == found.at(0.0).value == found.at(0.0).error == 0.0
        assert found.at(1e-3).misfit == max(b)


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match=r"b has shape \(1, 2\), .* \(1, 3\)"):
        damped(torch.eye(3), torch.ones(1, 2))
    with pytest.raises(ValueError, match="expected dampings of at least 0"):
        damped(torch.eye(3), torch.ones(1, 3), epsilons=(-1.0,))
    with pytest.raises(ValueError, match="a row of them per sample"):
        damped(torch.eye(3), torch.ones(1, 3), epsilons=torch.ones(2, 1))
