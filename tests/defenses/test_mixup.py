from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from score_problems import Oracle, Problem
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from leakwatch import GradientJacobian, score
from leakwatch.attacks import GaussNewton, PixelScale, SharedGradient, Start
from leakwatch.defenses import Mixing, MixUp, Samples, observed
from leakwatch.defenses.mixing import estimate
from leakwatch.derivatives import GradientMap


def mixing_of(mixup: MixUp, samples: Samples) -> Mixing:
    made = mixup.protect(samples.gradient, generator=torch.Generator(), samples=samples)
    assert made.knowledge.mixing is not None
    return made.knowledge.mixing


def test_the_message_is_the_gradient_of_the_mixed_loss(
    problem: Problem, samples: Samples
) -> None:
    made = MixUp(0.6).protect(
        samples.gradient, generator=torch.Generator(), samples=samples
    )
    net = problem.oracles[0].net
    for i in range(2):
        x = 0.6 * problem.pixels[i] + 0.4 * problem.pixels[1 - i]
        soft = torch.zeros(1, 10).double()
        soft[0, problem.y[i]] += 0.6
        soft[0, problem.y[1 - i]] += 0.4
        loss = cross_entropy(net(x[None]), soft)
        parts = torch.autograd.grad(loss, list(net.parameters()))
        expected = torch.cat([p.reshape(-1) for p in parts])
        torch.testing.assert_close(made.gradient[i], expected, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("epsilon", [0.0, 1e-4])
def test_the_score_of_a_mixed_sample_is_that_of_the_paper(
    epsilon: float, problem: Problem, samples: Samples
) -> None:
    """‖(H + εI)⁻¹ Jᵀ J_δ δ_x‖ with dense matrices, labels held fixed as in I²F."""
    mixing = mixing_of(MixUp(0.9, mix_labels=False), samples)
    influence = mixing.influence(samples.gradients)
    found = score(
        problem.net,
        problem.pixels,
        problem.y,
        ["i2f"],
        delta=influence,
        epsilon=epsilon,
        dtype=torch.float64,
    )["i2f"]
    for i, oracle in enumerate(problem.oracles):
        at = Oracle(problem.net, mixing.mixed[i], problem.y[i])
        shift = (mixing.mixed[i] - problem.pixels[i]).flatten()
        h = oracle.h + epsilon * torch.eye(64).double()
        expected = torch.linalg.solve(h, oracle.j.T @ (at.j @ shift)).norm()
        assert float(found[i]) == pytest.approx(float(expected), rel=1e-6)


def test_with_labels_held_the_influence_is_delta_to_first_order(
    samples: Samples,
) -> None:
    gaps = []
    for alpha in (0.98, 0.99):
        mixup = MixUp(alpha, mix_labels=False)
        made = mixup.protect(
            samples.gradient, generator=torch.Generator(), samples=samples
        )
        assert made.knowledge.mixing is not None
        influence = made.knowledge.mixing.influence(samples.gradients)
        gaps.append(float((made.delta - influence).norm() / influence.norm()))
    assert gaps[1] == pytest.approx(gaps[0] / 2, rel=0.1)


def test_the_influence_of_mixed_labels_is_the_mixed_influence(
    samples: Samples,
) -> None:
    mixing = mixing_of(MixUp(0.7), samples)
    own, other = (
        Mixing(mixing.x, y, mixing.partner, y, mixing.coefficient, mix_labels=False)
        for y in (mixing.y, mixing.partner_labels)
    )
    expected = 0.7 * own.influence(samples.gradients) + 0.3 * other.influence(
        samples.gradients
    )
    torch.testing.assert_close(mixing.influence(samples.gradients), expected)


def test_nobody_is_their_own_partner() -> None:
    net = torch.nn.Linear(3, 2)
    x = torch.arange(15.0).view(5, 3)
    samples = Samples(GradientMap(net), x, torch.arange(5) % 2)
    for seed in range(20):
        stream = torch.Generator().manual_seed(seed)
        made = MixUp(0.5).protect(samples.gradient, generator=stream, samples=samples)
        mixing = made.knowledge.mixing
        assert mixing is not None
        assert not bool((mixing.partner == mixing.x).all(1).any())
        # Everybody is somebody's, with the label that goes with it.
        assert sorted(mixing.partner[:, 0].tolist()) == [0.0, 3.0, 6.0, 9.0, 12.0]
        index = (mixing.partner[:, 0] / 3).long()
        assert torch.equal(mixing.partner_labels, samples.y[index])


def test_public_partners_and_random_coefficients(samples: Samples) -> None:
    public = torch.full((3, 1, 8, 8), 0.25), torch.tensor([7, 8, 9])
    mixing = mixing_of(MixUp((0.2, 0.4), public=public), samples)
    assert bool((mixing.partner == 0.25).all())
    assert bool((mixing.partner_labels >= 7).all())
    alpha = mixing.coefficient
    assert bool(((alpha > 0.2) & (alpha <= 0.4)).all())
    assert alpha[0] != alpha[1]


def test_what_is_mixed_can_be_unmixed(problem: Problem, samples: Samples) -> None:
    mixing = mixing_of(MixUp(0.3), samples)
    torch.testing.assert_close(mixing.unmixed(mixing.mixed), problem.pixels)
    error = 0.03 * torch.ones_like(problem.pixels)
    off = mixing.unmixed(mixing.mixed + error) - problem.pixels
    torch.testing.assert_close(off, error / 0.3)


def own_criterion(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(module(x), y, reduction="none", label_smoothing=0.1)


@pytest.mark.parametrize("own", [False, True])
def test_the_map_of_the_mixed_loss(own: bool, problem: Problem) -> None:
    """Its value at the mixture is the message, its J the mixture of both."""
    at = GradientMap(problem.net, own_criterion if own else None, dtype=torch.float64)
    samples = Samples(at, problem.pixels, problem.y)
    made = MixUp(0.7).protect(
        samples.gradient, generator=torch.Generator(), samples=samples
    )
    mixing = made.knowledge.mixing
    assert mixing is not None
    for row in range(2):
        one = slice(row, row + 1)
        seen = observed(at, made, row)
        x = mixing.mixed[one]
        torch.testing.assert_close(
            seen.gradients(x, problem.y[one]), seen.message, rtol=1e-10, atol=1e-14
        )
        assert torch.equal(seen.message, made.gradient[one])
        eye = torch.eye(64).double()
        j = 0.7 * at.dense(x[0], problem.y[row], eye)
        j = j + 0.3 * at.dense(x[0], mixing.partner_labels[row], eye)
        jacobian = GradientJacobian(seen.gradients, x, problem.y[one])
        torch.testing.assert_close(jacobian.dense(0), j.T, rtol=1e-9, atol=1e-13)
        h = jacobian.gram(0).h * jacobian.scale[0] ** 2
        torch.testing.assert_close(h, j @ j.T, rtol=1e-9, atol=1e-13)


def test_who_matches_the_mixed_loss_finds_the_mixture(
    problem: Problem, samples: Samples
) -> None:
    made = MixUp(0.7).protect(
        samples.gradient, generator=torch.Generator(), samples=samples
    )
    mixing = made.knowledge.mixing
    assert mixing is not None
    seen, mine = observed(samples.gradients, made, 1), mixing.select(1)
    found = GaussNewton(box=False, logits=False, fast=False, steps=12).run(
        seen.gradients,
        SharedGradient(seen.message, problem.y[1:, None], (1, 8, 8)),
        pixels=PixelScale.unknown(),
        start=Start.near(mine.mixed, 0.01),
        seed=0,
    )
    error = (mine.unmixed(found.images) - problem.pixels[1:]).abs().max()
    assert float(error) < 1e-8


def test_labels_that_are_not_mixed_leave_the_map_alone(samples: Samples) -> None:
    mixing = mixing_of(MixUp(0.7, mix_labels=False), samples)
    assert mixing.gradient_map(samples.gradients, 0) is samples.gradients


def test_maps_that_can_not_be_mixed(samples: Samples) -> None:
    mixing = mixing_of(MixUp(0.7), samples)
    with pytest.raises(IndexError, match="row 2 of 2 mixtures"):
        mixing.gradient_map(samples.gradients, 2)

    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.ones(()))

    own = GradientMap(samples.gradients.module, Weighted())
    with pytest.raises(ValueError, match="parameters of its own"):
        mixing.gradient_map(own, 0)


@pytest.mark.parametrize("queries", [1, 2])
def test_what_who_knows_no_partner_is_left_with(queries: int) -> None:
    """Over all samples and partners, or pairs of partners, exactly."""
    stream = torch.Generator().manual_seed(3)
    public = torch.rand(5, 1, 2, 3, generator=stream).double()
    alpha, mean = 0.6, public.mean(0)
    labels = torch.zeros(1, dtype=torch.long)
    r = float(public.var(0, correction=0).mean().sqrt())

    def mixed(x: Tensor, partner: Tensor) -> Mixing:
        coefficient = torch.tensor([alpha]).double()
        return Mixing(x[None], labels, partner[None], labels, coefficient)

    errors = []
    for x, *partners in itertools.product(public, repeat=1 + queries):
        mixings = [mixed(x, partner) for partner in partners]
        found = estimate(mixings, [m.mixed for m in mixings], mean)
        errors.append((found - x).square().mean())
    expected = mixed(public[0], public[1]).estimation_error(r, queries)
    left = torch.stack(errors).mean()
    torch.testing.assert_close(left, expected[0], rtol=1e-12, atol=0.0)


def test_the_estimate_is_the_best_linear_one() -> None:
    """Against the conditional mean of a Gaussian, from its dense covariance."""
    alphas = torch.tensor([0.3, 0.8, 0.55]).double()
    stream = torch.Generator().manual_seed(4)
    mean, *found = torch.rand(4, 1, 2, 2, generator=stream).double()
    y = torch.zeros(1, dtype=torch.long)
    mixings = [Mixing(mean[None], y, mean[None], y, a[None]) for a in alphas]
    # Any variance: it is that of samples and partners.
    covariance = 0.09 * (torch.outer(alphas, alphas) + torch.diag((1 - alphas) ** 2))
    gain = torch.linalg.solve(covariance, 0.09 * alphas)
    away = torch.stack(found) - mean
    expected = mean + torch.einsum("k,kchw->chw", gain, away)
    ours = estimate(mixings, [image[None] for image in found], mean)
    torch.testing.assert_close(ours[0], expected, rtol=1e-12, atol=1e-14)
    whole = replace(mixings[0], coefficient=torch.ones(1).double())
    exact = estimate([*mixings, whole], [image[None] for image in (*found, mean)], mean)
    torch.testing.assert_close(exact[0], mean, rtol=1e-12, atol=1e-14)
    half = estimate([whole], [mean[None].half()], mean)
    torch.testing.assert_close(half, mean[None].half())
    with pytest.raises(ValueError, match="got 3 mixings and 1 mixtures"):
        estimate(mixings, [mean[None]], mean)
    with pytest.raises(ValueError, match="must have one shape"):
        estimate([whole], [mean[None]], mean[0])


def test_bad_arguments(samples: Samples) -> None:
    for bad in (0.0, 1.5, (0.5, 0.2), (-0.1, 0.2), (0.0, 0.0), float("nan")):
        with pytest.raises(ValueError, match="coefficient must be in"):
            MixUp(bad)
    for odd in ("half", (0.1, 0.2, 0.3), True):
        with pytest.raises(TypeError, match="a number or"):
            MixUp(odd)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="of one length, got 2 and 3"):
        MixUp(0.5, public=(torch.rand(2, 1, 8, 8), torch.zeros(3)))
    with pytest.raises(TypeError, match="partners go by name"):
        MixUp(0.5, torch.rand(2, 1, 8, 8), torch.zeros(2))  # type: ignore[arg-type]
    for unlike in (torch.rand(2, 8), (torch.rand(2, 8),), ([0.5], [1])):
        with pytest.raises(TypeError, match=r"must be \(samples, labels\)"):
            MixUp(0.5, public=unlike)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no partners"):
        MixUp(0.5, public=(torch.rand(0, 1, 8, 8), torch.zeros(0)))
    with pytest.raises(ValueError, match="hold NaN"):
        MixUp(0.5, public=(torch.full((1, 1, 8, 8), torch.nan), torch.zeros(1)))
    with pytest.raises(ValueError, match="floating point"):
        MixUp(0.5, public=(torch.ones(1, 1, 8, 8).byte(), torch.zeros(1)))
    zero = torch.zeros(2, dtype=torch.long)
    for public, text in (
        ((torch.rand(2, 1, 1, 1), zero), "shape of the private ones"),
        ((torch.rand(2, 1, 8, 8), zero + 10), "public samples: label 10"),
    ):
        with pytest.raises(ValueError, match=text):
            MixUp(0.5, public=public).protect(
                samples.gradient, generator=torch.Generator(), samples=samples
            )
    one = samples.select(slice(0, 1))
    with pytest.raises(ValueError, match="nobody to be mixed with"):
        MixUp(0.5).protect(one.gradient, generator=torch.Generator(), samples=one)
