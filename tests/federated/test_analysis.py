"""The analysis against dense decompositions and models whose path is known."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from leakwatch import cross_entropy
from leakwatch.federated import (
    ClientUpdate,
    LocalTraining,
    principal_subspace,
    segment_similarity,
    train_client,
)

from .problems import cnn, samples


@pytest.mark.parametrize("dimension", [1, 2, 5])
@pytest.mark.parametrize("shape", [(9, 40), (9, 5)])
def test_shares_are_those_of_a_dense_svd(
    dimension: int, shape: tuple[int, int]
) -> None:
    generator = torch.Generator().manual_seed(0)
    g = torch.randn(*shape, generator=generator, dtype=torch.float64) + 0.5
    _, s, v = torch.linalg.svd(g, full_matrices=False)
    inside = g @ v[:dimension].mT @ v[:dimension]
    expected = inside.norm(dim=1) / g.norm(dim=1)
    found = principal_subspace(g, dimension)
    torch.testing.assert_close(found.ratios, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.shares, expected**2, rtol=1e-10, atol=1e-12)
    # The Gram matrix squares the condition: zeros come out at 1e-8 of the largest.
    own = found.singular_values[: len(s)]
    torch.testing.assert_close(own, s, rtol=1e-10, atol=1e-7)
    total = inside.square().sum() / g.square().sum()
    assert found.total == pytest.approx(float(total), rel=1e-12)
    assert found.worst == pytest.approx(float(expected.min()), rel=1e-10)


def test_wide_gradients_are_read_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    whole = principal_subspace(g)
    monkeypatch.setattr("leakwatch.federated.analysis._COLUMNS", 7)
    torch.testing.assert_close(
        principal_subspace(g).ratios, whole.ratios, rtol=1e-12, atol=0
    )


def test_a_plane_holds_all_of_what_lies_in_it() -> None:
    generator = torch.Generator().manual_seed(0)
    plane = torch.randn(2, 30, generator=generator, dtype=torch.float64)
    g = torch.randn(8, 2, generator=generator, dtype=torch.float64) @ plane
    found = principal_subspace(g)
    torch.testing.assert_close(
        found.ratios, torch.ones(8, dtype=torch.float64), rtol=0, atol=1e-12
    )
    g[3] = 0
    assert math.isnan(float(principal_subspace(g).ratios[3]))
    assert principal_subspace(g).worst == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize(
    ("gradients", "dimension", "text"),
    [
        (torch.ones(3), 1, r"shape \(T, d_θ\)"),
        (torch.ones(3, 4), 4, "between 1 and the 3 steps"),
        (torch.full((3, 4), torch.nan), 2, "diverged"),
        (torch.zeros(3, 4), 2, "all gradients are zero"),
    ],
)
def test_subspace_errors(gradients: Tensor, dimension: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        principal_subspace(gradients, dimension)


def test_a_training_without_a_record_has_no_subspace() -> None:
    net, x = nn.Linear(3, 2), torch.rand(4, 3)
    how = LocalTraining(epochs=1, batch_size=4, lr=0.1)
    update = train_client(net, x, torch.tensor([0, 1, 1, 0]), how)
    with pytest.raises(TypeError, match="record='full'"):
        principal_subspace(update.recorded)  # type: ignore[arg-type]


class Bowl(nn.Module):
    """Loss ½ wᵀAw whatever the sample: the path of the weights is known."""

    def __init__(self, curvature: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones_like(curvature))
        self.register_buffer("curvature", curvature)

    def forward(self, x: Tensor) -> Tensor:
        return (self.curvature * self.w**2).sum() / 2 + 0 * x.flatten(1).sum(1)


def bowl(curvature: Tensor, how: LocalTraining) -> tuple[nn.Module, ClientUpdate]:
    net = Bowl(curvature.double())
    x, y = samples(6)
    update = train_client(
        net, x, y, how, criterion=lambda m, x, y: m(x), record="steps"
    )
    return net, update


def test_cosine_along_the_segment_of_a_quadratic() -> None:
    curvature = torch.tensor([0.3, 1.0, 2.5])
    net, update = bowl(curvature, LocalTraining(8, batch_size=6, lr=0.2))
    last = (1 - 0.2 * curvature.double()) ** 8
    torch.testing.assert_close(update.final, last, rtol=1e-12, atol=1e-14)
    found = segment_similarity(net, update, points=11, criterion=lambda m, x, y: m(x))
    for alpha, cosine in zip(found.alphas, found.similarity, strict=True):
        g = curvature.double() * (alpha + (1 - alpha) * last)
        moved = 1 - last
        expected = g @ moved / (g.norm() * moved.norm())
        torch.testing.assert_close(cosine, expected, rtol=1e-10, atol=1e-12)
    fine = torch.linspace(0, 1, 100_001, dtype=torch.float64)[:, None]
    g = curvature.double() * (fine + (1 - fine) * last)
    cosines = g @ (1 - last) / (g.norm(dim=1) * (1 - last).norm())
    assert found.best == pytest.approx(float(cosines.max()), abs=1e-8)
    assert found.best_alpha == pytest.approx(float(fine[cosines.argmax()]), abs=2e-4)
    assert (found.at_end, found.at_start) == (
        float(found.similarity[0]),
        float(found.similarity[-1]),
    )


def test_in_two_dimensions_some_gradient_is_parallel() -> None:
    # Proposition 4.1 of SME, with its small steps.
    net, update = bowl(
        torch.tensor([0.2, 3.0]), LocalTraining(400, batch_size=6, lr=0.01)
    )
    found = segment_similarity(net, update, criterion=lambda m, x, y: m(x))
    assert found.best == pytest.approx(1, abs=1e-7)
    assert found.at_start < 0.95
    assert 0.01 < found.best_alpha < 0.99
    assert principal_subspace(update.recorded).worst == pytest.approx(1, abs=1e-12)


def test_one_step_is_the_gradient_at_the_start() -> None:
    x, y = samples(6)
    net = cnn()
    update = train_client(net, x, y, LocalTraining(1, batch_size=6, lr=0.1))
    found = segment_similarity(net, update, points=3)
    assert found.at_start == pytest.approx(1, abs=1e-12)
    assert found.best == pytest.approx(1, abs=1e-6)


def test_cosine_of_a_network_is_that_of_autograd() -> None:
    x, y = samples(9)
    net = cnn()
    update = train_client(net, x, y, LocalTraining(20, batch_size=4, lr=0.5))
    found = segment_similarity(net, update, points=5)
    middle = copy.deepcopy(net)
    point = 0.25 * update.initial + 0.75 * update.final
    nn.utils.vector_to_parameters(point, middle.parameters())
    cross_entropy(middle(x), y).mean().backward()
    g = torch.cat([p.grad.reshape(-1) for p in middle.parameters()])
    expected = torch.cosine_similarity(g, update.difference, dim=0)
    torch.testing.assert_close(found.similarity[1], expected, rtol=1e-10, atol=1e-12)
    assert found.best >= float(found.similarity.max())


def test_points_without_a_gradient_are_left_out() -> None:
    x, y = samples(6)
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Flatten(),
        nn.Linear(36, 4, bias=False),
        nn.ReLU(),
        nn.Linear(4, 3, bias=False),
    ).double()
    update = train_client(net, x, y, LocalTraining(1, batch_size=6, lr=0.1))
    # All inputs are positive: with negative weights no unit is active.
    dead = update.initial.clone()
    dead[: 36 * 4] = -dead[: 36 * 4].abs()
    found = segment_similarity(net, replace(update, final=dead))
    silent = found.similarity.isnan()
    assert 0 < int(silent.sum()) < len(silent)
    best = found.similarity[~silent].max()
    assert found.best >= float(best)
    assert 0 <= found.best_alpha <= 1
    nothing = dead.clone()
    nothing[0] -= 1
    with pytest.raises(ValueError, match="zero or not finite at all 21 points"):
        segment_similarity(net, replace(update, initial=nothing, final=dead))


def test_segment_errors() -> None:
    x, y = samples(6)
    net = cnn()
    update = train_client(net, x, y, LocalTraining(1, batch_size=6, lr=0.1))
    with pytest.raises(ValueError, match="points must be at least 2"):
        segment_similarity(net, update, points=1)
    with pytest.raises(ValueError, match="did not move"):
        segment_similarity(net, replace(update, final=update.initial))
    with pytest.raises(ValueError, match="diverged"):
        segment_similarity(net, replace(update, final=update.final * torch.nan))
    with pytest.raises(ValueError, match="trains 111"):
        segment_similarity(nn.Sequential(nn.Flatten(), nn.Linear(36, 3)), update)
