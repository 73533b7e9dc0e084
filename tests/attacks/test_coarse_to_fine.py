"""Descent in the coordinates of an image prior."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from leakwatch.attacks import FirstOrder, Priors, attack
from leakwatch.attacks.coarse_to_fine import CoarseToFine, _Components
from leakwatch.attacks.pixels import PixelScale
from leakwatch.priors import DensePrior, MeasuredPrior, measured_prior, natural_prior


def smooth(n: int, seed: int) -> Tensor:
    """Images of a few low frequencies."""
    prior = natural_prior((1, 8, 8))
    z = torch.randn(n, 64, generator=torch.Generator().manual_seed(seed)).double()
    rows = prior.leading(12)
    x = prior.mean.flatten() + 0.6 * z[:, :12] @ rows
    return x.view(n, 1, 8, 8).clamp(0, 1).float()


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(27, 4)
    )


def psnr(found: Tensor, x: Tensor) -> Tensor:
    return -10 * (found - x).flatten(1).square().mean(1).log10()


def test_it_finds_smooth_images_better_than_pixels_do() -> None:
    x, y = smooth(6, 1), torch.arange(6) % 4
    coarse = attack(net(), x, y, CoarseToFine(steps=150), data_range=1.0, start="zeros")
    pixels = attack(
        net(), x, y, FirstOrder(steps=150, priors=Priors(tv=1e-4)), data_range=1.0,
        start="zeros",
    )  # fmt: skip
    assert coarse.attack == "coarse-to-fine"
    assert bool(((coarse.images >= 0) & (coarse.images <= 1)).all())
    gain = psnr(coarse.images, x).median() - psnr(pixels.images, x).median()
    assert float(gain) > 3


def test_components_join_in_from_coarse_to_fine() -> None:
    prior, scale = natural_prior((1, 8, 8)), PixelScale([0.4], [0.2])
    first = torch.randn(2, 1, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    settings = CoarseToFine(steps=10, components=4)
    found = _Components(first, prior, scale, settings)
    order = prior.variance.flatten().argsort(descending=True, stable=True)
    with torch.no_grad():
        found.z.copy_(0.01 * torch.ones_like(found.z))
    seen = []
    for _ in range(10):
        pixels = scale.to_pixels(found.images().detach())
        apart = (pixels - prior.mean.float()).flatten(2)
        z = prior.coefficients(apart) / prior.variance.flatten().sqrt().float()
        there = (z[0, 0] - 0.01).abs() < 1e-3
        assert bool(there[order[: int(there.sum())]].all())
        seen.append(int(there.sum()))
    assert seen[0] == 4
    assert seen[-1] == 64
    assert seen == sorted(seen)


def test_it_takes_the_spectrum_of_a_measured_prior_and_no_matrix() -> None:
    prior = measured_prior(smooth(40, 2))
    assert isinstance(prior, MeasuredPrior)
    shape = (1, 8, 8)
    fitted = CoarseToFine().fit_to(shape, prior_std=1, prior_mean=None, prior=prior)
    assert fitted.prior is prior
    own = CoarseToFine(prior=natural_prior(shape))
    again = own.fit_to(shape, prior_std=1, prior_mean=None, prior=prior)
    assert again is own
    matrix = DensePrior(torch.full(shape, 0.5), torch.eye(64))
    kept = CoarseToFine().fit_to(shape, prior_std=1, prior_mean=None, prior=matrix)
    assert kept.prior is None
    x, y = smooth(1, 1), torch.tensor([0])
    with pytest.raises(ValueError, match=r"measured_prior\(\) or natural_prior"):
        attack(net(), x, y, CoarseToFine(prior=matrix), data_range=1.0)
    wrong = CoarseToFine(prior=natural_prior((1, 4, 4)))
    with pytest.raises(ValueError, match=r"of shape \(1, 4, 4\), but these"):
        attack(net(), x, y, wrong, data_range=1.0)
