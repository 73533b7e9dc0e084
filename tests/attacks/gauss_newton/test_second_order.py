"""The Gauss-Newton attack against conditions that its result must fulfil."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leakwatch.attacks import (
    GaussNewton,
    PixelScale,
    Reconstruction,
    SharedGradient,
    Start,
)
from leakwatch.derivatives import GradientMap

RADIUS = 0.05


def problem(
    activation: type[nn.Module] = nn.Sigmoid, noise_std: float = 0.0
) -> tuple[GradientMap, Tensor, SharedGradient]:
    """Four images of 5×5 under a small convolutional network, float64."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1),
        activation(),
        nn.Conv2d(6, 6, 3, padding=1),
        activation(),
        nn.Flatten(),
        nn.Linear(150, 4),
    ).double()
    gradients = GradientMap(net, dtype=torch.float64)
    x = 0.1 + 0.8 * torch.rand(4, 1, 5, 5, dtype=torch.float64)
    shared = SharedGradient.of(
        gradients,
        x,
        torch.arange(4),
        noise_std=noise_std,
        generator=torch.Generator().manual_seed(1),
    )
    return gradients, x, shared


def run(
    attack: GaussNewton,
    gradients: GradientMap,
    shared: SharedGradient,
    start: Start,
    **changes: Any,
) -> Reconstruction:
    arguments: dict[str, Any] = {"seed": 0, "restarts": 1, "pixels": PixelScale()}
    return attack.run(gradients, shared, start=start, **(arguments | changes))


@pytest.mark.parametrize("activation", [nn.Sigmoid, nn.ReLU])
@pytest.mark.parametrize("method", ["dense", "matrix-free"])
def test_a_clean_gradient_gives_the_image_back(
    method: Any, activation: type[nn.Module]
) -> None:
    gradients, x, shared = problem(activation)
    attack = GaussNewton(method=method, fast=False)
    found = run(attack, gradients, shared, Start.near(x, RADIUS))
    assert [s.word for s in found.status] == ["ok"] * 4
    # 140 dB and more, where first-order attacks end at 50 to 90.
    torch.testing.assert_close(found.images, x, rtol=0, atol=1e-7)
    assert float(found.relative.max()) < 1e-8


def test_also_from_noise() -> None:
    gradients, x, shared = problem()
    found = run(GaussNewton(fast=False), gradients, shared, Start.uniform(), restarts=6)
    apart = (found.images - x).abs().flatten(1).amax(1)
    assert int((apart < 1e-6).sum()) >= 3
    for i, status in enumerate(found.status):
        # What was matched to rounding is the image; the rest says that it failed.
        assert (status.word == "ok") == (float(found.relative[i]) < 1e-2), status


@pytest.mark.parametrize("method", ["dense", "matrix-free"])
def test_the_result_under_noise_is_a_maximum_of_the_posterior(method: Any) -> None:
    s, r = 1e-3, 0.3
    gradients, x, shared = problem(noise_std=s)
    mean = torch.full((1, 5, 5), 0.4)
    attack = GaussNewton(
        method=method, box=False, prior_std=r, prior_mean=mean, fast=False, steps=200
    )
    found = run(attack, gradients, shared, Start.near(x, RADIUS))

    def objective(p: Tensor, i: int) -> Tensor:
        parameters = [q for q in gradients.module.parameters() if q.requires_grad]
        loss = nn.functional.cross_entropy(gradients.module(p[None]), torch.tensor([i]))
        g = torch.cat(
            [
                q.reshape(-1)
                for q in torch.autograd.grad(loss, parameters, create_graph=True)
            ]
        )
        misfit = (g - shared.gradient[i]).square().sum()
        return 0.5 * misfit + 0.5 * (s / r) ** 2 * (p - mean).square().sum()

    for i in range(4):
        p = found.images[i].clone().requires_grad_(True)
        (slope,) = torch.autograd.grad(objective(p, i), p)
        truth = x[i].clone().requires_grad_(True)
        (there,) = torch.autograd.grad(objective(truth, i), truth)
        assert float(slope.norm()) < 1e-3 * float(there.norm())
        assert float(objective(p, i).detach()) <= float(objective(truth, i).detach())


def test_the_box_is_kept_and_its_faces_are_used() -> None:
    gradients, x, _ = problem()
    x = (x - 0.5).sign().clamp(0, 1)
    shared = SharedGradient.of(gradients, x, torch.arange(4))
    found = run(GaussNewton(fast=False), gradients, shared, Start.near(x, 0.2))
    assert float(found.images.min()) >= 0.0
    assert float(found.images.max()) <= 1.0
    torch.testing.assert_close(found.images, x, rtol=0, atol=1e-6)


def test_a_target_does_not_depend_on_the_others() -> None:
    gradients, x, shared = problem()
    attack = GaussNewton(fast=False, steps=8)
    every = run(attack, gradients, shared, Start.near(x, RADIUS))
    for i in (0, 3):
        alone = run(
            attack,
            gradients,
            shared.select(torch.tensor([i])),
            Start.near(x[i : i + 1], RADIUS),
        )
        torch.testing.assert_close(
            alone.images[0], every.images[i], rtol=1e-9, atol=1e-9
        )


def test_no_time_returns_where_it_began() -> None:
    gradients, _, shared = problem()
    found = run(GaussNewton(), gradients, shared, Start.zeros(), time_limit=1e-9)
    assert float(found.images.abs().max()) == 0.0
    assert [s.word for s in found.status] == ["not converged"] * 4


def test_images_stay_finite_where_the_network_is_not() -> None:
    gradients, x, shared = problem()
    with torch.no_grad():
        for p in gradients.module.parameters():
            p.fill_(math.nan)
    found = run(GaussNewton(steps=3), gradients, shared, Start.near(x, RADIUS))
    assert bool(torch.isfinite(found.images).all())
    assert "ok" not in [s.word for s in found.status]


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": 0},
        {"damping": 0.0},
        {"method": "exact"},
        {"smoothing": -1.0},
        {"prior_std": 0.0},
    ],
)
def test_settings(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        GaussNewton(**wrong)


def test_another_networks_gradient() -> None:
    gradients, x, _ = problem()
    other = GradientMap(nn.Sequential(nn.Flatten(), nn.Linear(25, 4)))
    shared = SharedGradient.of(other, x.float(), torch.arange(4))
    with pytest.raises(ValueError, match="entries"):
        run(GaussNewton(), gradients, shared, Start.uniform())
