"""Two attempts at one image: what they agree upon is nearest to it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from leakwatch.attacks.agreement import agreed
from leakwatch.priors import CosinePrior, natural_prior

SHAPE = (3, 16, 16)


def attempts(error: float, own: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Images of the prior, and two attempts with independent errors of its kind."""
    prior = natural_prior(SHAPE)
    generator = torch.Generator().manual_seed(0)
    x, e, f = (prior.draw(32, generator).view(32, 1, *SHAPE) for _ in range(3))
    return prior.mean + x, prior.mean + x + error * e, prior.mean + x + own * error * f


def mse(images: Tensor, x: Tensor) -> float:
    return float((images - x).square().mean())


@pytest.mark.parametrize("error", [0.3, 1.0, 2.0])
def test_its_error_is_that_of_a_shrunk_mean(error: float) -> None:
    """Of attempts x + error·e with r = 1/(1 + error²), in bands of many components.

    The image is k (x + error·((1 − w) e + w f)), k = 2r/(1 + r), w = (1 − r)/2.
    """
    prior = CosinePrior(torch.zeros(1, 32, 32), torch.ones(1, 32, 32))
    generator = torch.Generator().manual_seed(0)
    x, e, f = (prior.draw(8, generator).view(8, 1, 1, 32, 32) for _ in range(3))
    a, b = x + error * e, x + error * f
    r = 1 / (1 + error**2)
    k, w = 2 * r / (1 + r), (1 - r) / 2
    expected = (1 - k) ** 2 + (k * error) ** 2 * ((1 - w) ** 2 + w**2)
    got = mse(agreed(a, b, prior), x)
    assert got == pytest.approx(expected, rel=0.1)
    assert got < min(mse(a, x), mse(b, x), 1.0)


def test_where_both_agree_the_better_one_stands() -> None:
    x, a, b = attempts(0.05, own=6.0)
    got = agreed(a, b, natural_prior(SHAPE))
    assert mse(got, x) < 0.5 * mse((a + b) / 2, x)
    torch.testing.assert_close(agreed(a, a, natural_prior(SHAPE)), a)


def test_every_band_for_itself() -> None:
    """Coarse components found, fine ones made up: these go to the prior's mean."""
    variance = torch.ones(1, 8, 8)
    variance[0, 0, 0] = 100.0
    prior = CosinePrior(torch.zeros(1, 8, 8), variance)
    z = torch.zeros(1, 1, 64, dtype=torch.float64)
    other = z.clone()
    z[..., 0] = other[..., 0] = 10.0
    z[..., 40], other[..., 50] = 3.0, 3.0
    images = [prior.images(v).view(1, 1, 1, 8, 8) for v in (z, other)]
    kept = prior.coefficients(agreed(*images, prior).flatten(2))
    expected = torch.zeros_like(kept)
    expected[..., 0] = 10.0
    torch.testing.assert_close(kept, expected, atol=1e-9, rtol=0)
