"""Predictions for attackers who know the range of pixels, against dense oracles."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.optimize import lsq_linear
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

import leakwatch
from leakwatch.attacks import GaussNewton, PixelScale, SharedGradient, Start
from leakwatch.priors import DensePrior
from leakwatch.scores import Settings, groups
from leakwatch.scores.measure.pixel_range import DRAWS, PixelRange
from leakwatch.scores.updates.api import scores_of_updates
from leakwatch.weight_update import WeightUpdate

S = 0.05
R = 0.4


def draws(n: int, rows: int = 6) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, n, generator=generator, dtype=torch.float64)


def digit_like(n: int, seed: int = 0) -> Tensor:
    """Most pixels at an end of [0, 1]."""
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.rand(n, generator=generator, dtype=torch.float64) - 1).clamp(0, 1)


def test_independent_pixels_are_clipped_one_by_one() -> None:
    # Of a diagonal H every pixel is a problem of its own: the estimate, clipped.
    n = 50
    x, lam = digit_like(n), torch.logspace(-3, 3, n, dtype=torch.float64)
    arrived = draws(n) * lam.sqrt()
    inside = PixelRange(torch.diag(lam), x, x - 0.3, arrived)
    errors = inside.errors(Settings(prior_std=R), S)
    shift = (S * arrived - (S / R) ** 2 * (x - 0.3)) / (lam + (S / R) ** 2)
    expected = ((x + shift).clamp(0, 1) - x).square().sum(1)
    assert errors.exact
    # To a hundredth of a decibel.
    torch.testing.assert_close(errors.squared, expected, rtol=2e-3, atol=0.0)


def test_without_an_end_in_reach_it_is_the_linear_estimate() -> None:
    n = 30
    j = torch.randn(80, n, generator=torch.Generator().manual_seed(2)).double()
    h, x = j.T @ j, torch.full((n,), 0.5, dtype=torch.float64)
    inside = PixelRange(h, x, x - 0.4, draws(80) @ j)
    covariance = 0.2 * torch.eye(n).double() + 0.1
    for settings in (
        Settings(prior_std=R),
        Settings(prior=DensePrior(torch.zeros(n), covariance)),
    ):
        errors = inside.errors(settings, 1e-3)
        c = covariance if settings.prior is not None else R**2 * torch.eye(n)
        precision = torch.linalg.inv(c.double())
        right = inside.noise / 1e-3 - precision @ inside.offset
        expected = torch.linalg.solve(h / 1e-6 + precision, right.T).square().sum(0)
        torch.testing.assert_close(errors.squared, expected, rtol=2e-3, atol=0.0)


def test_who_is_told_the_ends_has_the_error_of_the_other_pixels() -> None:
    n = 40
    j = torch.randn(90, n, generator=torch.Generator().manual_seed(3)).double()
    x = digit_like(n)
    inside = PixelRange(j.T @ j, x, x - 0.5, draws(90) @ j)
    rest = (x > 0) & (x < 1)
    assert 0 < int(rest.sum()) < n
    channel = j[:, rest].T @ j[:, rest] / S**2 + torch.eye(int(rest.sum())) / R**2
    expected = float(torch.linalg.inv(channel).trace())
    assert inside.told(Settings(prior_std=R), S) == pytest.approx(expected, rel=1e-10)


def network(activation: type[nn.Module] = nn.Sigmoid) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(36, 60), activation(), nn.Linear(60, 5)
    ).double()


def samples(n: int = 6) -> tuple[Tensor, Tensor]:
    return digit_like(36 * n).view(n, 1, 6, 6), torch.arange(n) % 5


NAMES = ["i2f_bayes_psnr", "i2f_range_psnr", "i2f_told_psnr", "i2f_range", "i2f_bayes"]


def test_knowing_more_never_predicts_less() -> None:
    x, y = samples()
    for s in (1e-4, 1e-2, 1e-1, 1.0):
        result = leakwatch.score(
            network(), x, y, NAMES, noise_std=s, dtype=torch.float64
        )
        assert bool((result["i2f_range_psnr"] >= result["i2f_bayes_psnr"]).all())
        assert bool((result["i2f_range"] <= result["i2f_bayes"]).all())
        # Chance of eight draws apart.
        assert bool((result["i2f_range_psnr"] <= result["i2f_told_psnr"] + 1.5).all())


def test_an_attack_in_the_range_reaches_what_is_predicted() -> None:
    """Predicted for the δ at hand; Gauss–Newton with the same prior and the box."""
    net, (x, y), s = network(), samples(), 2e-3
    gradients = leakwatch.GradientMap(net, dtype=torch.float64)
    generator = torch.Generator().manual_seed(4)
    delta = s * torch.randn(6, gradients.size, generator=generator).double()
    shared = SharedGradient(
        gradients(x, y) + delta, y[:, None], tuple(x.shape[1:]), noise_std=s
    )
    attack = GaussNewton(steps=40, prior_std=R, box=True)
    found = attack.run(
        gradients, shared, pixels=PixelScale(), start=Start.near(x, 0.05), restarts=1
    )
    squared = (found.images - x).flatten(1).square().mean(1)
    achieved = -10 * squared.log10()
    result = leakwatch.score(
        net, x, y, NAMES[:2], noise_std=s, delta=delta, prior_std=R, dtype=torch.float64
    )
    gap = (result["i2f_range_psnr"] - achieved).abs().median()
    assert float(gap) < 0.5
    # Without the range the prediction is clearly too low.
    assert float((achieved - result["i2f_bayes_psnr"]).median()) > 1.5


def test_a_sample_that_leaves_the_range_is_not_predicted_for_it() -> None:
    x, y = samples()
    result = leakwatch.score(
        network(), 2 * x - 1, y, NAMES, noise_std=1e-3, dtype=torch.float64
    )
    status = result.status["i2f_range_psnr"][0]
    assert status.word == "undefined"
    assert "leaves [0, 1]" in status.reason
    assert math.isnan(float(result["i2f_range_psnr"][0]))
    assert result.status["i2f_bayes_psnr"][0].usable


def test_products_alone_say_that_they_cannot_tell() -> None:
    x, y = samples()
    result = leakwatch.score(
        network(), x, y, "i2f_range_psnr", noise_std=1e-3, solver="lanczos"
    )
    status = result.status["i2f_range_psnr"][0]
    assert status.word == "not computed"
    assert "lanczos" in status.reason


def test_draws_are_the_same_for_every_batch() -> None:
    x, y = samples()
    whole = leakwatch.score(network(), x, y, "range", noise_std=1e-2)
    alone = leakwatch.score(network(), x[2:3], y[2:3], "range", noise_std=1e-2)
    torch.testing.assert_close(
        whole["i2f_range_psnr"][2:3], alone["i2f_range_psnr"], rtol=1e-6, atol=0.0
    )


def test_the_share_of_pixels_at_the_ends_is_counted() -> None:
    x, y = samples()
    result = leakwatch.score(network(), x, y, "pixels_at_ends")
    expected = ((x == 0) | (x == 1)).flatten(1).double().mean(1)
    torch.testing.assert_close(result["pixels_at_ends"], expected)


def test_the_noise_that_is_asked_for_holds_the_target() -> None:
    x, y = samples()
    found = leakwatch.score(
        network(),
        x,
        y,
        ["noise_std_for_range_psnr", "noise_std_for_psnr"],
        target_psnr=20.0,
        prior_std=R,
        dtype=torch.float64,
    )
    needed = found["noise_std_for_range_psnr"]
    least = found["noise_std_for_psnr"]
    assert bool((needed >= least).all())
    assert bool((needed > 1.01 * least).any())
    for i, s in enumerate(needed.tolist()):
        at = leakwatch.score(
            network(),
            x[i : i + 1],
            y[i : i + 1],
            "i2f_range_psnr",
            noise_std=s,
            prior_std=R,
            dtype=torch.float64,
        )
        assert 20.0 - 0.2 <= float(at["i2f_range_psnr"]) <= 20.0 + 0.1


def test_a_gradient_of_few_numbers_shows_no_more_under_less_noise() -> None:
    """Two numbers for all pixels: what they don't tell stays open at any noise."""
    x, y = samples()
    ask = {"parameters": "3.bias", "prior_std": R, "dtype": torch.float64}
    at = {
        s: leakwatch.score(network(), x, y, "i2f_range_psnr", noise_std=s, **ask)
        for s in (1e-10, 1e-9, 3e-9, 1e-8, 1e-7)
    }
    for s, found in at.items():
        words = [status.word for status in found.status["i2f_range_psnr"]]
        assert s < 1e-9 or words == ["ok"] * len(x)
        # Below 1e-9 rounding hides what the range tells.
        assert bool((found["i2f_range_psnr"] < 25).all()), s


def test_that_noise_is_of_the_mean_also_when_one_is_given() -> None:
    x, y = samples(2)
    name = "noise_std_for_range_psnr"
    net = network()
    size = leakwatch.GradientMap(net).size
    plain = leakwatch.score(net, x, y, name, target_psnr=15.0)
    given = leakwatch.score(
        net, x, y, name, target_psnr=15.0, delta=torch.full((2, size), 1e-3)
    )
    torch.testing.assert_close(given[name], plain[name], rtol=1e-6, atol=0.0)


def test_updates_count_no_range_and_say_so() -> None:
    x, y = samples()
    net = network()
    w = parameters_to_vector(net.parameters()).detach()
    update = WeightUpdate(w, 1.001 * w[None], None, tuple(x.shape[1:]), len(x))
    every = leakwatch.score_update(net, x[None], y[None], update, joint=False)
    assert "i2f_range_psnr" not in every
    named = leakwatch.score_update(net, x[None], y[None], update, "i2f_range_psnr")
    status = named.status["i2f_range_psnr"][0][0]
    assert str(status) == (
        "not computed: the range of pixels is not counted in scores of updates"
    )


def test_the_group_is_refused_by_no_update() -> None:
    assert {s.name for s in scores_of_updates("range")} == {*groups()["range"]}
    assert "i2f_range_psnr" not in {s.name for s in scores_of_updates(["i2f", "loss"])}


def test_half_way_stands_for_a_network_that_bends() -> None:
    """One pixel, g = x²: half way the Jacobian is its mean between x and z, exactly."""

    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(1, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return self.w * x.flatten(1).square().sum(1, keepdim=True)

    def criterion(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return module(x)[:, 0]

    s, x, spread = 0.2, 0.3, 10.0
    found = leakwatch.score(
        Square(),
        torch.tensor([[[[x]]]], dtype=torch.float64),
        torch.tensor([0]),
        ["i2f_range_psnr"],
        noise_std=s,
        prior_std=spread,
        criterion=criterion,
        dtype=torch.float64,
    )
    generator = torch.Generator().manual_seed(0)
    draws = [float(torch.randn(1, generator=generator)) for _ in range(DRAWS)]

    def reached(slope: float, draw: float) -> float:
        """Error of the most probable pixel in [0, 1] where the slope is constant."""
        prior = (s / spread) ** 2
        step = (s * draw * slope - prior * (x - 0.5)) / (slope**2 + prior)
        return min(max(step, -x), 1 - x)

    straight = [reached(2 * x, draw) for draw in draws]
    last = straight[0]
    for _ in range(200):
        last = (last + reached(2 * x + last, draws[0])) / 2
    gain = 20 * math.log10(abs(straight[0] / last))
    assert abs(gain) > 0.5
    linear = -sum(20 * math.log10(abs(step)) for step in straight) / len(straight)
    # The looks end when one changes less than 0.3 dB.
    assert float(found["i2f_range_psnr"]) == pytest.approx(linear + gain, abs=0.3)


def of_singular_values(sigma: Tensor, seed: int) -> Tensor:
    """A J with these singular values and random vectors, ``(120, n)``."""
    generator = torch.Generator().manual_seed(seed)
    n = len(sigma)
    left, right = (
        torch.linalg.qr(torch.randn(m, n, generator=generator).double())[0]
        for m in (120, n)
    )
    return (left * sigma) @ right.T


def in_box_by_least_squares(j: Tensor, x: Tensor, xi: Tensor, s: float) -> float:
    """‖z − x‖² from J itself, whose condition is the root of that of H."""
    n = len(x)
    rows = torch.cat([j / s, torch.eye(n).double() / R])
    right = torch.cat([xi, (0.5 - x) / R])
    bounds = (-x.numpy() - 1e-15, 1 - x.numpy() + 1e-15)
    found = lsq_linear(rows.numpy(), right.numpy(), bounds, "bvls", tol=1e-14)
    return float((found.x**2).sum())


def test_little_noise_counts_where_rounding_of_h_can_not_matter() -> None:
    n, below = 40, 0
    x = digit_like(n)
    for seed, least in enumerate((-4.0, -5.0, -6.0, -6.5)):
        j = of_singular_values(torch.logspace(0, least, n).double(), seed)
        xi = torch.randn(4, 120, generator=torch.Generator().manual_seed(9)).double()
        inside = PixelRange(j.T @ j, x, x - 0.5, xi @ j)
        settings = Settings(prior_std=R)
        for s in (1e-8, 1e-9, 1e-10):
            if s >= inside.least_noise(settings) or not inside.steady(settings, s):
                continue
            below += 1
            found = inside.errors(settings, s).squared.sqrt().mean()
            known = [in_box_by_least_squares(j, x, row, s) ** 0.5 for row in xi]
            apart = 20 * math.log10(float(found) / (sum(known) / len(known)))
            assert abs(apart) < 0.1, (least, s)
    assert below >= 6


def test_rounding_that_decides_is_seen() -> None:
    n = 40
    j = of_singular_values(torch.logspace(0, -3, n).double(), 1)
    x = torch.full((n,), 0.5).double()
    j = j @ (torch.eye(n) - torch.ones(n, n) / n).double()
    inside = PixelRange(j.T @ j, x, x - 0.3, draws(120) @ j)
    assert not inside.steady(Settings(prior_std=R), 1e-12)
    assert inside.steady(Settings(prior_std=R), 1e-5)
