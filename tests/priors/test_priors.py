"""What an attacker knows of images, against dense float64 oracles."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import leakwatch
from leakwatch.priors import (
    CosinePrior,
    DensePrior,
    GaussianPrior,
    MeasuredPrior,
    measured_prior,
    natural_prior,
)


def smooth(n: int, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Samples whose neighbouring pixels and channels are alike."""
    x = torch.randn(n, *shape, generator=torch.Generator().manual_seed(seed)).double()
    for axis in range(1, len(shape) + 1):
        x = 0.6 * x + 0.4 * x.roll(1, axis)
    return 0.5 + 0.1 * x


def priors() -> list[GaussianPrior]:
    shape = (3, 4, 5)
    root = torch.randn(60, 60, generator=torch.Generator().manual_seed(1)).double()
    return [
        DensePrior(torch.full(shape, 0.4), root @ root.T / 60 + 0.1 * torch.eye(60)),
        natural_prior(shape),
        measured_prior(smooth(40, shape)),
        measured_prior(smooth(400, shape)),
    ]


@pytest.mark.parametrize("prior", priors(), ids=lambda p: type(p).__name__)
def test_all_forms_of_a_covariance_are_of_one_matrix(prior: GaussianPrior) -> None:
    c, eye = prior.covariance, torch.eye(60, dtype=torch.float64)
    v = torch.randn(7, 60, dtype=torch.float64)
    assert torch.allclose(c, c.T, rtol=0, atol=1e-15)
    assert torch.allclose(prior.mul(v), v @ c, rtol=0, atol=1e-13)
    assert torch.allclose(prior.solve(v) @ c, v, rtol=0, atol=1e-10)
    assert torch.allclose(prior.precision @ c, eye, rtol=0, atol=1e-10)
    assert torch.allclose(prior.root @ prior.root.T, c, rtol=0, atol=1e-14)
    assert prior.largest == pytest.approx(float(torch.linalg.eigvalsh(c)[-1]))
    assert prior.std == pytest.approx(math.sqrt(float(c.diagonal().mean())), rel=1e-5)


@pytest.mark.parametrize("shape", [(5,), (2, 6), (3, 4, 5), (1, 2, 3, 4)])
def test_cosines_turn_without_stretching(shape: tuple[int, ...]) -> None:
    x = torch.randn(6, math.prod(shape), dtype=torch.float64)
    spectrum = measured_prior(smooth(30, shape)).spectrum
    z = spectrum.coefficients(x)
    assert torch.allclose(z @ z.T, x @ x.T, rtol=0, atol=1e-12)
    assert torch.allclose(spectrum.images(z), x, rtol=0, atol=1e-13)


def test_a_cosine_of_one_frequency_is_one_coefficient() -> None:
    prior = natural_prior((1, 8, 6))
    rows = torch.cos(math.pi / 8 * 3 * (torch.arange(8).double() + 0.5))
    z = prior.coefficients(rows[:, None].expand(8, 6).flatten()).view(8, 6)
    assert float(z[3, 0].abs()) == pytest.approx(math.sqrt(8 / 2 * 6), rel=1e-12)
    z[3, 0] = 0
    assert float(z.abs().max()) < 1e-13


def test_shrinking_is_that_of_ledoit_and_wolf_where_the_spectrum_is_white() -> None:
    shape, n = (2, 3, 4), 50
    x = smooth(n, shape)
    prior = measured_prior(x)
    assert isinstance(prior, MeasuredPrior)
    z = prior.spectrum.coefficients((x - x.mean(0)).flatten(1))
    w = z / prior.spectrum.variance.flatten().sqrt()
    s = w.T @ w / n
    apart = (s - s.trace() / 24 * torch.eye(24)).square().sum()
    error = sum((torch.outer(r, r) - s).square().sum() for r in w) / n**2
    assert prior.shrinkage == pytest.approx(float(error / apart), rel=1e-5)
    t = prior.spectrum.covariance
    rho, own = prior.shrinkage, torch.cov(x.flatten(1).T)
    expected = (1 - rho) * own + rho * t
    assert torch.allclose(prior.covariance, expected, rtol=0, atol=1e-8)


def test_many_samples_give_the_covariance_that_made_them() -> None:
    x = smooth(20_000, (1, 4, 4))
    prior = measured_prior(x)
    assert isinstance(prior, MeasuredPrior)
    truth = torch.cov(smooth(20_000, (1, 4, 4), seed=1).flatten(1).T)
    apart = float((prior.covariance - truth).norm() / truth.norm())
    # Each of two estimates from n samples errs by about √(d/n) = 0.03.
    assert apart < 0.06
    assert prior.shrinkage < 0.02


def test_large_samples_have_the_same_power_spectrum_without_being_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = smooth(40, (3, 4, 5))
    small = measured_prior(x)
    monkeypatch.setattr("leakwatch.priors.measured.LARGEST_DENSE", 10)
    large = measured_prior(x)
    assert type(large) is CosinePrior
    assert torch.allclose(large.mean, small.mean, rtol=0, atol=1e-12)
    assert torch.allclose(large.mean, x.mean(0), rtol=0, atol=1e-12)
    expected = small.spectrum.covariance
    assert torch.allclose(large.covariance, expected, rtol=0, atol=1e-8)


def test_photographs_vary_at_low_frequencies_and_in_brightness() -> None:
    prior = natural_prior((3, 16, 16), data_range=255)
    assert prior.std == pytest.approx(0.24 * 255, rel=1e-12)
    grey = prior.variance[0]
    ratio = float(grey[0, 2] / grey[0, 8])
    assert ratio == pytest.approx(4**2.4, rel=1e-12)
    shares = prior.variance.flatten(1).sum(1) / prior.variance.sum()
    assert shares.tolist() == pytest.approx([0.88, 0.08, 0.04], rel=1e-12)
    assert prior.channels is not None
    assert prior.channels[:, 0].tolist() == pytest.approx([3**-0.5] * 3, rel=1e-12)


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        (torch.rand(15, 1, 3, 3), "at least 16 samples, got 15"),
        (torch.full((20, 1, 3, 3), 0.3), "finite and vary"),
        (torch.full((20, 1, 3, 3), math.nan), "finite"),
        ([torch.rand(1, 3, 3), torch.rand(1, 3, 4)], "one shape"),
    ],
)
def test_what_no_prior_can_be_measured_on(samples: Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        measured_prior(samples)


@pytest.mark.parametrize(
    ("prior", "error", "words"),
    [
        ("data", ValueError, "measured_prior"),
        ("blue", ValueError, "'white', 'data', 'natural'"),
        (3, TypeError, "got int"),
        (natural_prior((1, 4, 4)), ValueError, r"of shape \(1, 4, 4\), but these"),
        ("natural", ValueError, "leave prior_std out"),
    ],
)
def test_a_prior_that_can_not_be_meant(
    prior: object, error: type[Exception], words: str
) -> None:
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(25, 3))
    more = {"prior_std": 0.2} if prior == "natural" else {}
    x, y = torch.rand(1, 1, 5, 5), torch.tensor([0])
    with pytest.raises(error, match=words):
        leakwatch.score(net, x, y, "bayes", noise_std=1e-2, prior=prior, **more)


def test_probes_measure_the_statistics_of_their_data() -> None:
    x = smooth(64, (1, 4, 4)).clamp(0, 1).float()
    data = torch.utils.data.TensorDataset(x, torch.arange(64) % 4)
    probes = leakwatch.ProbeSet.from_dataset(data, n=4)
    assert probes.prior is not None
    assert torch.allclose(probes.prior.mean.float(), x.mean(0), rtol=0, atol=1e-6)
    assert probes.prior_std == probes.prior.std
    assert torch.equal(probes.prior_mean, probes.prior.mean.float())
    few = leakwatch.ProbeSet.from_dataset(data, n=4, prior_samples=3)
    assert few.prior is None
