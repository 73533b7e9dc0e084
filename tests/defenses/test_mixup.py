from __future__ import annotations

import pytest
import torch
from score_problems import Oracle, Problem
from torch.nn.functional import cross_entropy

from leakwatch import score
from leakwatch.defenses import Mixing, MixUp, Samples
from leakwatch.gradients import GradientMap


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


def test_bad_arguments(samples: Samples) -> None:
    for bad in (0.0, 1.5, (0.5, 0.2), (-0.1, 0.2), float("nan")):
        with pytest.raises(ValueError, match="coefficient must be in"):
            MixUp(bad)
    for odd in ("half", (0.1, 0.2, 0.3), True):
        with pytest.raises(TypeError, match="a number or"):
            MixUp(odd)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="of one length, got 2 and 3"):
        MixUp(0.5, public=(torch.rand(2, 1, 8, 8), torch.zeros(3)))
    one = samples.select(slice(0, 1))
    with pytest.raises(ValueError, match="nobody to be mixed with"):
        MixUp(0.5).protect(one.gradient, generator=torch.Generator(), samples=one)
