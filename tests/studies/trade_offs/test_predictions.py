"""Predictions with a prior: the headline of what each attacker matches."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from leakwatch import score
from leakwatch.defenses import (
    DPSGD,
    Budget,
    EigenNoise,
    GaussianNoise,
    PruningToBudget,
    Samples,
    Smallest,
)
from leakwatch.derivatives import GradientMap
from leakwatch.priors import DensePrior
from leakwatch.scores.measure.pixel_range import PixelRange
from leakwatch.studies import trade_off
from leakwatch.studies.trade_offs.attackers import share
from leakwatch.studies.trade_offs.predictions import CEILING, with_prior
from studies.problems import FAST, PIXELS, attack_of, network, samples

MEAN, STD = (0.4,), (0.25,)


def known(spread: float = 0.3, together: float = 0.6) -> DensePrior:
    """Neighbouring pixels that vary together."""
    apart = torch.arange(PIXELS)[:, None] - torch.arange(PIXELS)
    covariance = spread**2 * together ** apart.abs().double()
    return DensePrior(torch.full((1, 2, 3), 0.5), covariance)


def predicted(
    net: nn.Module, x: Tensor, y: Tensor, defense: object, prior: DensePrior
) -> dict[str, list[float]]:
    attacking = attack_of((x - 0.4) / 0.25, y, mean=MEAN, std=STD, prior=prior)
    got = attacking.run(net, defense, 0)  # type: ignore[arg-type]
    whose = got[0].outcomes
    return {who: [a.outcomes[who].predicted for a in got] for who in whose}


@pytest.mark.parametrize("size", [0.003, 0.3])
def test_isotropic_noise_gives_the_headline(size: float) -> None:
    x, y = samples(2)
    net, prior = network().double(), known()
    got = predicted(net, x, y, GaussianNoise(Budget(size, "std")), prior)
    headline = score(
        net,
        (x - 0.4) / 0.25,
        y,
        ["i2f_range_psnr"],
        noise_std=size,
        prior=prior,
        mean=MEAN,
        std=STD,
        dtype=torch.float64,
    )["i2f_range_psnr"]
    # float32 samples are put into float64 before or after they are made pixels.
    assert got["naive"] == pytest.approx(headline.tolist(), abs=1e-3)
    assert got["adaptive"] == got["naive"]


def test_without_noise_nothing_is_missed() -> None:
    x, y = samples(2)
    got = predicted(network().double(), x, y, None, known())
    assert all(db > 100 for rows in got.values() for db in rows)
    assert all(db <= CEILING for rows in got.values() for db in rows)


def test_the_prior_fills_in_the_directions_that_noise_hides() -> None:
    """Much noise along two of six directions, small spread: no bend, no end of range.

    The adaptive attacker then has the conditional mean given the other four.
    """
    _, y = samples(1)
    x = torch.full((1, 1, 2, 3), 0.5) + 0.02 * torch.randn(
        1, 1, 2, 3, generator=torch.Generator().manual_seed(3)
    )
    net, prior = network(hidden=20).double(), known(spread=0.02)
    at = Samples(GradientMap(net, dtype=torch.float64), x.double(), y)
    # 30 times what images move the gradient by along them, and a thousandth of that
    # along the others, as little as the attacker counts on.
    size = 30 * 0.02 * float(at.basis.eigenvalues[0, 4].sqrt()) * math.sqrt(2)
    answers = share(EigenNoise(Budget(size, "norm"), Smallest(2)), at, 0)
    found = with_prior(
        answers,
        at,
        pixels=x.double().flatten(1),
        input_scale=torch.ones(PIXELS, dtype=torch.float64),
        prior=prior,
        data_range=1.0,
        seed=0,
    )
    u = at.basis.directions[0]
    hidden, seen = u[:, 4:], u[:, :4]
    offset = x.double().flatten() - prior.mean.flatten()
    c = prior.covariance
    # E[hidden | seen] where what is seen is known exactly.
    cross = hidden.T @ c @ seen @ torch.linalg.inv(seen.T @ c @ seen)
    left = hidden.T @ offset - cross @ (seen.T @ offset)
    expected = -10 * math.log10(float(left.square().sum()) / PIXELS)
    assert found["adaptive"][0].psnr == pytest.approx(expected, abs=0.3)
    assert found["naive"][0].psnr < found["adaptive"][0].psnr
    assert not found["naive"][0].at_least


@pytest.mark.parametrize("defense", [PruningToBudget(Budget(0.3)), DPSGD(0.1, 1e-4)])
def test_what_is_not_random_misleads_only_those_who_do_not_know(
    defense: PruningToBudget | DPSGD,
) -> None:
    x, y = samples(1)
    got = predicted(network(hidden=20).double(), x, y, defense, known())
    assert got["adaptive"][0] > got["naive"][0] + 10


def test_a_trade_off_says_what_attackers_know() -> None:
    x, y = samples(1)
    found = trade_off(
        network(),
        x,
        y,
        lambda *_: None,
        lambda _: 0.5,
        defenses=["gaussian"],
        budgets=[0.3],
        attack=FAST,
        steps=3,
        prior=known(),
    )
    assert found.settings["prior"] == known().knows
    white = trade_off(
        network(),
        x,
        y,
        lambda *_: None,
        lambda _: 0.5,
        defenses=["gaussian"],
        budgets=[0.3],
        attack=FAST,
        steps=3,
    )
    assert white.settings["prior"] == "mean and spread of the pixels"
    rows = [f.rows[1].predicted["adaptive"] for f in (found, white)]
    # Here the correlation is that of another kind of images: all that counts is that
    # it is used.
    assert rows[0] != rows[1]
    with pytest.raises(ValueError, match="prior_mean"):
        trade_off(
            network(),
            x,
            y,
            lambda *_: None,
            lambda _: 0.5,
            prior=known(),
            prior_mean=torch.zeros(1, 2, 3),
        )


def test_what_rounding_hides_makes_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = samples(1)
    net = network().double()
    attacking = attack_of((x - 0.4) / 0.25, y, mean=MEAN, std=STD, prior=known())

    def bounds(size: float) -> set[bool]:
        (attacked,) = attacking.run(net, GaussianNoise(Budget(size, "std")), 0)
        return {outcome.at_least for outcome in attacked.outcomes.values()}

    assert bounds(0.03) == {False}
    monkeypatch.setattr(PixelRange, "least_noise", lambda *_: 0.1)
    assert bounds(0.03) == {True}
    # So much is missed under that noise that nothing is exact.
    assert bounds(0.3) == {False}
