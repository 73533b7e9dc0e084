"""Several attempts at one image: what they agree upon is nearest to it."""

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


@pytest.mark.parametrize("count", [2, 3, 6])
@pytest.mark.parametrize("error", [0.3, 1.0, 2.0])
def test_its_error_is_that_of_a_shrunk_mean(error: float, count: int) -> None:
    """Of k attempts x + error·e, in bands of many components.

    x has variance 1: the best estimate from the mean of k, whose errors have error²/k,
    is off by error²/k/(1 + error²/k).
    """
    prior = CosinePrior(torch.zeros(1, 32, 32), torch.ones(1, 32, 32))
    generator = torch.Generator().manual_seed(0)
    x, *errors = (
        prior.draw(8, generator).view(8, 1, 1, 32, 32) for _ in range(count + 1)
    )
    attempts = torch.stack([x + error * e for e in errors])
    got = mse(agreed(attempts, torch.zeros(count, 8), prior), x)
    left = error**2 / count
    assert got == pytest.approx(left / (1 + left), rel=0.1)
    assert got < min(*(mse(a, x) for a in attempts), 1.0)


def test_attempts_that_match_worse_count_less() -> None:
    x, a, b = attempts(0.05, own=6.0)
    both, prior = torch.stack([a, b]), natural_prior(SHAPE)
    even, told = torch.zeros(2, len(x)), torch.zeros(2, len(x))
    told[1] = 0.05
    assert mse(agreed(both, told, prior), x) < 0.5 * mse(agreed(both, even, prior), x)
    # One that there is not counts nothing.
    told[1] = torch.inf
    three = torch.stack([a, torch.full_like(a, 9.0), a])
    told = torch.stack([even[0], told[1], even[0]])
    torch.testing.assert_close(agreed(three, told, prior), a)


def test_a_single_attempt_stands() -> None:
    _, a, b = attempts(0.5)
    prior = natural_prior(SHAPE)
    torch.testing.assert_close(agreed(a[None], torch.zeros(1, len(a)), prior), a)
    none = torch.zeros(2, len(a))
    none[1] = torch.inf
    torch.testing.assert_close(agreed(torch.stack([a, b]), none, prior), a)


def test_every_band_for_itself() -> None:
    """Coarse components found, fine ones made up: these go to the prior's mean."""
    variance = torch.ones(1, 8, 8)
    variance[0, 0, 0] = 100.0
    prior = CosinePrior(torch.zeros(1, 8, 8), variance)
    z = torch.zeros(1, 1, 64, dtype=torch.float64)
    other = z.clone()
    z[..., 0] = other[..., 0] = 10.0
    z[..., 40], other[..., 50] = 3.0, 3.0
    images = torch.stack([prior.images(v).view(1, 1, 1, 8, 8) for v in (z, other)])
    kept = prior.coefficients(agreed(images, torch.zeros(2, 1), prior).flatten(2))
    expected = torch.zeros_like(kept)
    expected[..., 0] = 10.0
    torch.testing.assert_close(kept, expected, atol=1e-9, rtol=0)
