"""A server that asks for the same gradient several times, and takes the mean."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from leakwatch.defenses import (
    DPSGD,
    Budget,
    EigenNoise,
    GaussianNoise,
    PruningToBudget,
    Samples,
    Smallest,
    predicted_errors,
)
from leakwatch.derivatives import GradientMap
from leakwatch.studies.trade_offs.attackers import informed, plain, reimagined, share
from studies.problems import FAST, attack_of, network, samples


def first_output(module: nn.Module, x: Tensor, _: Tensor) -> Tensor:
    """Its gradient in the weights of a linear layer is the image itself."""
    out: Tensor = module(x)[:, 0]
    return out


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 1, bias=False)).double()


@pytest.mark.parametrize("queries", [1, 4])
def test_a_linear_network_gives_the_mean_of_what_was_said(queries: int) -> None:
    """J = I: the maximum of the posterior is the mean message, drawn to the prior."""
    x, y = samples(2)
    x = 0.3 + 0.4 * x  # what is found stays in the range of pixels
    net, std, r, mu = linear(), 0.05, 0.3, 0.5
    noise = GaussianNoise(Budget(std, "std"))
    attacking = attack_of(
        x,
        y,
        queries=queries,
        prior_std=r,
        criterion=first_output,
        engine=FAST.changed(box=False, fast=False),
    )
    got = attacking.run(net, noise, 0)
    at = GradientMap(net, first_output, dtype=torch.float64)
    mine = Samples(at, x.double(), y)
    torch.testing.assert_close(mine.gradient, x.flatten(1).double())
    drawn = share(noise, mine, 0, queries)
    assert drawn.queries == queries
    s2 = std**2 / queries
    for row, attacked in enumerate(got):
        mean = torch.stack([a.gradient[row] for a in drawn.each]).mean(0)
        found = (mean * r**2 + mu * s2) / (r**2 + s2)
        expected = -10 * math.log10(float((found - x[row].flatten()).square().mean()))
        predicted = -10 * math.log10(s2 * r**2 / (s2 + r**2))
        for who in ("naive", "adaptive"):
            outcome = attacked.outcomes[who]
            assert outcome.psnr == pytest.approx(expected, abs=1e-4)
            assert outcome.predicted == pytest.approx(predicted, abs=1e-9)


def test_four_answers_halve_the_error() -> None:
    """Without a prior, as in the linear network above; a mean over 480 numbers."""
    x, y = samples(2)
    mine = Samples(
        GradientMap(linear(), first_output, dtype=torch.float64), x.double(), y
    )
    noise = GaussianNoise(Budget(0.1, "std"))

    def error(queries: int) -> float:
        squares = [
            share(noise, mine, seed, queries).mean.delta.square().mean()
            for seed in range(40)
        ]
        return float(torch.stack(squares).mean().sqrt())

    assert error(4) / error(1) == pytest.approx(0.5, rel=0.15)


def test_more_answers_begin_with_the_same() -> None:
    x, y = samples(2)
    at = Samples(GradientMap(network(), dtype=torch.float64), x.double(), y)
    noise = GaussianNoise(Budget(0.2))
    one, four = share(noise, at, 3), share(noise, at, 3, 4)
    assert torch.equal(one.mean.gradient, four.each[0].gradient)
    assert not torch.equal(four.each[0].gradient, four.each[1].gradient)
    nothing = share(None, at, 3, 4)
    assert torch.equal(nothing.mean.gradient, at.gradient)
    squares = torch.stack([a.delta.square().sum(1) for a in four.each])
    torch.testing.assert_close(four.delta_norm, squares.mean(0).sqrt())


def test_known_directions_have_a_quarter_of_the_variance() -> None:
    x, y = samples(2)
    net = network(hidden=20).double()
    at = Samples(GradientMap(net, dtype=torch.float64), x.double(), y)
    noise = EigenNoise(Budget(0.1), Smallest(2))
    one, four = share(noise, at, 0), share(noise, at, 0, 4)
    for what in (plain, informed):
        seen, once = what(at, four, 1).observation, what(at, one, 1).observation
        assert seen.noise_std == pytest.approx(once.noise_std / 2, rel=1e-9)
    guess = reimagined(noise, four, at, 1, at.x[1:], 0).observation
    knows = informed(at, four, 1).observation
    torch.testing.assert_close(guess.message, knows.message, rtol=1e-9, atol=1e-12)
    assert guess.noise_std == pytest.approx(knows.noise_std, rel=1e-9)
    got = attack_of(x, y, queries=4).run(net, noise, 0)
    expected = predicted_errors(one.each[0], at, prior_std=0.3, queries=4)
    for who, errors in (("naive", expected.naive), ("adaptive", expected.adaptive)):
        wanted = (-10 * (errors / 6).log10()).tolist()
        found = [a.outcomes[who].predicted for a in got]
        assert found == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize(
    "defense", [PruningToBudget(Budget(0.3)), DPSGD(1e-2, 0.0)], ids=["pruning", "clip"]
)
def test_what_is_done_in_the_same_way_every_time_stays(
    defense: PruningToBudget | DPSGD,
) -> None:
    x, y = samples(1)
    at = Samples(GradientMap(network(), dtype=torch.float64), x.double(), y)
    one, four = share(defense, at, 0), share(defense, at, 0, 4)
    torch.testing.assert_close(one.mean.gradient, four.mean.gradient)
    seen, once = informed(at, four, 0).observation, informed(at, one, 0).observation
    torch.testing.assert_close(seen.message, once.message)
    assert seen.distance == once.distance
