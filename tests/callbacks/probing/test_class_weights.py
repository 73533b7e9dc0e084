"""Weights of classes are read off gradients that were made with them."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from leakwatch.callbacks._probing.class_weights import ClassWeights, Piece

TRUE = torch.tensor([1.0, 3.0, 0.5, 2.0], dtype=torch.float64)
How = Literal["average", "each", "sum"]


def message(
    seed: int, pieces: int, size: int, how: How, weights: Tensor = TRUE, d: int = 50
) -> tuple[Tensor, list[Piece]]:
    """The gradient of several batches, with the criterion's taken apart."""
    stream = torch.Generator().manual_seed(seed)
    training, taken = torch.zeros(d, dtype=torch.float64), []
    for _ in range(pieces):
        y = torch.randint(len(weights), (size,), generator=stream)
        g = torch.randn(size, d, generator=stream, dtype=torch.float64)
        w = weights[y]
        by = {"average": 1 / w.sum(), "each": 1 / size, "sum": 1.0}[how]
        training += (w[:, None] * g).sum(0) * by / pieces
        labels = sorted(set(y.tolist()))
        taken.append(
            Piece(
                {k: int((y == k).sum()) for k in labels},
                {k: g[y == k].sum(0) / size / pieces for k in labels},
            )
        )
    return training, taken


@pytest.mark.parametrize("how", ["average", "each", "sum"])
@pytest.mark.parametrize("pieces", [1, 2, 5])
@pytest.mark.parametrize("sizes", [(9, 9, 9, 9), (2, 3, 5, 2)])
def test_true_weights_are_found(how: How, pieces: int, sizes: tuple[int, ...]) -> None:
    found = ClassWeights()
    told = [
        found.add(*message(seed, pieces, size, how), 0.01)
        for seed, size in enumerate(sizes)
    ]
    assert told[-1]
    assert found.how == how
    scale = TRUE.min() if how == "average" else 1.0
    assert set(found.weights) == {0, 1, 2, 3}
    for label, weight in found.weights.items():
        assert weight == pytest.approx(float(TRUE[label] / scale), rel=1e-6)


def test_the_weight_of_a_batch_of_one_cancels() -> None:
    found = ClassWeights()
    assert not any(found.add(*message(i, 16, 1, "average"), 0.01) for i in range(4))
    assert found.possible


def test_ratios_are_told_of_classes_that_met_alone() -> None:
    g = torch.eye(4, dtype=torch.float64)

    def pair(a: int, b: int) -> tuple[Tensor, list[Piece]]:
        w = TRUE[[a, b]] / TRUE[[a, b]].sum()
        piece = Piece({a: 1, b: 1}, {a: g[a] / 2, b: g[b] / 2})
        return w[0] * g[a] + w[1] * g[b], [piece]

    found = ClassWeights()
    assert found.add(*pair(0, 1), 0.01)
    assert found.weights == pytest.approx({0: 1, 1: 3})
    assert found.add(*pair(2, 3), 0.01)
    assert set(found.weights) == {0, 1}
    assert found.add(*pair(1, 3), 0.01)
    assert found.weights == pytest.approx({2: 1, 0: 2, 3: 4, 1: 6})


@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_weights_of_single_samples_are_none_of_classes(pieces: int) -> None:
    found = ClassWeights()
    stream = torch.Generator().manual_seed(5)
    for seed in range(6):
        training, taken = message(seed, pieces, 4, "each")
        for piece in taken:
            for part in piece.parts.values():
                noise = torch.randn(len(part), generator=stream, dtype=part.dtype)
                training = training + 0.3 * part.norm() / 7 * noise
        assert not found.add(training, taken, 0.01)
    assert not found.possible


def test_a_class_without_weight() -> None:
    weights = torch.tensor([1.0, 0.0, 2.0], dtype=torch.float64)
    found = ClassWeights()
    for seed in range(3):
        found.add(*message(seed, 3, 6, "average", weights), 0.01)
    assert found.how == "average"
    assert found.weights[1] == pytest.approx(0, abs=1e-3)
    assert found.weights[2] / found.weights[0] == pytest.approx(2, rel=1e-3)


def test_other_weights_in_the_next_message_are_a_contradiction() -> None:
    found = ClassWeights()
    first: Any = message(0, 2, 6, "average")
    other: Any = message(1, 2, 6, "average", TRUE.flip(0))
    assert found.add(*first, 0.01)
    assert not found.add(*other, 0.01)
    assert (found.how, found.weights, found.possible) == (None, {}, False)
