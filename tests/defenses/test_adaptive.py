from __future__ import annotations

import pytest
import torch
from score_problems import CASES, Case, Problem, solved
from torch import Tensor

from leakwatch import GradientJacobian
from leakwatch.attacks import GaussNewton, PixelScale, SharedGradient, Start
from leakwatch.defenses import (
    DPSGD,
    Budget,
    Chain,
    Defense,
    Deflation,
    Diagonal,
    EigenNoise,
    GaussianNoise,
    GradientPruning,
    Knowledge,
    LinearMap,
    MixUp,
    Samples,
    Scaling,
    Selection,
    Shared,
    Smallest,
    averaged,
    mapped,
    observed,
    predicted_errors,
)
from leakwatch.derivatives import GradientMap


def maps(size: int) -> list[LinearMap]:
    stream = torch.Generator().manual_seed(0)
    factors = torch.rand(size, generator=stream).double()
    q = torch.linalg.qr(torch.randn(size, 3, generator=stream).double())[0].T
    index = torch.randperm(size, generator=stream)[: size // 2]
    selection = Selection(index, size)
    return [
        Scaling(factors),
        Deflation(q, torch.tensor([0.0, 0.5, 2.0]).double()),
        selection,
        Chain(selection, Scaling(factors[: size // 2])),
    ]


@pytest.mark.parametrize("kind", range(4))
def test_a_mapped_gradient_and_its_jacobian(
    kind: int, problem: Problem, samples: Samples, generator: torch.Generator
) -> None:
    through = maps(samples.gradients.size)[kind]
    dense = through.apply(torch.eye(through.columns).double()).T
    assert dense.shape == (through.rows, through.columns)
    phi = torch.randn(through.rows, generator=generator).double()
    torch.testing.assert_close(through.transpose(phi), dense.T @ phi)
    at = mapped(samples.gradients, through)
    assert at.size == through.rows
    g = at(samples.x, samples.y)
    jacobian = GradientJacobian(at, samples.x, samples.y)
    for i, oracle in enumerate(problem.oracles):
        torch.testing.assert_close(g[i], dense @ oracle.g, rtol=1e-10, atol=1e-14)
        j = dense @ oracle.j
        torch.testing.assert_close(jacobian.dense(i), j, rtol=1e-9, atol=1e-13)
        h = jacobian.gram(i).h * jacobian.scale[i] ** 2
        torch.testing.assert_close(h, j.T @ j, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_maps_of_every_kind_of_network(case: Case, generator: torch.Generator) -> None:
    problem = solved(case)
    at = GradientMap(problem.net, dtype=torch.float64)
    factors = torch.rand(at.size, generator=generator).double()
    through = mapped(at, Scaling(factors))
    g = through(problem.pixels, problem.y)
    v = torch.randn(2, problem.d_x, generator=generator).double()
    image = through.jvp(problem.pixels, problem.y, v)
    for i, oracle in enumerate(problem.oracles):
        expected = factors * oracle.g
        torch.testing.assert_close(g[i], expected, rtol=1e-9, atol=1e-13)
        expected = factors * (oracle.j @ v[i])
        torch.testing.assert_close(image[i], expected, rtol=1e-8, atol=1e-12)


def test_a_map_follows_the_weights_and_leaves_them_alone() -> None:
    net = torch.nn.Linear(3, 2)
    at = GradientMap(net, parameters="weight", dtype=torch.float64)
    half = mapped(at, Scaling(torch.full((6,), 0.5)))
    x, y = torch.rand(2, 3), torch.tensor([0, 1])
    before = {name: p.clone() for name, p in net.named_parameters()}
    torch.testing.assert_close(half(x, y), 0.5 * at(x, y))
    assert all(torch.equal(p, before[name]) for name, p in net.named_parameters())
    assert list(net.state_dict()) == ["weight", "bias"]
    with torch.no_grad():
        net.weight.mul_(3)
    torch.testing.assert_close(half(x, y), 0.5 * at(x, y))


def test_maps_that_do_not_fit() -> None:
    at = GradientMap(torch.nn.Linear(3, 2))
    with pytest.raises(ValueError, match="takes 5 entries, but 8 are shared"):
        mapped(at, Scaling(torch.ones(5)))
    with pytest.raises(ValueError, match="takes 4 numbers, but the first leaves 8"):
        Chain(Scaling(torch.ones(8)), Scaling(torch.ones(4)))

    class Weighted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = torch.nn.Parameter(torch.ones(()))

        def forward(self, module: torch.nn.Module, x: Tensor, y: Tensor) -> Tensor:
            losses = torch.nn.functional.cross_entropy(module(x), y, reduction="none")
            return self.factor * losses

    own = GradientMap(torch.nn.Linear(3, 2), Weighted())
    with pytest.raises(ValueError, match=r"criterion\.factor belong to the criterion"):
        mapped(own, Scaling(torch.ones(9)))


def attacked(
    gradients: GradientMap, message: Tensor, std: float, x: Tensor, y: Tensor
) -> Tensor:
    """Error of a Gauss–Newton attack from near the truth, per pixel."""
    shared = SharedGradient(message, y[None, None], tuple(x.shape), noise_std=std)
    attack = GaussNewton(box=False, prior_std=0.3, logits=False, fast=False, steps=8)
    found = attack.run(
        gradients,
        shared,
        pixels=PixelScale.unknown(),
        start=Start.near(x[None], 0.01),
        seed=0,
    )
    return (found.images[0] - x).square().mean()


def compared(
    defense: Defense, samples: Samples, seeds: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Naive and adaptive mean squared errors of one image, and predictions."""
    naive, adaptive = [], []
    x, y = samples.x[0], samples.y[0]
    for seed in range(seeds):
        stream = torch.Generator().manual_seed(seed)
        made = defense.protect(samples.gradient, generator=stream, samples=samples)
        std = float((made.variance[0] / made.gradient.shape[1]).sqrt())
        naive.append(attacked(samples.gradients, made.gradient[:1], std, x, y))
        o = observed(samples.gradients, made)
        adaptive.append(attacked(o.gradients, o.message, o.noise_std, x, y))
    predicted = predicted_errors(made, samples)
    both = torch.stack([predicted.naive[0], predicted.adaptive[0]]) / x.numel()
    return torch.stack(naive).mean(), torch.stack(adaptive).mean(), both


def test_whitening_wins_where_noise_differs_between_entries(
    samples: Samples, generator: torch.Generator
) -> None:
    """Half of the entries, at random, hardly have noise."""

    quiet = torch.rand(samples.gradients.size, generator=generator) < 0.5

    class Uneven:
        def protect(
            self, gradient: Tensor, *, generator: torch.Generator, samples: Samples
        ) -> Shared:
            variance = torch.full_like(gradient, 1e-10).double()
            variance[:, quiet] = 1e-14
            covariance = Diagonal(variance)
            noisy = gradient + covariance.draw(generator)
            return Shared(noisy, gradient, covariance.total, Knowledge(covariance))

    naive, adaptive, both = compared(Uneven(), samples, 2)  # type: ignore[arg-type]
    assert float(both[1]) < 0.2 * float(both[0])
    # A mean over 2 draws of some 64 directions, few of which dominate.
    assert float(naive) == pytest.approx(float(both[0]), rel=0.8)
    assert float(adaptive) == pytest.approx(float(both[1]), rel=0.8)


def test_entries_that_were_pruned_are_left_out(samples: Samples) -> None:
    naive, adaptive, _ = compared(GradientPruning(0.5), samples, 1)
    assert float(adaptive) < 1e-12
    assert float(naive) > 1e6 * float(adaptive)


def test_noised_directions_are_projected_away(samples: Samples) -> None:
    """Without a prior they can't be had; everything else is as if there were none."""
    noise = EigenNoise(Budget(1e-5, "relative"), Smallest(4), coefficients="sign")
    made = noise.protect(samples.gradient, generator=torch.Generator(), samples=samples)
    o = observed(samples.gradients, made, least=1e-4)
    jacobian = GradientJacobian(o.gradients, samples.x[:1], samples.y[:1])
    found = torch.linalg.svdvals(jacobian.dense(0))
    sigma = samples.basis.eigenvalues[0].sqrt()
    torch.testing.assert_close(found[:60], sigma[:60], rtol=1e-6, atol=0.0)
    assert bool((found[60:] < 2e-4 * sigma[60:]).all())
    # Of the noise nothing is left to see: half the floor along each direction.
    left = o.message - o.gradients(samples.x[:1], samples.y[:1])
    assert float(left.norm()) < 1e-3 * float(made.delta[0].norm())
    assert float(made.delta[0].norm()) > 0


def test_noise_without_a_direction_hides_nothing_and_changes_nothing() -> None:
    """Of a network whose units are all dead, whatever its input."""
    net = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)
    ).double()
    torch.nn.init.constant_(net[0].bias, -100.0)  # type: ignore[arg-type]
    at = Samples(GradientMap(net), torch.rand(1, 3).double(), torch.tensor([1]))
    noise = EigenNoise(Budget(1.0), Smallest(2))
    made = noise.protect(at.gradient, generator=torch.Generator(), samples=at)
    o = observed(at.gradients, made)
    torch.testing.assert_close(o.message, made.gradient, rtol=0, atol=0)
    torch.testing.assert_close(o.gradients(at.x, at.y), at.gradient, rtol=0, atol=0)


def test_a_clipped_message_is_matched_by_its_direction(samples: Samples) -> None:
    clip = float(samples.gradient.norm(dim=1).mean())
    made = DPSGD(clip, 0.1).protect(samples.gradient, generator=torch.Generator())
    longer = samples.gradient.norm(dim=1) > clip
    for row in range(2):
        expected = "cosine" if bool(longer[row]) else "l2"
        assert observed(samples.gradients, made, row).distance == expected


def test_the_mean_of_answers_has_less_noise(
    samples: Samples, generator: torch.Generator
) -> None:
    noise = GaussianNoise(Budget(0.1, "std"))
    answers = [noise.protect(samples.gradient, generator=generator) for _ in range(100)]
    mean = averaged(answers)
    std = float((mean.gradient - samples.gradient).std())
    assert std == pytest.approx(0.01, rel=0.1)
    assert observed(samples.gradients, mean).noise_std == pytest.approx(0.01)
    assert float(mean.variance[0]) == pytest.approx(float(answers[0].variance[0]) / 100)
    once = observed(samples.gradients, answers[0], queries=100)
    assert once.noise_std == pytest.approx(0.01)


def test_answers_that_do_not_average(samples: Samples) -> None:
    with pytest.raises(ValueError, match="nothing to average"):
        averaged([])
    noise = GaussianNoise(Budget(0.1, "std"))
    one = noise.protect(samples.gradient, generator=torch.Generator())
    two = noise.protect(2 * samples.gradient, generator=torch.Generator())
    with pytest.raises(ValueError, match="different queries"):
        averaged([one, two])
    mixed = MixUp(0.5).protect(
        samples.gradient, generator=torch.Generator(), samples=samples
    )
    with pytest.raises(ValueError, match="mixtures"):
        averaged([mixed, mixed])
    pruned = GradientPruning(0.5).protect(samples.gradient, generator=torch.Generator())
    assert torch.equal(averaged([pruned, pruned]).gradient, pruned.gradient)


def test_the_noise_of_a_batch_along_directions_is_not_known(samples: Samples) -> None:
    noise = EigenNoise(Budget(0.1), "smallest")
    made = noise.protect_batch(
        samples.gradient, generator=torch.Generator(), samples=samples
    )
    with pytest.raises(ValueError, match="protect samples one by one"):
        observed(samples.gradients, made)
    with pytest.raises(IndexError, match="row 2 of 2 messages"):
        observed(
            samples.gradients,
            GaussianNoise(Budget(0.1)).protect(
                samples.gradient, generator=torch.Generator()
            ),
            2,
        )
