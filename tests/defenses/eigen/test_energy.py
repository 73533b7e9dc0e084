from __future__ import annotations

import math

import pytest
import torch

from leakwatch.defenses import (
    Budget,
    Diagonal,
    EigenNoise,
    GaussianNoise,
    Isotropic,
    Samples,
    energy_in_range,
    energy_share,
)


def test_isotropic_noise_spends_the_rank_over_the_entries(
    samples: Samples, partial: Samples
) -> None:
    for made, rank in ((samples, 64), (partial, 20)):
        size = made.gradients.size
        covariance = Isotropic(torch.tensor([0.3, 2.0]).double(), size)
        share = energy_share(covariance, made.basis)
        torch.testing.assert_close(
            share, torch.full_like(share, rank / size), rtol=1e-12, atol=0.0
        )


def test_the_share_of_one_draw_averages_to_the_expected_share(
    samples: Samples, generator: torch.Generator
) -> None:
    noise = GaussianNoise(Budget(0.1))
    shares = torch.stack(
        [
            energy_in_range(
                noise.protect(samples.gradient, generator=generator).delta,
                samples.basis,
            )
            for _ in range(30)
        ]
    )
    expected = 64 / samples.gradients.size
    error = 4 * float(shares.std()) / math.sqrt(shares.numel())
    assert abs(float(shares.mean()) - expected) < error
    assert error < 0.2 * expected


def test_a_projection_by_hand(samples: Samples, generator: torch.Generator) -> None:
    delta = torch.randn(2, samples.gradients.size, generator=generator).double()
    found = energy_in_range(delta, samples.basis)
    for i in range(2):
        v = samples.basis.singular(i)
        inside = v.T @ (v @ delta[i])
        expected = (inside.norm() / delta[i].norm()).square()
        torch.testing.assert_close(found[i], expected, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("name", ["smallest", "proportional", "waterfill"])
def test_noise_along_singular_directions_is_all_inside(
    name: str, samples: Samples
) -> None:
    made = EigenNoise(Budget(0.1), name).protect(
        samples.gradient, generator=torch.Generator(), samples=samples
    )
    assert made.knowledge.covariance is not None
    share = energy_share(made.knowledge.covariance, samples.basis)
    empirical = energy_in_range(made.delta, samples.basis)
    for found in (share, empirical):
        torch.testing.assert_close(found, torch.ones_like(found), rtol=1e-6, atol=0.0)


def test_noise_by_entry_is_projected_entry_by_entry(
    samples: Samples, generator: torch.Generator
) -> None:
    variance = torch.rand(2, samples.gradients.size, generator=generator).double()
    share = energy_share(Diagonal(variance), samples.basis)
    for i in range(2):
        v = samples.basis.singular(i)
        expected = (v @ torch.diag(variance[i]) @ v.T).trace() / variance[i].sum()
        torch.testing.assert_close(share[i], expected, rtol=1e-7, atol=0.0)


def test_no_noise_has_no_share(samples: Samples) -> None:
    nothing = Isotropic(torch.zeros(2).double(), samples.gradients.size)
    assert bool(energy_share(nothing, samples.basis).isnan().all())
