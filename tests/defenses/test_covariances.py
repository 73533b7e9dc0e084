from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from score_problems import Problem
from torch import Tensor

from leakwatch.defenses import Covariance, Diagonal, InRange, Isotropic, Samples

KINDS = ("isotropic", "diagonal", "in range")


def made(kind: str, samples: Samples) -> tuple[Covariance, Callable[[int], Tensor]]:
    """A covariance of each kind, and the same as dense matrices."""
    size = samples.gradients.size
    stream = torch.Generator().manual_seed(1)
    if kind == "isotropic":
        s2 = torch.tensor([0.04, 0.25]).double()
        return Isotropic(s2, size), lambda i: s2[i] * torch.eye(size).double()
    if kind == "diagonal":
        variance = 0.1 + torch.rand(2, size, generator=stream).double()
        return Diagonal(variance), lambda i: torch.diag(variance[i])
    variance = torch.rand(2, 64, generator=stream).double()
    variance[:, ::3] = 0.0

    def dense(i: int) -> Tensor:
        v = samples.basis.singular(i)
        return (v.T * variance[i]) @ v

    return InRange(samples, variance), dense


@pytest.mark.parametrize("kind", KINDS)
def test_traces_and_what_arrives_along_each_direction(
    kind: str, samples: Samples
) -> None:
    covariance, dense = made(kind, samples)
    along = covariance.along(samples.basis)
    for i in range(2):
        matrix, v = dense(i), samples.basis.singular(i)
        torch.testing.assert_close(
            covariance.total[i], matrix.trace(), rtol=1e-6, atol=0.0
        )
        expected = torch.einsum("ij,jk,ik->i", v, matrix, v)
        torch.testing.assert_close(along[i], expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("coefficients", ["gaussian", "sign"])
def test_draws_have_the_covariance(
    kind: str, coefficients: str, samples: Samples, generator: torch.Generator
) -> None:
    covariance, dense = made(kind, samples)
    # Quadratic forms with three vectors; exact ones by the dense matrix.
    probes = samples.basis.singular(0)[[0, 1, 30]] + 0.02
    values = []
    for _ in range(250):
        values.append(covariance.draw(generator, coefficients)[0] @ probes.T)
    found = torch.stack(values)
    exact = torch.einsum("ij,jk,ik->i", probes, dense(0), probes)
    # A relative error of √(2/250) for Gaussian numbers, five of them.
    torch.testing.assert_close(found.square().mean(0), exact, rtol=0.45, atol=1e-12)
    mean = found.mean(0).abs()
    assert bool((mean <= 5 * (exact / 250).sqrt() + 1e-12).all())


def test_signs_leave_the_norm_the_same_in_every_draw(
    samples: Samples, generator: torch.Generator
) -> None:
    covariance, _ = made("in range", samples)
    for _ in range(3):
        square = covariance.draw(generator, "sign").square().sum(1)
        torch.testing.assert_close(square, covariance.total, rtol=1e-7, atol=0.0)


@pytest.mark.parametrize("kind", ["isotropic", "diagonal"])
def test_noise_of_a_row_does_not_depend_on_the_rows_that_follow(
    kind: str, samples: Samples
) -> None:
    covariance, _ = made(kind, samples)
    both = covariance.draw(torch.Generator().manual_seed(3))
    first = type(
        covariance
    )(  # type: ignore[call-arg]
        covariance.variance[:1],  # type: ignore[attr-defined]
        *([covariance.size] if kind == "isotropic" else []),  # type: ignore[attr-defined]
    )
    assert torch.equal(first.draw(torch.Generator().manual_seed(3))[0], both[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prior_std", [None, 0.3])
def test_the_best_error_is_that_of_generalised_least_squares(
    kind: str, prior_std: float | None, problem: Problem, samples: Samples
) -> None:
    covariance, dense = made(kind, samples)
    found = covariance.best_error(samples.basis, prior_std)
    for i, oracle in enumerate(problem.oracles):
        # A little isotropic noise makes the matrix invertible; its share is below 1e-6.
        extra = 1e-10 * torch.eye(len(oracle.j)).double() if kind == "in range" else 0.0
        info = oracle.j.T @ torch.linalg.solve(dense(i) + extra, oracle.j)
        if prior_std is not None:
            info = info + torch.eye(64).double() / prior_std**2
        expected = torch.linalg.inv(info).trace()
        torch.testing.assert_close(found[i], expected, rtol=2e-5, atol=0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_without_noise_everything_is_found(kind: str, samples: Samples) -> None:
    covariance, _ = made(kind, samples)
    silent = covariance.scaled(0.0)
    for prior_std in (None, 0.3):
        error = silent.best_error(samples.basis, prior_std)
        assert error.tolist() == [0.0, 0.0]


def test_hidden_directions_count_the_prior(partial: Samples) -> None:
    size = partial.gradients.size
    tiny = Isotropic(torch.tensor([1e-30, 1e-30]).double(), size)
    error = tiny.best_error(partial.basis, 0.5)
    expected = torch.full_like(error, 44 * 0.25)
    torch.testing.assert_close(error, expected, rtol=1e-9, atol=0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_whitening_leaves_isotropic_noise(kind: str, samples: Samples) -> None:
    covariance, dense = made(kind, samples)
    through, std = covariance.whitening(1, 1e-3)
    matrix = dense(1)
    eye = torch.eye(len(matrix)).double()
    if kind == "in range":
        # As if noise of the floor were everywhere: s(Σ + s²I)^−½.
        matrix = matrix + std**2 * eye
    left = through.apply(through.apply(matrix).T)
    torch.testing.assert_close(left, std**2 * eye, rtol=0.0, atol=1e-6 * std**2)
    assert std > 0


def test_sums_of_messages(samples: Samples) -> None:
    isotropic, _ = made("isotropic", samples)
    summed = isotropic.summed(0.5)
    assert summed is not None
    assert summed.total[0] == pytest.approx(0.25 * float(isotropic.total.sum()))
    diagonal, _ = made("diagonal", samples)
    summed = diagonal.summed(0.5)
    assert summed is not None
    assert summed.total[0] == pytest.approx(0.25 * float(diagonal.total.sum()))
    in_range, _ = made("in range", samples)
    assert in_range.summed(0.5) is None
    one = samples.select(slice(0, 1))
    alone = InRange(one, torch.arange(64.0)[None].double())
    summed = alone.summed(0.5)
    assert summed is not None
    torch.testing.assert_close(summed.variance, 0.25 * alone.variance)


def test_noise_along_singular_directions_knows_only_its_own(
    samples: Samples, partial: Samples
) -> None:
    in_range, _ = made("in range", samples)
    with pytest.raises(ValueError, match=r"pass samples\.basis"):
        in_range.along(partial.basis)


def test_unknown_coefficients() -> None:
    covariance = Isotropic(torch.ones(1).double(), 3)
    with pytest.raises(ValueError, match="'gaussian', 'sign', got 'uniform'"):
        covariance.draw(torch.Generator(), "uniform")  # type: ignore[arg-type]


def test_expected_square_of_isotropic_noise(generator: torch.Generator) -> None:
    covariance = Isotropic(torch.tensor([0.09]).double(), 50)
    assert float(covariance.total[0]) == pytest.approx(4.5)
    squares = torch.stack(
        [covariance.draw(generator).square().sum() for _ in range(400)]
    )
    error = 4 * 0.09 * math.sqrt(2 * 50 / 400)
    assert abs(float(squares.mean()) - 4.5) < error
