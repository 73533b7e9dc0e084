"""Every score against its paper's formula on a dense autograd Jacobian, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from score_problems import CASES, Oracle, Problem
from torch import Tensor

import leakwatch.scores as scores_package
from leakwatch.scores import ScoreResult, available, score
from leakwatch.scores.settings import UNIFORM_STD

NOISE, EPSILON, TARGET = 3e-3, 1e-4, 25.0
TIGHT = {"rtol": 1e-8, "atol": 0.0}
ALL = available()


def run(problem: Problem, **options: object) -> ScoreResult:
    arguments: dict[str, object] = {"scores": ALL, "dtype": torch.float64, **options}
    result = score(problem.net, problem.pixels, problem.y, **arguments)
    for name in result:
        assert [s.word for s in result.status[name]] == ["ok"] * 2, (
            name,
            result.status[name],
        )
    return result


def check(actual: Tensor, expected: list[Tensor | float]) -> None:
    values = torch.tensor([float(e) for e in expected], dtype=torch.float64)
    torch.testing.assert_close(actual, values, **TIGHT)


@pytest.fixture(scope="module")
def plain(problem: Problem) -> ScoreResult:
    return run(problem, noise_std=NOISE, target_psnr=TARGET)


def test_norms(problem: Problem, plain: ScoreResult) -> None:
    check(plain["grad_norm"], [o.g.norm() for o in problem.oracles])
    check(plain["jacobian_norm"], [o.j.norm() for o in problem.oracles])
    losses = [o.loss(o.pixels.flatten()).detach() for o in problem.oracles]
    check(plain["loss"], losses)


def test_lavp_is_the_hessian_of_matching(problem: Problem, plain: ScoreResult) -> None:
    """Also of the fused score; eigenvalues of autograd Hessians, no J at all."""
    oracle = problem.oracles[0]
    l2 = oracle.hessian(lambda g, true: 0.5 * (g - true).square().sum())
    cos = oracle.hessian(lambda g, true: 1 - torch.cosine_similarity(g, true, 0))
    a, b = torch.linalg.eigvalsh(l2), torch.linalg.eigvalsh(cos)
    check(plain["lavp_l2_max"][:1], [a[-1]])
    check(plain["lavp_l2_min"][:1], [a[0]])
    check(plain["lavp_cos_max"][:1], [b[-1]])
    check(plain["lavp_cos_min"][:1], [b[0]])
    check(plain["lavp_fusion"][:1], [(a[-1] * b[0]).sqrt()])


def test_lavp_is_the_svd_of_the_jacobian(problem: Problem, plain: ScoreResult) -> None:
    squares = [torch.linalg.svdvals(o.j).square() for o in problem.oracles]
    assert plain.eigenvalues is not None
    torch.testing.assert_close(plain.eigenvalues, torch.stack(squares), **TIGHT)
    check(plain["lavp_l2_max"], [s[0] for s in squares])
    check(plain["lavp_l2_min"], [s[-1] for s in squares])
    cosine = []
    for o in problem.oracles:
        projected = o.j - torch.outer(o.g, o.g @ o.j) / (o.g @ o.g)
        cosine.append(torch.linalg.svdvals(projected / o.g.norm()).square())
    check(plain["lavp_cos_max"], [s[0] for s in cosine])
    check(plain["lavp_cos_min"], [s[-1] for s in cosine])
    fused = [(s[0] * c[-1]).sqrt() for s, c in zip(squares, cosine, strict=True)]
    check(plain["lavp_fusion"], fused)


def test_i2f_under_gaussian_noise(problem: Problem, plain: ScoreResult) -> None:
    inverses = [torch.linalg.inv(o.h) for o in problem.oracles]
    errors = [NOISE * inv.diagonal().sum().sqrt() for inv in inverses]
    check(plain["i2f"], errors)
    check(plain["i2f_psnr"], [decibel(e, problem.d_x) for e in errors])
    check(plain["i2f_nom"], [NOISE * o.j.norm() for o in problem.oracles])
    tops = [torch.linalg.matrix_norm(o.j, 2) ** 2 for o in problem.oracles]
    nominators = zip(problem.oracles, tops, strict=True)
    check(plain["i2f_lb"], [NOISE * o.j.norm() / top for o, top in nominators])


def test_damped_i2f_under_gaussian_noise(problem: Problem) -> None:
    result = run(problem, scores=["i2f"], noise_std=NOISE, epsilon=EPSILON)
    expected = []
    for o in problem.oracles:
        damped = o.h + EPSILON * torch.eye(problem.d_x).double()
        expected.append(NOISE * torch.linalg.solve(damped, o.j.T).norm())
    check(result["i2f"], expected)


@pytest.mark.parametrize("epsilon", [0.0, EPSILON])
def test_i2f_of_a_given_perturbation(problem: Problem, epsilon: float) -> None:
    delta = perturbation(problem)
    result = run(
        problem, scores=["i2f", "i2f_lb"], noise_std=NOISE, epsilon=epsilon, delta=delta
    )
    exact, bound, numerator = [], [], []
    for o, d in zip(problem.oracles, delta, strict=True):
        pulled = o.j.T @ d
        damped = o.h + epsilon * torch.eye(problem.d_x).double()
        exact.append(torch.linalg.solve(damped, pulled).norm())
        numerator.append(pulled.norm())
        bound.append(pulled.norm() / torch.linalg.matrix_norm(o.j, 2) ** 2)
    check(result["i2f"], exact)
    check(result["i2f_psnr"], [decibel(e, problem.d_x) for e in exact])
    check(result["i2f_lb"], bound)
    check(result["i2f_nom"], numerator)


def test_bayes_with_an_isotropic_prior(problem: Problem, plain: ScoreResult) -> None:
    covariance = torch.eye(problem.d_x).double() * UNIFORM_STD**2
    check_bayes(problem, plain, covariance)


def test_bayes_with_a_full_prior_covariance(problem: Problem) -> None:
    covariance = smooth_covariance(problem.d_x)
    result = run(
        problem,
        scores="bayes",
        noise_std=NOISE,
        target_psnr=TARGET,
        prior=covariance,
    )
    check_bayes(problem, result, covariance)


def check_bayes(problem: Problem, result: ScoreResult, covariance: Tensor) -> None:
    errors, bits = [], []
    for o in problem.oracles:
        errors.append(posterior(o, covariance, NOISE).diagonal().sum().sqrt())
        # In the space of the gradient, where no eigenvalue of H is formed.
        mutual = (
            torch.eye(problem.d_theta).double() + o.j @ covariance @ o.j.T / NOISE**2
        )
        bits.append(0.5 * torch.logdet(mutual) / math.log(2))
    check(result["i2f_bayes"], errors)
    check(result["i2f_bayes_psnr"], [decibel(e, problem.d_x) for e in errors])
    check(result["leaked_bits"], bits)
    tops = [torch.linalg.matrix_norm(o.j, 2) for o in problem.oracles]
    check(result["fisher_information_loss"], [top / NOISE for top in tops])
    for o, s in zip(problem.oracles, result["noise_std_for_psnr"], strict=True):
        reached = posterior(o, covariance, float(s)).diagonal().sum().sqrt()
        assert decibel(reached, problem.d_x) == pytest.approx(TARGET, rel=1e-9)


@pytest.mark.parametrize("full", [False, True])
def test_bayes_of_a_given_perturbation(problem: Problem, full: bool) -> None:
    delta = perturbation(problem)
    prior_mean = 0.4 + 0.1 * torch.rand(problem.case.shape).double()
    covariance = torch.eye(problem.d_x).double() * 0.3**2
    prior: dict[str, object] = {"prior_std": 0.3}
    if full:
        covariance = smooth_covariance(problem.d_x)
        prior = {"prior": covariance}
    result = run(
        problem,
        scores="i2f_bayes",
        noise_std=NOISE,
        delta=delta,
        prior_mean=prior_mean,
        **prior,
    )
    expected = []
    for o, d in zip(problem.oracles, delta, strict=True):
        # The minimiser of ‖g + J(x'−x) − (g+δ)‖²/s² + (x'−μ)ᵀC⁻¹(x'−μ).
        precision = torch.linalg.inv(covariance)
        truth, mean = o.pixels.flatten(), prior_mean.flatten()
        right = o.j.T @ (o.j @ truth + d) / NOISE**2 + precision @ mean
        guess = torch.linalg.solve(o.h / NOISE**2 + precision, right)
        expected.append((guess - truth).norm())
    check(result["i2f_bayes"], expected)


def test_noise_for_a_psnr_comes_back_as_that_psnr(
    problem: Problem, plain: ScoreResult
) -> None:
    s = float(plain["noise_std_for_psnr"][1])
    predicted = run(problem, scores="i2f_bayes_psnr", noise_std=s)
    assert float(predicted["i2f_bayes_psnr"][1]) == pytest.approx(TARGET, rel=1e-9)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_pixel_units(case) -> None:  # type: ignore[no-untyped-def]
    """Scores of a normalised input are those of the pixels behind it."""
    channels = case.shape[0]
    mean, std = (0.4, 0.5, 0.3)[:channels], (0.25, 0.5, 0.125)[:channels]
    net, (pixels, y) = case.make(), case.data(1)
    oracle = Oracle(net, pixels[0], y[0], mean, std)
    spread = (torch.tensor(t).double()[:, None, None] for t in (mean, std))
    m, s = spread
    delta = NOISE * torch.randn(1, len(oracle.g)).double()
    common = {"mean": mean, "std": std, "noise_std": NOISE, "dtype": torch.float64}
    result = score(net, (pixels - m) / s, y, ALL, **common)
    squares = torch.linalg.svdvals(oracle.j).square()
    check(result["lavp_l2_max"], [squares[0]])
    check(result["lavp_l2_min"], [squares[-1]])
    check(result["i2f"], [NOISE * squares.reciprocal().sum().sqrt()])
    projected = oracle.j - torch.outer(oracle.g, oracle.g @ oracle.j) / (
        oracle.g @ oracle.g
    )
    cosine = torch.linalg.svdvals(projected / oracle.g.norm()).square()
    check(result["lavp_cos_min"], [cosine[-1]])
    check(result["grad_norm"], [oracle.g.norm()])

    given = score(net, (pixels - m) / s, y, ["i2f", "i2f_bayes"], delta=delta, **common)
    pulled = oracle.j.T @ delta[0]
    check(given["i2f"], [torch.linalg.solve(oracle.h, pulled).norm()])
    # The default prior mean is half the range of the *pixels*.
    away = oracle.pixels.flatten() - 0.5
    system = oracle.h / NOISE**2 + torch.eye(len(away)).double() / UNIFORM_STD**2
    error = torch.linalg.solve(system, pulled / NOISE**2 - away / UNIFORM_STD**2)
    check(given["i2f_bayes"], [error.norm()])


def test_other_data_range(problem: Problem, plain: ScoreResult) -> None:
    """Pixels in [0, 255] change the units, not the predicted PSNR."""
    names = ["i2f_psnr", "i2f_bayes_psnr", "leaked_bits"]
    wide = score(
        problem.net,
        problem.pixels,
        problem.y,
        names,
        noise_std=NOISE,
        mean=(0.0,),
        std=(255.0,),
        data_range=255.0,
        dtype=torch.float64,
    )
    for name in names:
        torch.testing.assert_close(wide[name], plain[name], **TIGHT)


def test_no_score_is_without_an_oracle() -> None:
    covered = {
        *("grad_norm", "jacobian_norm", "loss"),
        *("lavp_l2_max", "lavp_l2_min", "lavp_cos_max", "lavp_cos_min", "lavp_fusion"),
        *("i2f", "i2f_psnr", "i2f_lb", "i2f_nom", "i2f_bayes", "i2f_bayes_psnr"),
        *("leaked_bits", "fisher_information_loss", "noise_std_for_psnr"),
        # In test_in_range.py.
        *("i2f_range_psnr", "i2f_range", "i2f_told_psnr", "pixels_at_ends"),
        "noise_std_for_range_psnr",
    }
    assert set(scores_package.available()) == covered


def decibel(error: Tensor | float, d_x: int) -> float:
    return -10 * math.log10(float(error) ** 2 / d_x)


def posterior(oracle: Oracle, covariance: Tensor, noise_std: float) -> Tensor:
    return torch.linalg.inv(oracle.h / noise_std**2 + torch.linalg.inv(covariance))


def perturbation(problem: Problem) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    shape = (2, problem.d_theta)
    return NOISE * torch.randn(*shape, generator=generator, dtype=torch.float64)


def smooth_covariance(d_x: int) -> Tensor:
    """Neighbouring pixels alike, and one of them four times as uncertain as another."""
    at = torch.arange(d_x).double()
    spread = torch.linspace(0.15, 0.6, d_x).double()
    kernel = torch.exp(-(at[:, None] - at[None]).abs() / 2)
    return spread[:, None] * kernel * spread[None]
