from __future__ import annotations

import pytest
import torch
from score_problems import Problem

from leakwatch import score
from leakwatch.defenses import (
    DPSGD,
    Budget,
    Defense,
    EigenNoise,
    GaussianNoise,
    GradientPruning,
    MixUp,
    RowNorms,
    Samples,
    Shared,
    observed,
    predicted_errors,
)

NOISES: tuple[Defense, ...] = (
    GaussianNoise(Budget(0.05)),
    EigenNoise(Budget(0.05), "smallest"),
    EigenNoise(Budget(0.05), "proportional"),
    EigenNoise(Budget(0.05), "waterfill"),
    EigenNoise(Budget(0.05), RowNorms(probes=None)),
)
R = 0.3


def protected(defense: Defense, samples: Samples, seed: int = 0) -> Shared:
    stream = torch.Generator().manual_seed(seed)
    return defense.protect(samples.gradient, generator=stream, samples=samples)


@pytest.mark.parametrize("prior_std", [None, R])
@pytest.mark.parametrize("defense", NOISES, ids=lambda d: d.name)
def test_both_errors_against_a_dense_attacker(
    defense: Defense, prior_std: float | None, problem: Problem, samples: Samples
) -> None:
    made = protected(defense, samples)
    found = predicted_errors(made, samples, prior_std=prior_std)
    eye = torch.eye(64).double()
    for i, oracle in enumerate(problem.oracles):
        noise = _dense(made, samples, i)
        s2 = float(made.variance[i]) / len(oracle.j)
        eps = 0.0 if prior_std is None else s2 / prior_std**2
        damped = torch.linalg.inv(oracle.h + eps * eye)
        naive = (damped @ oracle.j.T @ noise @ oracle.j @ damped).trace()
        if prior_std is not None:
            # What the damping pulls to the prior mean, on average over images.
            naive = naive + (eps * prior_std * damped).square().sum()
        adaptive = _posterior(oracle.j, noise, prior_std).trace()
        torch.testing.assert_close(found.naive[i], naive, rtol=1e-6, atol=0.0)
        torch.testing.assert_close(found.adaptive[i], adaptive, rtol=1e-4, atol=0.0)
    assert found.hidden.tolist() == found.adaptive_hidden.tolist() == [0, 0]


def _posterior(
    j: torch.Tensor, noise: torch.Tensor, prior_std: float | None
) -> torch.Tensor:
    """The covariance of x given the message."""
    eye = torch.eye(64).double()
    if int((noise.diagonal() > 0).sum()) == len(j) and bool(
        (noise == torch.diag(noise.diagonal())).all()
    ):
        info = j.T @ (j / noise.diagonal()[:, None])
        return torch.linalg.inv(
            info if prior_std is None else info + eye / prior_std**2
        )
    # Noise in the range of J only has no inverse. In coordinates of that range, and in
    # the form that needs none; a wide prior stands for no prior.
    r2 = (30.0 if prior_std is None else prior_std) ** 2
    range_of_j = torch.linalg.svd(j, full_matrices=False)[0]
    j, noise = range_of_j.T @ j, range_of_j.T @ noise @ range_of_j
    gain = torch.linalg.solve(r2 * j @ j.T + noise, r2 * j).T
    return r2 * (eye - gain @ j)


def _dense(made: Shared, samples: Samples, i: int) -> torch.Tensor:
    """Σ as a matrix."""
    size = samples.gradients.size
    variance = made.knowledge.covariance.variance[i]  # type: ignore[union-attr]
    if variance.ndim == 0:
        return variance * torch.eye(size).double()
    if len(variance) == size:
        return torch.diag(variance)
    v = samples.basis.singular(i)
    return (v.T * variance) @ v


@pytest.mark.parametrize("defense", NOISES, ids=lambda d: d.name)
def test_knowing_the_defense_never_hurts(defense: Defense, samples: Samples) -> None:
    for prior_std in (None, R):
        found = predicted_errors(
            protected(defense, samples), samples, prior_std=prior_std
        )
        assert bool((found.adaptive <= found.naive * (1 + 1e-9)).all())


def test_for_isotropic_noise_they_are_the_scores(
    problem: Problem, samples: Samples
) -> None:
    made = protected(GaussianNoise(Budget(1e-4, "std")), samples)
    known = score(
        problem.net,
        problem.pixels,
        problem.y,
        ["i2f", "i2f_bayes"],
        noise_std=1e-4,
        prior_std=R,
        dtype=torch.float64,
    )
    plain = predicted_errors(made, samples)
    bayes = predicted_errors(made, samples, prior_std=R)
    for found in (plain.naive, plain.adaptive):
        torch.testing.assert_close(found.sqrt(), known["i2f"], rtol=1e-7, atol=0.0)
    for found in (bayes.naive, bayes.adaptive):
        torch.testing.assert_close(
            found.sqrt(), known["i2f_bayes"], rtol=1e-7, atol=0.0
        )


def test_a_change_that_is_not_random_is_i2f_for_that_change(
    problem: Problem, samples: Samples
) -> None:
    made = protected(GradientPruning(0.2), samples)
    known = score(
        problem.net,
        problem.pixels,
        problem.y,
        ["i2f"],
        delta=made.delta,
        dtype=torch.float64,
    )
    found = predicted_errors(made, samples)
    torch.testing.assert_close(found.naive.sqrt(), known["i2f"], rtol=1e-7, atol=0.0)
    # Who drops the pruned entries has equations enough without them.
    assert found.adaptive.tolist() == [0.0, 0.0]
    assert found.adaptive_hidden.tolist() == [0, 0]


def test_a_heavily_pruned_gradient_leaves_directions_hidden(
    problem: Problem, samples: Samples
) -> None:
    made = protected(GradientPruning(0.98), samples)
    found = predicted_errors(made, samples, prior_std=R)
    kept = made.knowledge.kept
    assert kept is not None
    for i, oracle in enumerate(problem.oracles):
        rank = int(torch.linalg.matrix_rank(oracle.j[kept[i]], rtol=1e-10))
        assert 0 < rank < 64
        assert int(found.adaptive_hidden[i]) == 64 - rank
        assert float(found.adaptive[i]) == pytest.approx((64 - rank) * R**2)


def test_of_a_message_without_entries_the_prior_is_left(samples: Samples) -> None:
    found = predicted_errors(protected(GradientPruning(1.0), samples), samples)
    assert found.adaptive.tolist() == [0.0, 0.0]
    assert found.adaptive_hidden.tolist() == [64, 64]
    made = protected(GradientPruning(1.0), samples)
    found = predicted_errors(made, samples, prior_std=R)
    torch.testing.assert_close(
        found.adaptive, torch.full_like(found.adaptive, 64 * R**2)
    )
    with pytest.raises(ValueError, match="every entry of message 0 was pruned"):
        observed(samples.gradients, made)


def test_clipping_is_the_cosine_jacobian(problem: Problem, samples: Samples) -> None:
    clip = 0.5 * float(samples.gradient.norm(dim=1).min())
    made = protected(DPSGD(clip, 1e-3), samples)
    found = predicted_errors(made, samples, prior_std=R)
    s2 = (1e-3 * clip) ** 2
    for i, oracle in enumerate(problem.oracles):
        unit = oracle.g / oracle.g.norm()
        along = oracle.j.T @ unit
        factor = (clip / oracle.g.norm()) ** 2
        mu = torch.linalg.eigvalsh(factor * (oracle.h - torch.outer(along, along)))
        expected = (s2 * R**2 / (s2 + mu.clamp_min(0) * R**2)).sum()
        assert float(found.adaptive[i]) == pytest.approx(float(expected), rel=1e-5)
        assert float(found.naive[i]) > float(found.adaptive[i])


def test_clipping_that_does_not_bite_is_gaussian_noise(samples: Samples) -> None:
    clipped = predicted_errors(protected(DPSGD(1e3, 1e-7), samples), samples)
    noisy = protected(GaussianNoise(Budget(1e-4, "std")), samples)
    plain = predicted_errors(noisy, samples)
    torch.testing.assert_close(clipped.adaptive, plain.adaptive)
    torch.testing.assert_close(clipped.naive, plain.naive)


@pytest.mark.parametrize("defense", NOISES, ids=lambda d: d.name)
def test_answers_to_repeated_queries_average_out(
    defense: Defense, samples: Samples
) -> None:
    made = protected(defense, samples)
    once = predicted_errors(made, samples)
    often = predicted_errors(made, samples, queries=25)
    torch.testing.assert_close(25 * often.naive, once.naive, rtol=1e-9, atol=0.0)
    torch.testing.assert_close(25 * often.adaptive, once.adaptive, rtol=1e-6, atol=0.0)


def test_a_waterfilled_direction_has_the_error_of_the_box(samples: Samples) -> None:
    made = protected(EigenNoise(Budget(1e6, "norm"), "waterfill"), samples)
    found = predicted_errors(made, samples)
    torch.testing.assert_close(found.naive, torch.full_like(found.naive, 64.0))
    # An attacker with a Gaussian prior of that size halves it.
    prior = predicted_errors(made, samples, prior_std=1.0)
    torch.testing.assert_close(prior.adaptive, torch.full_like(found.naive, 32.0))


def test_who_knows_the_partner_misses_what_the_mixture_does_not_show(
    samples: Samples, partial: Samples
) -> None:
    for prior_std in (None, R):
        found = predicted_errors(
            protected(MixUp(0.9), samples), samples, prior_std=prior_std
        )
        assert found.adaptive.tolist() == [0.0, 0.0]
        assert found.adaptive_hidden.tolist() == [0, 0]
        assert bool((found.naive > 0).all())
    made = protected(MixUp(0.9), partial)
    mixing = made.knowledge.mixing
    assert mixing is not None
    for row in range(2):
        at = mixing.gradient_map(partial.gradients, row)
        j = at.dense(mixing.mixed[row], mixing.y[row], torch.eye(64).double())
        hidden = 64 - int(torch.linalg.matrix_rank(j))
        assert hidden > 40
        found = predicted_errors(made, partial, prior_std=R)
        assert int(found.adaptive_hidden[row]) == hidden
        assert float(found.adaptive[row]) == pytest.approx(hidden * R**2, rel=1e-12)


def test_bad_arguments(samples: Samples) -> None:
    made = protected(NOISES[0], samples)
    with pytest.raises(ValueError, match="prior_std must be positive and finite"):
        predicted_errors(made, samples, prior_std=0.0)
    with pytest.raises(ValueError, match="queries must be at least 1"):
        predicted_errors(made, samples, queries=0)
    with pytest.raises(ValueError, match="2 messages for 1 samples"):
        predicted_errors(made, samples.select(slice(0, 1)))
