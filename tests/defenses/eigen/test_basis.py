from __future__ import annotations

import pytest
import torch
from score_problems import CASES, Problem

from leakwatch.defenses import Budget, EigenNoise, Samples, Single
from leakwatch.derivatives import GradientMap


def test_the_basis_is_the_singular_value_decomposition(
    problem: Problem, samples: Samples
) -> None:
    basis = samples.basis
    assert bool(basis.resolved.all())
    for i, oracle in enumerate(problem.oracles):
        sigma = torch.linalg.svdvals(oracle.j)
        torch.testing.assert_close(
            basis.eigenvalues[i].sqrt(), sigma, rtol=1e-9, atol=1e-13
        )
        v = basis.singular(i)
        eye = torch.eye(len(v), dtype=torch.float64)
        torch.testing.assert_close(v @ v.T, eye, rtol=0.0, atol=1e-7)
        rebuilt = (v.T * sigma) @ basis.directions[i].T
        torch.testing.assert_close(rebuilt, oracle.j, rtol=0.0, atol=1e-12)


def test_products_with_the_basis_are_those_of_dense_singular_vectors(
    samples: Samples, generator: torch.Generator
) -> None:
    basis = samples.basis
    c = torch.randn(basis.eigenvalues.shape, generator=generator).double()
    u = torch.randn(2, samples.gradients.size, generator=generator).double()
    pushed, pulled = basis.push(c), basis.pull(u)
    for i in range(2):
        v = basis.singular(i)
        torch.testing.assert_close(pushed[i], c[i] @ v, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(pulled[i], v @ u[i], rtol=1e-7, atol=1e-9)


def test_directions_beyond_the_rank_are_not_resolved(partial: Samples) -> None:
    basis = partial.basis
    assert basis.resolved.sum(1).tolist() == [20, 20]
    assert bool(basis.resolved[:, :20].all())
    assert float(basis.visible[:, 20:].abs().max()) == 0.0
    everywhere = torch.ones_like(basis.eigenvalues)
    # Unresolved coefficients are dropped, so this has norm √20.
    norm = basis.push(everywhere).norm(dim=1)
    torch.testing.assert_close(
        norm, torch.full_like(norm, 20).sqrt(), rtol=1e-6, atol=0.0
    )


def test_float32_resolves_fewer_directions_and_never_more(problem: Problem) -> None:
    def resolved(dtype: torch.dtype, parameters: str) -> int:
        at = GradientMap(problem.net, parameters=parameters, dtype=dtype)
        basis = Samples(at, problem.pixels.float(), problem.y).basis
        return int(basis.resolved.sum())

    assert resolved(torch.float32, "3") <= resolved(torch.float64, "3") == 40


def test_a_scale_of_the_input_makes_directions_pixels(problem: Problem) -> None:
    at = GradientMap(problem.net, dtype=torch.float64)
    scale = torch.full((64,), 2.0)
    scaled = Samples(at, problem.pixels, problem.y, input_scale=scale)
    plain = Samples(at, problem.pixels, problem.y)
    torch.testing.assert_close(
        scaled.basis.eigenvalues, 4 * plain.basis.eigenvalues, rtol=1e-9, atol=0.0
    )
    a = torch.full((2, 64), 0.25).double()
    torch.testing.assert_close(scaled.moved(a), problem.pixels + 0.5)


def test_a_sample_whose_gradient_is_not_finite_has_no_direction() -> None:
    net = torch.nn.Linear(3, 2)
    at = GradientMap(net, dtype=torch.float64)
    x = torch.rand(2, 3)
    samples = Samples(at, x, torch.tensor([0, 1]))
    torch.nn.init.constant_(net.weight, torch.nan)
    assert samples.basis.resolved.sum() == 0


def test_a_basis_of_earlier_weights_can_be_used_again(problem: Problem) -> None:
    net = CASES[1].make()
    at = GradientMap(net, dtype=torch.float64)
    then = Samples(at, problem.pixels, problem.y)
    earlier = then.basis
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(1.02)
    now = Samples(at, problem.pixels, problem.y, basis=earlier)
    assert now.basis is earlier
    noise = EigenNoise(Budget(1e-3, "norm"), Single(0), coefficients="sign")
    made = noise.protect(now.gradient, generator=torch.Generator(), samples=now)
    for i in range(2):
        u = earlier.directions[i, :, 0]
        expected = now.jacobian.dense(i) @ u * 1e-3 / earlier.eigenvalues[i, 0].sqrt()
        sign = torch.sign(expected @ made.delta[i])
        torch.testing.assert_close(made.delta[i], sign * expected)
    with pytest.raises(ValueError, match="that of other samples"):
        Samples(at, problem.pixels + 0.1, problem.y, basis=earlier)
