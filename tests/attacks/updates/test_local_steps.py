"""Simulated local training against torch.optim and autograd through all steps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from leakwatch import LocalTraining
from leakwatch.attacks.matching.selection import UpdatePathName, opened
from leakwatch.attacks.updates.local_steps import LocalSteps, batches, segment_for
from leakwatch.derivatives import GradientMap

from ..update_problems import clients, flat, named, small_cnn, trained

TRAININGS = {
    "plain": LocalTraining(epochs=3, batch_size=2, lr=0.4),
    "momentum": LocalTraining(epochs=3, batch_size=2, lr=0.2, momentum=0.9),
    "all": LocalTraining(2, 3, lr=0.3, momentum=0.5, weight_decay=0.1),
    "decay": LocalTraining(2, 5, lr=0.3, weight_decay=0.1),
}


def unrolled(
    net: nn.Module, w: Tensor, x: Tensor, y: Tensor, how: LocalTraining, sets: int
) -> Tensor:
    """All steps in one graph."""
    w = w.clone().requires_grad_()
    b = torch.zeros_like(w)
    for batch in batches(how, len(y), sets):
        logits = functional_call(net, named(net, w), (x[batch.images],))
        loss = F.cross_entropy(logits, y[batch.labels])
        (g,) = torch.autograd.grad(loss, w, create_graph=True)
        b = how.momentum * b + g + how.weight_decay * w
        w = w - how.lr * b
    return w


def simulated(
    net: nn.Module,
    x: Tensor,
    y: Tensor,
    how: LocalTraining,
    sets: int,
    segment: int,
    c: Tensor,
    path: UpdatePathName = "layers",
) -> tuple[Tensor, Tensor]:
    w = flat(net).expand(len(x), -1)
    with opened(GradientMap(net, dtype=torch.float64), path) as path_for:
        steps = LocalSteps(path_for(w, x, y[:, : x.shape[1]]), how, 5, sets, segment)
        found = steps(w, x, y)
        return found.final.clone(), found.pull(c)


@pytest.mark.parametrize("name", TRAININGS)
def test_the_simulated_update_is_that_of_sgd(name: str) -> None:
    net, how = small_cnn(), TRAININGS[name]
    x, y = clients(2, 5)
    c = torch.ones(2, flat(net).numel(), dtype=torch.float64)
    found, _ = simulated(net, x, y, how, 1, 2, c)
    for i in range(2):
        expected = trained(net, flat(net), x[i], y[i], how)
        torch.testing.assert_close(found[i], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("path", ["layers", "plain"])
@pytest.mark.parametrize("sets", [1, 2])
@pytest.mark.parametrize("name", TRAININGS)
def test_its_derivative_is_that_of_all_steps_in_one_graph(
    name: str, sets: int, path: UpdatePathName
) -> None:
    net, how = small_cnn(), TRAININGS[name]
    sets = sets if sets == 1 else how.epochs
    x, _ = clients(2, 5 * sets)
    _, y = clients(2, 5)
    torch.manual_seed(0)
    c = torch.randn(2, flat(net).numel(), dtype=torch.float64)
    leaf = x.clone().requires_grad_()
    finals = torch.stack(
        [unrolled(net, flat(net), leaf[i], y[i], how, sets) for i in range(2)]
    )
    (expected,) = torch.autograd.grad((finals * c).sum(), leaf)
    with opened(GradientMap(net, dtype=torch.float64), path) as path_for:
        w = flat(net).expand(2, -1)
        chosen = path_for(w, x[:, :5], y)
        total = how.steps(5)
        for segment in (1, 2, total):
            found = LocalSteps(chosen, how, 5, sets, segment)(w, x, y)
            close = {"rtol": 1e-9, "atol": 1e-13}
            torch.testing.assert_close(found.final, finals.detach(), **close)
            torch.testing.assert_close(found.pull(c), expected, **close)


def test_checkpointed_equals_unchecked_exactly() -> None:
    net, how = small_cnn(), TRAININGS["all"]
    x, y = clients(2, 5)
    c = torch.ones(2, flat(net).numel(), dtype=torch.float64)
    whole = simulated(net, x, y, how, 1, how.steps(5), c)
    for segment in (1, 3):
        parts = simulated(net, x, y, how, 1, segment, c)
        for a, b in zip(parts, whole, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_segments_are_at_least_one_step() -> None:
    net = small_cnn()
    x, y = clients(1, 2)
    with opened(GradientMap(net, dtype=torch.float64), "plain") as path_for:
        path = path_for(flat(net)[None], x, y)
        with pytest.raises(ValueError, match="segment must be at least 1, got 0"):
            LocalSteps(path, TRAININGS["plain"], 2, segment=0)


def test_memory_of_segments_grows_with_the_root_of_the_steps() -> None:
    def memory(steps: int) -> float:
        segment = segment_for(steps, 2.0, 8.0, limit=0.0)
        return segment * 8.0 + steps / segment * 2.0

    assert memory(400) == pytest.approx(2 * (400 * 2 * 8) ** 0.5)
    assert memory(1600) == pytest.approx(2 * memory(400))
