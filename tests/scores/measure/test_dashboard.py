"""Leading components of a prior against the whole of H, dense and in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import leakwatch
from leakwatch.derivatives import GradientMap
from leakwatch.derivatives.gram.sources import found_together
from leakwatch.derivatives.jacobian import GradientJacobian
from leakwatch.priors import CosinePrior, DensePrior, GaussianPrior, natural_prior
from leakwatch.reporting.statistics.gate import at_most
from leakwatch.scores.measure.components import Components, leading_components

SIZE = 64
SHAPE = (1, 8, 8)


def convolutions(activation: type[nn.Module]) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), activation(), nn.Conv2d(4, 6, 3, stride=2),
        activation(), nn.Flatten(), nn.Linear(54, 5),
    )  # fmt: skip


def perceptron(activation: type[nn.Module]) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(SIZE, 40), activation(), nn.Linear(40, 5)
    )


NETWORKS = {
    "conv-relu": (convolutions, nn.ReLU),
    "conv-sigmoid": (convolutions, nn.Sigmoid),
    "mlp-tanh": (perceptron, nn.Tanh),
    "mlp-relu": (perceptron, nn.ReLU),
}


def images(n: int, seed: int = 0) -> Tensor:
    prior = natural_prior(SHAPE)
    drawn = prior.draw(n, torch.Generator().manual_seed(seed))
    return (prior.mean + drawn.view(n, *SHAPE)).clamp(0, 1)


def measured(
    name: str, n: int, prior: GaussianPrior, count: int
) -> tuple[list[Components], list[Tensor], GradientJacobian]:
    make, activation = NETWORKS[name]
    torch.manual_seed(1)
    gradients = GradientMap(make(activation), dtype=torch.float64)
    x = images(n)
    jacobian = GradientJacobian(gradients, x, torch.arange(n) % 5)
    pixels = x.flatten(1)
    found = leading_components(
        jacobian, prior, None, max_memory=None, pixels=pixels, counts=(count,)
    )
    dense = [jacobian.dense(i) for i in range(n)]
    return found, [j.T @ j for j in dense], jacobian


def posterior(h: Tensor, prior: GaussianPrior, s: float) -> float:
    m = h / s**2 + prior.precision
    return float(torch.linalg.inv(m).diagonal().sum())


@pytest.mark.parametrize("name", NETWORKS)
def test_the_stated_interval_holds_the_error_of_the_best_estimator(name: str) -> None:
    """240 cases in all: 4 networks, 12 images, 5 levels of noise.

    Both ends come from a few random draws, and are moved by two standard errors.
    """
    prior = natural_prior(SHAPE)
    found, matrices, _ = measured(name, 12, prior, 16)
    scale = math.sqrt(float(torch.stack(matrices).diagonal(0, 1, 2).mean()))
    outside, widths = [], []
    for one, h in zip(found, matrices, strict=True):
        for s in (scale * f for f in (1e-3, 1e-2, 0.1, 1.0, 10.0)):
            least, most = one.least(s), one.most(s)
            assert 0 < least <= most
            widths.append(10 * math.log10(most / least))
            exact = posterior(h, prior, s)
            if not least <= exact * (1 + 1e-9) <= most * (1 + 2e-9):
                outside.append((s / scale, least, exact, most))
    assert len(widths) == 60
    assert outside == []
    # It says something, too: where noise decides, both ends are one.
    assert min(widths) < 0.1


@pytest.mark.parametrize("name", ["conv-relu", "mlp-tanh"])
def test_filtered_images_have_the_error_that_is_stated(name: str) -> None:
    """The same estimator with a dense Jacobian, its noise and its pixels drawn."""
    prior = natural_prior(SHAPE)
    (one,), (h,), jacobian = measured(name, 1, prior, 16)
    s = 0.1 * math.sqrt(float(h.diagonal().mean()))
    rows = prior.leading(16)
    own = rows @ (jacobian.x.flatten() - prior.mean.flatten()) / rows.square().sum(1)
    torch.testing.assert_close(one.gram, rows @ h @ rows.T, rtol=1e-9, atol=1e-12)
    rest = jacobian.x.flatten() - prior.mean.flatten() - own @ rows
    assert one.image is not None
    hides = rows @ h @ rest
    torch.testing.assert_close(one.image.hides, hides, rtol=1e-8, atol=1e-12)
    # A most probable image that ignores the rest, with the same draws of the noise.
    errors = one.squared_errors(s, 1.0)
    assert errors is not None
    values, columns = torch.linalg.eigh(one.gram)
    root = columns * values.clamp_min(0).sqrt() @ columns.T
    drawn = torch.randn(
        16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    best = None
    for tau in one._levels(s):
        found = torch.linalg.solve(
            one.gram + tau * torch.eye(16),
            (one.gram @ own + hides)[:, None] + s * root @ drawn.T,
        )
        z = (prior.mean.flatten() + found.T @ rows).clamp(0, 1)
        these = (z - jacobian.x.flatten()).square().sum(1)
        if best is None or (these - errors).abs().sum() < (best - errors).abs().sum():
            best = these
    torch.testing.assert_close(errors, best, rtol=1e-6, atol=1e-8)


def test_fewer_components_are_those_of_a_smaller_basis() -> None:
    prior = natural_prior(SHAPE)
    (large,), (h,), _ = measured("conv-relu", 1, prior, 24)
    small = large.head(8)
    rows = prior.leading(8)
    torch.testing.assert_close(small.gram, rows @ h @ rows.T, rtol=1e-9, atol=1e-12)
    total = prior.std**2 * SIZE
    assert small.rest == pytest.approx(total - float(rows.square().sum()), rel=1e-9)
    offset = large.image.offset
    apart = offset - (rows @ offset / rows.square().sum(1)) @ rows
    torch.testing.assert_close(
        small.image.hides, rows @ h @ apart, rtol=1e-8, atol=1e-9
    )
    # T: 24 exactly, the others by draws.
    seen = float((prior.leading(24)[8:] @ h * prior.leading(24)[8:]).sum())
    rest = float(prior.mul(h).diagonal().sum()) - float(large.gram.diagonal().sum())
    assert float(small.energy.mean()) == pytest.approx(seen + rest, rel=0.8)


def test_all_components_are_the_whole() -> None:
    prior = natural_prior(SHAPE)
    (one,), (h,), _ = measured("mlp-tanh", 1, prior, SIZE)
    for s in (1e-3, 1e-1):
        exact = posterior(h, prior, s)
        assert one.least(s) == pytest.approx(exact, rel=1e-6)
        assert one.most(s) == pytest.approx(exact, rel=1e-6)
    assert one.trace[0] == pytest.approx(float(h.diagonal().sum()), rel=1e-9)


def large(prior: GaussianPrior) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 5, stride=2), nn.Sigmoid(), nn.Flatten(), nn.Linear(196, 6)
    )
    drawn = prior.draw(3, torch.Generator().manual_seed(3)).view(3, 1, 17, 17)
    return net, (prior.mean + drawn).clamp(0, 1).float(), torch.tensor([0, 3, 5])


NAMES = ["lavp", "i2f", "norms", "leaked_bits", "pixels_at_ends", "i2f_range"]


def test_scores_say_which_way_it_was_and_agree_with_the_exact_ones() -> None:
    prior = natural_prior((1, 17, 17))
    net, x, y = large(prior)
    common = {"noise_std": 0.03, "prior": prior}
    exact = leakwatch.score(net, x, y, NAMES, **common)
    found = leakwatch.score(net, x, y, NAMES, precision="dashboard", **common)
    assert (exact.solver, found.solver) == ("exact", "components")
    for name in ("lavp_l2_max", "lavp_cos_max", "jacobian_norm", "i2f_lb"):
        assert all(s.usable for s in found.status[name]), found.status[name]
        torch.testing.assert_close(found[name], exact[name], rtol=0.1, atol=0)
    for name in ("lavp_l2_min", "lavp_cos_min", "lavp_fusion", "i2f", "i2f_psnr"):
        assert {s.word for s in found.status[name]} == {"not computed"}
        assert "precision='exact'" in found.status[name][0].reason
    for name in ("i2f_bayes_psnr", "i2f_range_psnr"):
        for i, status in enumerate(found.status[name]):
            assert status.word == "estimated"
            assert "of 289 components of the prior" in status.reason
            # The range of pixels is met by another estimate, and by a linear network.
            slack = 1.0 if name == "i2f_range_psnr" else 0.01
            assert float(found[name][i]) <= float(exact[name][i]) + slack
    torch.testing.assert_close(found["pixels_at_ends"], exact["pixels_at_ends"])
    assert bool((found["leaked_bits"] <= exact["leaked_bits"] * 1.001).all())


@pytest.mark.parametrize(
    ("changed", "solver"),
    [
        ({}, "components"),
        ({"prior": None}, "exact"),
        ({"solver": "exact"}, "exact"),
        ({"solver": "lanczos", "products": 4}, "lanczos"),
        ({"precision": "exact"}, "exact"),
    ],
    ids=["default", "white prior", "exact", "lanczos", "precision"],
)
def test_it_is_taken_where_nothing_else_is_asked_for(
    changed: dict[str, object], solver: str
) -> None:
    prior = natural_prior((1, 17, 17))
    net, x, y = large(prior)
    asked = {"noise_std": 0.1, "prior": prior, "precision": "dashboard", **changed}
    result = leakwatch.score(net, x[:1], y[:1], ["i2f_bayes_psnr"], **asked)
    assert result.solver == solver


def test_small_images_are_looked_at_as_a_whole() -> None:
    net = perceptron(nn.Tanh)
    prior = DensePrior(torch.full(SHAPE, 0.5), 0.05 * torch.eye(SIZE).double())
    x = images(1).float()
    found = leakwatch.score(
        net, x, torch.tensor([1]), ["i2f"], noise_std=0.1, prior=prior,
        precision="dashboard",
    )  # fmt: skip
    assert found.solver == "exact"


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(ValueError, match="precision must be one of 'dashboard'"):
        leakwatch.score(
            perceptron(nn.Tanh), images(1).float(), torch.tensor([1]), ["i2f"],
            noise_std=0.1, precision="quick",
        )  # fmt: skip


def test_a_gradient_of_zero_and_one_that_is_not_finite_are_no_number() -> None:
    prior = natural_prior((1, 17, 17))
    net, x, y = large(prior)
    x = torch.cat([x[:1], torch.full_like(x[:1], 1e30)])
    with torch.no_grad():
        net[3].weight.mul_(1e30)
    found = leakwatch.score(
        net, x, y[:2], ["lavp", "i2f"], noise_std=0.1, prior=prior,
        precision="dashboard",
    )  # fmt: skip
    for name, statuses in found.status.items():
        assert not statuses[1].usable or math.isfinite(float(found[name][1])), name


def test_the_cosine_prior_draws_what_it_says() -> None:
    prior = CosinePrior(torch.zeros(SHAPE), 0.01 + torch.rand(SHAPE))
    drawn = prior.draw(4000, torch.Generator().manual_seed(0))
    covariance = drawn.T @ drawn / 4000
    torch.testing.assert_close(covariance, prior.covariance, rtol=0, atol=0.1)


@pytest.mark.parametrize("name", ["conv-relu", "conv-sigmoid", "mlp-relu"])
def test_several_samples_at_once_are_each_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, activation = NETWORKS[name]
    torch.manual_seed(1)
    gradients = GradientMap(make(activation), dtype=torch.float64)
    x, y = images(5), torch.arange(5) % 5
    v = torch.randn(5, 12, SIZE, dtype=torch.float64)
    jacobian = GradientJacobian(gradients, x, y)
    together: list[int] = []

    def noted(*args: object) -> object:
        together.append(len(args[0].x))  # type: ignore[attr-defined]
        return found_together(*args)  # type: ignore[arg-type]

    monkeypatch.setattr("leakwatch.derivatives.gram.gram.found_together", noted)
    found = jacobian.grams(range(5), v)
    assert together == [4]  # the first is compared with plain derivatives, alone
    for i, one in enumerate(found):
        j = jacobian.dense(i) / jacobian.scale[i]
        torch.testing.assert_close(one.h, v[i] @ j.T @ j @ v[i].T, rtol=1e-9, atol=1e-9)
        along = v[i] @ j.T @ jacobian.unit_gradient[i]
        torch.testing.assert_close(one.along, along, rtol=1e-9, atol=1e-9)


def test_the_upper_end_holds_for_an_image_that_the_components_do_not_show() -> None:
    """Noise is mostly in the others: the gate would pass what is above its limit."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Flatten(), nn.Linear(324, 2), nn.Tanh(), nn.Linear(2, 3))
    x, y = torch.rand(1, 1, 18, 18), torch.tensor([0])
    how = {"noise_std": 1e-4, "prior": natural_prior((1, 18, 18))}
    few = leakwatch.score(net, x, y, ["i2f_range_psnr"], precision="dashboard", **how)
    whole = leakwatch.score(net, x, y, ["i2f_range_psnr"], dtype=torch.float64, **how)
    most = at_most(str(few.status["i2f_range_psnr"][0]))
    assert float(few["i2f_range_psnr"][0]) <= float(whole["i2f_range_psnr"][0]) <= most
