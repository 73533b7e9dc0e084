"""Both ends from products with J: never wrong by more than they say."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from leakwatch.spectrum import as_factor, ends
from leakwatch.spectrum.golub_kahan import probable_lower_bound

from .cases import Case, blocks, geometric, mixed_batch, network_like, rotated
from .factors import FACTORS, RecordingFactor, factor

by_name = pytest.mark.parametrize("case", FACTORS, ids=lambda case: case.name)
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def truth_of(j: torch.Tensor) -> torch.Tensor:
    return torch.linalg.svdvals(j.double()).square()


def largest_of(j: torch.Tensor) -> float:
    """λ_1 as ‖J v‖² of the unit vector that LAPACK finds.

    Singular values of LAPACK carry an error of some units of rounding times σ_1, more
    than what they are compared with here. A Rayleigh quotient squares the error of its
    vector, and is formed in long double where the platform has one.
    """
    v = torch.linalg.svd(j.double())[2][0].numpy().astype(np.longdouble)
    image = j.double().numpy().astype(np.longdouble) @ v
    return float((image @ image) / (v @ v))


def rounding_of_largest(j: torch.Tensor) -> float:
    """How far rounding may move λ_1, of what Golub–Kahan makes of products with J.

    A sum of n terms is off by n u in units of Σ|J_ij v_j| at worst, and by some √n u
    with roundings of either sign (Higham and Mary 2019), u = ε/2. For unit vectors
    those units are at most ‖J‖_F, so that J q_j and Jᵀ p_j of one step are off by
    (√n + √rows) u ‖J‖_F together. The Ritz vector is a combination of q_j with
    coefficients y of length 1, and so are the errors of its products, Σ y_j f_j, no
    longer than one of them where they are independent. A change of J by so much moves
    σ_1 by as much, and λ_1 by 2 σ_1 of it: (√n + √rows) ε σ_1 ‖J‖_F.
    """
    rows, n = j.shape
    sums = math.sqrt(n) + math.sqrt(rows)
    frobenius = float(j.double().norm())
    return sums * torch.finfo(j.dtype).eps * math.sqrt(largest_of(j)) * frobenius


@by_name
@both_dtypes
@pytest.mark.parametrize("products", [4, 300])
def test_the_interval_holds_the_smallest_eigenvalue(
    case: Case, dtype: torch.dtype, products: int
) -> None:
    j = factor(case.matrix()).to(dtype)
    truth = truth_of(j)
    found = ends(j, max_matvecs=products)
    low, high = float(found.lower), float(found.upper)
    assert low <= float(truth[-1]) <= high
    assert float(found.lambda_max) <= float(truth[0]) * (1 + 1e-6)
    assert int(found.matvecs) <= min(products, len(truth))
    word = found.status(0).split(":")[0]
    if word == "ok":
        assert float(found.smallest) == pytest.approx(
            float(truth[-1]), rel=1e-2, abs=1e-300
        )
    if word == "unresolved":
        assert float(truth[-1]) <= 4 * float(found.floor)
    if bool(found.converged):
        wrong = abs(float(found.lambda_max) - largest_of(j))
        assert wrong <= float(found.residual) + rounding_of_largest(j)


@by_name
def test_in_float64_both_ends_are_found(case: Case) -> None:
    """λ_1 to 1e-8, λ_min to 1e-3 or said to be unresolved, however small it is."""
    j = factor(case.matrix())
    truth = truth_of(j)
    found = ends(j, max_matvecs=300)
    assert bool(found.converged)
    assert float(found.lambda_max) == pytest.approx(
        float(truth[0]), rel=1e-8, abs=1e-300
    )
    if float(truth[-1]) > 1e-20 * float(truth[0]):
        assert found.status(0) == "ok"
        assert float(found.smallest) == pytest.approx(float(truth[-1]), rel=1e-3)
    elif float(truth[0]) > 0:
        assert found.status(0).startswith("unresolved: at most")


def test_the_factor_resolves_what_products_with_h_can_not() -> None:
    """λ_min at 1e-20 λ_1: 1e-10 of σ_1, and far below eps · λ_1."""
    generator = torch.Generator().manual_seed(3)
    left, right = (
        torch.linalg.qr(torch.randn(25, 25, generator=generator).double())[0]
        for _ in range(2)
    )
    found = ends((left * geometric(25, 1e20).sqrt()) @ right)
    assert found.status(0) == "ok"
    assert float(found.smallest) == pytest.approx(1e-20, rel=1e-4)


@both_dtypes
def test_fewer_rows_than_columns(dtype: torch.dtype) -> None:
    j = torch.randn(2, 5, 9, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = ends(j)
    assert found.lower.tolist() == found.upper.tolist() == [0.0, 0.0]
    assert [found.status(i) for i in range(2)] == ["ok", "ok"]
    torch.testing.assert_close(
        found.lambda_max, truth_of(j)[:, 0], rtol=1e-5, atol=0, check_dtype=False
    )


def test_interval_closes_long_before_all_products_are_spent() -> None:
    j = factor(rotated(network_like(300, 1e3)))
    found = ends(j)
    assert found.status(0) == "ok"
    assert int(found.matvecs) < 270


def test_products_are_not_wasted_where_they_can_not_be_enough() -> None:
    j = factor(rotated(geometric(300, 1e10)))
    found = ends(j, max_matvecs=60)
    assert int(found.matvecs) < 20
    assert bool(found.converged)
    assert found.status(0).startswith("not converged: between 0.0e+00 and ")


def test_only_the_largest_is_asked_for() -> None:
    j = torch.stack(
        [factor(rotated(network_like(80, 1e3))), torch.eye(87, 80).double()]
    )
    found = ends(j, smallest=torch.tensor([False, False]))
    both = ends(j, smallest=torch.tensor([True, False]))
    assert int(found.matvecs[0]) < 20 < int(both.matvecs[0])
    assert int(found.matvecs[1]) == int(both.matvecs[1]) == 1
    torch.testing.assert_close(found.lambda_max, both.lambda_max, rtol=1e-10, atol=0)


@both_dtypes
def test_residual_and_leading_vectors_are_true(dtype: torch.dtype) -> None:
    matrices = torch.stack([factor(m) for m in mixed_batch()]).to(dtype)
    found = ends(matrices, smallest=False, max_matvecs=9)
    h = matrices.double().mT @ matrices.double()
    for i, (values, vectors) in enumerate(found.leading):
        count = len(values)
        eye = torch.eye(count, dtype=torch.float64)
        torch.testing.assert_close(vectors.mT @ vectors, eye, rtol=0, atol=1e-10)
        left = (h[i] @ vectors - vectors * values).norm(dim=0)
        assert bool((left <= 2e-3 * values + 1e-6 * float(h[i].norm())).all())
        if count:
            allowed = 1.01 * float(found.residual[i])
            assert float(left[0]) <= allowed + 1e-7 * float(values[0])


@pytest.mark.parametrize("call", [0, 1, 7])
def test_one_sample_fails_alone(call: int) -> None:
    matrices = torch.stack([factor(m) for m in mixed_batch()])
    clean = ends(matrices)
    operator = RecordingFactor(matrices, fail=(4, call))
    found = ends(operator)
    assert found.status(4).startswith("failed:")
    assert math.isnan(float(found.lower[4]))
    assert not bool(found.converged[4])
    for name in ("lambda_max", "smallest", "lower", "upper", "residual"):
        ours, theirs = getattr(found, name)[:4], getattr(clean, name)[:4]
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-30)
    assert bool((operator.backwards <= found.matvecs).all())
    assert bool((found.matvecs <= operator.forwards).all())


def test_result_does_not_depend_on_the_batch() -> None:
    matrices = torch.stack([factor(m) for m in mixed_batch()])
    together = ends(matrices)
    for i, matrix in enumerate(matrices):
        alone = ends(matrix)
        for name in ("lambda_max", "smallest", "lower", "upper"):
            torch.testing.assert_close(
                getattr(alone, name)[0],
                getattr(together, name)[i],
                rtol=1e-9,
                atol=1e-28,
            )


@pytest.mark.parametrize("scale", [1e-150, 1e-30, 1e30, 1e150])
def test_scale_does_not_matter(scale: float) -> None:
    j = factor(rotated(network_like(30, 1e3)))
    found, one = ends(scale * j), ends(j)
    for name in ("lambda_max", "smallest", "lower", "upper"):
        ours = getattr(found, name) / scale / scale
        torch.testing.assert_close(ours, getattr(one, name), rtol=1e-9, atol=0)


def test_the_lower_end_is_wrong_as_rarely_as_it_says() -> None:
    """With a risk of 20 % and 100 starts."""
    j = factor(rotated(geometric(30, 1e3)))
    truth = float(truth_of(j)[-1])
    wrong = 0
    for seed in range(100):
        generator = torch.Generator().manual_seed(seed)
        found = ends(j, max_matvecs=12, risk=0.2, generator=generator, tol=1e-12)
        wrong += float(found.lower) > truth
    assert wrong <= 20


def test_the_lower_bound_is_sharp_for_a_known_polynomial() -> None:
    # One Ritz value and one coupling: θ − t = b/γ, γ = risk √(π/2n).
    bound = probable_lower_bound(
        torch.tensor([1.0]).double(), torch.tensor([1e-6]).double(), 50, 0.01
    )
    assert 1 - bound == pytest.approx(
        1e-6 / (0.01 * math.sqrt(math.pi / 100)), rel=1e-6
    )
    nothing = probable_lower_bound(
        torch.tensor([1.0]).double(), torch.tensor([0.5]).double(), 50, 0.01
    )
    assert nothing == 0.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tol": 0.0}, "tol is 0.0, expected a number between 0 and 1"),
        ({"risk": 1.0}, "risk is 1.0, expected a number between 0 and 1"),
        ({"max_matvecs": 0}, "max_matvecs is 0, expected at least 1"),
    ],
)
def test_bad_arguments(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ends(torch.eye(3), **arguments)


def test_bad_factors() -> None:
    with pytest.raises(TypeError, match="got str, expected a tensor"):
        as_factor("J")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="none empty"):
        as_factor(torch.zeros(0, 3))
    with pytest.raises(ValueError, match=r"float32 or torch\.float64"):
        as_factor(torch.eye(3).half())


def test_random_state_is_left_alone() -> None:
    before = torch.random.get_rng_state()
    j = factor(rotated(blocks((1.0, 3), (0.1, 4))))
    first, second = ends(j), ends(j)
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.equal(first.upper, second.upper)
