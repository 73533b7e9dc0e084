"""Defenses that look at gradients only, and what all of them make of batches."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from leakwatch.defenses import (
    DPSGD,
    Budget,
    Defense,
    EigenNoise,
    GaussianNoise,
    GradientPruning,
    MixUp,
    PruningToBudget,
    Reduction,
    RowNorms,
    Samples,
    perturbation,
)

G = torch.tensor([[3.0, -1.0, 2.0, 0.5, -0.5], [0.0, 1.0, -1.0, 1.0, 4.0]]).double()


def everything() -> list[Defense]:
    return [
        GaussianNoise(Budget(0.1)),
        GradientPruning(0.3),
        GradientPruning(0.3, "layer"),
        PruningToBudget(Budget(0.3)),
        EigenNoise(Budget(0.1), "smallest"),
        EigenNoise(Budget(0.1), RowNorms(probes=4)),
        DPSGD(0.5, 0.1),
        MixUp(0.7),
    ]


@pytest.mark.parametrize("defense", everything(), ids=lambda d: d.name)
def test_a_defense_gives_messages_of_the_shape_and_dtype_that_went_in(
    defense: Defense, samples: Samples
) -> None:
    for dtype in (torch.float32, torch.float64):
        g = samples.gradient.to(dtype)
        one = torch.Generator().manual_seed(0)
        made = defense.protect(g, generator=one, samples=samples)
        assert made.gradient.shape == g.shape
        assert made.gradient.dtype == dtype
        assert torch.equal(made.clean, g)
        assert made.variance.shape == (2,)
        assert made.variance.dtype == torch.float64
        again = torch.Generator().manual_seed(0)
        same = defense.protect(g, generator=again, samples=samples)
        assert torch.equal(made.gradient, same.gradient)


@pytest.mark.parametrize("defense", everything(), ids=lambda d: d.name)
def test_a_defense_draws_from_its_generator_only(
    defense: Defense, samples: Samples
) -> None:
    _ = samples.basis
    before = torch.random.get_rng_state()
    stream = torch.Generator().manual_seed(0)
    defense.protect(samples.gradient, generator=stream, samples=samples)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("unit", ["norm", "relative", "std"])
def test_gaussian_noise_has_the_mean_square_of_its_budget(unit: str) -> None:
    budget = Budget(0.5, unit)  # type: ignore[arg-type]
    g = torch.ones(1, 100).double()
    expected = {"norm": 0.25, "relative": 25.0, "std": 25.0}[unit]
    stream = torch.Generator().manual_seed(0)
    made = [GaussianNoise(budget).protect(g, generator=stream) for _ in range(400)]
    assert float(made[0].variance[0]) == pytest.approx(expected)
    squares = torch.stack([m.delta.square().sum() for m in made])
    error = 4 * expected * math.sqrt(2 / 100 / 400)
    assert abs(float(squares.mean()) - expected) < error


@pytest.mark.parametrize(
    ("share", "left"),
    [
        (0.0, [[3.0, -1.0, 2.0, 0.5, -0.5], [0.0, 1.0, -1.0, 1.0, 4.0]]),
        # The earlier of equal magnitudes goes first.
        (0.2, [[3.0, -1.0, 2.0, 0.0, -0.5], [0.0, 1.0, -1.0, 1.0, 4.0]]),
        (0.6, [[3.0, 0.0, 2.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0, 4.0]]),
        (0.79, [[3.0, 0.0, 2.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0, 4.0]]),
        (1.0, [[0.0] * 5, [0.0] * 5]),
    ],
)
def test_pruning_by_hand(share: float, left: list[list[float]]) -> None:
    made = GradientPruning(share).protect(G, generator=torch.Generator())
    assert made.gradient.tolist() == left
    kept = made.knowledge.kept
    assert kept is not None
    assert (~kept).sum(1).tolist() == [int(share * 5 + 1e-9)] * 2
    torch.testing.assert_close(made.delta, torch.tensor(left).double() - G)
    assert made.bias is not None
    assert torch.equal(made.bias, made.delta)
    assert made.variance.tolist() == [0.0, 0.0]


def test_pruning_takes_exactly_its_share_whatever_rounding_makes_of_it() -> None:
    g = torch.arange(1.0, 11.0)[None]
    for tenth in range(11):
        made = GradientPruning(tenth / 10).protect(g, generator=torch.Generator())
        assert int((made.gradient == 0).sum()) == tenth
    # 0.29 · 100 = 28.999999999999996
    made = GradientPruning(0.29).protect(
        torch.arange(1.0, 101.0)[None], generator=torch.Generator()
    )
    assert int((made.gradient == 0).sum()) == 29


def test_pruning_to_a_budget_takes_what_it_pays_for() -> None:
    # Squares, smallest first: 1/4, 1/4, 1, 4, 9.
    for budget, left in (
        (0.0, [3.0, -1.0, 2.0, 0.5, -0.5]),
        (0.6, [3.0, -1.0, 2.0, 0.0, -0.5]),
        (math.sqrt(0.5), [3.0, -1.0, 2.0, 0.0, 0.0]),
        (1.2247, [3.0, -1.0, 2.0, 0.0, 0.0]),
        (1.2248, [3.0, 0.0, 2.0, 0.0, 0.0]),
        (math.sqrt(14.5), [0.0] * 5),
    ):
        prune = PruningToBudget(Budget(budget, "norm"))
        made = prune.protect(G[:1], generator=torch.Generator())
        assert made.gradient[0].tolist() == left
        assert float(made.delta.norm()) <= budget + 1e-12
    whole = PruningToBudget(Budget(1.0)).protect(G, generator=torch.Generator())
    assert not bool(whole.gradient.any())
    part = PruningToBudget(Budget(0.5)).protect(G, generator=torch.Generator())
    kept = part.knowledge.kept
    assert kept is not None
    share = GradientPruning(float((~kept[0]).double().mean()))
    same = share.protect(G[:1], generator=torch.Generator())
    assert torch.equal(part.gradient[0], same.gradient[0])


def test_pruning_by_layer_takes_its_share_of_each(samples: Samples) -> None:
    sizes = {"a": 2, "b": 3}
    made = GradientPruning(0.5, "layer", sizes).protect(G, generator=torch.Generator())
    assert made.gradient.tolist() == [
        [3.0, 0.0, 2.0, 0.0, -0.5],
        [0.0, 1.0, 0.0, 1.0, 4.0],
    ]
    by_samples = GradientPruning(0.5, "layer").protect(
        samples.gradient, generator=torch.Generator(), samples=samples
    )
    given = GradientPruning(0.5, "layer", samples.gradients.sizes()).protect(
        samples.gradient, generator=torch.Generator()
    )
    assert torch.equal(by_samples.gradient, given.gradient)


def test_pruning_says_what_is_wrong() -> None:
    with pytest.raises(ValueError, match=r"lie in \[0, 1\], got 1\.5"):
        GradientPruning(1.5)
    with pytest.raises(ValueError, match="'global', 'layer', got 'row'"):
        GradientPruning(0.5, "row")  # type: ignore[arg-type]
    layers = GradientPruning(0.5, "layer")
    with pytest.raises(ValueError, match="pass sizes=GradientMap"):
        layers.protect(G, generator=torch.Generator())
    with pytest.raises(ValueError, match="add up to 4, but a message has 5"):
        GradientPruning(0.5, "layer", {"a": 4}).protect(G, generator=torch.Generator())


def test_clipping_shortens_what_is_longer_and_leaves_the_rest() -> None:
    g = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]], dtype=torch.float64)
    made = DPSGD(1.0, 0.0).protect(g, generator=torch.Generator())
    expected = torch.tensor([[0.6, 0.8], [0.3, 0.4], [0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(made.gradient, expected, rtol=1e-14, atol=0.0)
    assert made.knowledge.clip == 1.0
    assert made.variance.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_dp_noise_is_drawn_once_on_the_sum(reduction: Reduction) -> None:
    g = torch.randn(8, 50, generator=torch.Generator().manual_seed(0)).double()
    defense = DPSGD(2.0, 0.5)
    weight = 1 / 8 if reduction == "mean" else 1.0
    stream = torch.Generator().manual_seed(1)
    noise = []
    for _ in range(200):
        made = defense.protect_batch(g, generator=stream, reduction=reduction)
        clipped = g * (2.0 / g.norm(dim=1, keepdim=True)).clamp_max(1.0)
        noise.append(made.gradient - weight * clipped.sum(0))
    std = torch.cat(noise).std()
    assert float(std) == pytest.approx(weight * 1.0, rel=0.04)
    assert float(made.variance[0]) == pytest.approx(50 * weight**2)
    assert made.bias is not None
    torch.testing.assert_close(made.bias[0], weight * (clipped - g).sum(0))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    "defense",
    [
        GaussianNoise(Budget(0.1)),
        EigenNoise(Budget(0.1), "smallest"),
        EigenNoise(Budget(0.1), "diagonal"),
        EigenNoise(Budget(0.02, "norm"), "waterfill"),
    ],
    ids=lambda d: d.name,
)
def test_the_budget_of_a_batch_is_that_of_its_message(
    defense: GaussianNoise | EigenNoise, reduction: Reduction, samples: Samples
) -> None:
    g = samples.gradient
    message = g.mean(0) if reduction == "mean" else g.sum(0)
    stream = torch.Generator().manual_seed(0)
    draws = [
        defense.protect_batch(g, generator=stream, samples=samples, reduction=reduction)
        for _ in range(150)
    ]
    expected = float(defense.budget.variance(message.norm()[None], g.shape[1])[0])
    assert draws[0].gradient.shape == (1, g.shape[1])
    torch.testing.assert_close(draws[0].clean[0], message, rtol=1e-12, atol=1e-15)
    assert float(draws[0].variance[0]) == pytest.approx(expected, rel=1e-9)
    squares = torch.stack([d.delta.square().sum() for d in draws])
    error = 4 * float(squares.std()) / math.sqrt(len(draws))
    assert abs(float(squares.mean()) - expected) < error
    assert error < 0.4 * expected


@pytest.mark.parametrize("defense", everything(), ids=lambda d: d.name)
def test_a_batch_is_combined_as_the_loss_combines_it(
    defense: Defense, samples: Samples
) -> None:
    silent: dict[str, Defense] = {
        "gaussian": GaussianNoise(Budget(0.0)),
        "eigen-smallest": EigenNoise(Budget(0.0), "smallest"),
        "eigen-diagonal": EigenNoise(Budget(0.0), "diagonal"),
        "dp-sgd": DPSGD(1e9, 0.0),
        "mixup": MixUp(1.0),
    }
    chosen = silent.get(defense.name, GradientPruning(0.0))
    g = samples.gradient
    for reduction, expected in (("mean", g.mean(0)), ("sum", g.sum(0))):
        made = chosen.protect_batch(
            g,
            generator=torch.Generator(),
            samples=samples,
            reduction=reduction,  # type: ignore[arg-type]
        )
        torch.testing.assert_close(made.gradient[0], expected, rtol=1e-10, atol=1e-14)


def test_an_unknown_reduction(samples: Samples) -> None:
    for defense in (GaussianNoise(Budget(0.1)), DPSGD(1.0, 1.0)):
        with pytest.raises(ValueError, match="must be one of 'mean', 'sum'"):
            defense.protect_batch(
                G,
                generator=torch.Generator(),
                reduction="max",  # type: ignore[arg-type]
            )


@pytest.mark.parametrize(
    "bad", [torch.ones(3), torch.ones(2, 0), torch.ones(2, 2, dtype=torch.long)]
)
def test_gradients_of_a_wrong_shape_are_refused(bad: Tensor) -> None:
    with pytest.raises(ValueError, match="one message in each row"):
        GaussianNoise(Budget(0.1)).protect(bad, generator=torch.Generator())


def test_a_relative_budget_of_a_zero_gradient_is_no_noise() -> None:
    made = GaussianNoise(Budget(0.1)).protect(
        torch.zeros(1, 3), generator=torch.Generator()
    )
    assert made.gradient.tolist() == [[0.0, 0.0, 0.0]]


def test_bad_numbers_of_dp_sgd() -> None:
    with pytest.raises(ValueError, match="clip must be positive and finite"):
        DPSGD(0.0, 1.0)
    with pytest.raises(ValueError, match="noise_multiplier must be at least 0"):
        DPSGD(1.0, -1.0)
    assert DPSGD(2.0, 0.5).budget == Budget(1.0, "std")


def test_a_defense_as_a_perturbation_of_an_attack(samples: Samples) -> None:
    noise = EigenNoise(Budget(0.1), "smallest")
    direct = noise.protect(
        samples.gradient, generator=torch.Generator().manual_seed(0), samples=samples
    )
    perturb = perturbation(noise, torch.Generator().manual_seed(0), samples)
    assert torch.equal(perturb(samples.gradient), direct.gradient)
    # One target of two images.
    batch = noise.protect_batch(
        samples.gradient, generator=torch.Generator().manual_seed(1), samples=samples
    )
    perturb = perturbation(noise, torch.Generator().manual_seed(1), samples)
    together = perturb(samples.gradient.mean(0, keepdim=True))
    torch.testing.assert_close(together, batch.gradient, rtol=1e-9, atol=1e-12)
    with pytest.raises(ValueError, match="2 samples can't be divided among 3"):
        perturb(torch.ones(3, samples.gradients.size))
