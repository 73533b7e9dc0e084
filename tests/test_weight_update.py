from __future__ import annotations

import math

import pytest
import torch

from leakwatch import LocalTraining, WeightUpdate
from leakwatch.weight_update import search_segment


@pytest.mark.parametrize(
    ("samples", "steps"), [(1, 3), (10, 3), (11, 6), (50, 15), (9, 3)]
)
def test_steps_count_the_partial_batch(samples: int, steps: int) -> None:
    assert LocalTraining(epochs=3, batch_size=10, lr=0.1).steps(samples) == steps


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"epochs": 0}, ValueError, "epochs must be at least 1, got 0"),
        (
            {"epochs": 1.5},
            TypeError,
            "epochs must be an integer of at least 1, got 1.5",
        ),
        ({"batch_size": True}, TypeError, "batch_size must be an integer"),
        ({"lr": 0.0}, ValueError, "lr must be positive and finite"),
        ({"lr": "fast"}, TypeError, "lr must be a number.*got 'fast'"),
        ({"lr": float("inf")}, ValueError, "lr must be positive and finite"),
        ({"momentum": 1.0}, ValueError, r"momentum must lie in \[0, 1\)"),
        ({"weight_decay": -1.0}, ValueError, "weight_decay must be at least 0"),
    ],
)
def test_impossible_trainings_are_refused(
    change: dict[str, object], error: type[Exception], match: str
) -> None:
    given: dict[str, object] = {"epochs": 1, "batch_size": 2, "lr": 0.1, **change}
    with pytest.raises(error, match=match):
        LocalTraining(**given)  # type: ignore[arg-type]


def test_samples_must_be_a_count() -> None:
    training = LocalTraining(1, 2, 0.1)
    with pytest.raises(ValueError, match="samples must be at least 1, got 0"):
        training.steps(0)


def make(**change: object) -> WeightUpdate:
    given: dict[str, object] = {
        "initial": torch.zeros(3),
        "final": torch.tensor([[1.0, 0, 0], [0, 2, 0]]),
        "labels": torch.tensor([[0, 1], [2, 0]]),
        "sample_shape": (4,),
        "samples": 2,
        **change,
    }
    return WeightUpdate(**given)  # type: ignore[arg-type]


def test_the_difference_is_what_descent_took_away() -> None:
    update = make()
    assert update.clients == 2
    expected = torch.tensor([[-1.0, 0, 0], [0, -2, 0]])
    torch.testing.assert_close(update.difference, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"samples": 0}, ValueError, "samples must be at least 1"),
        ({"initial": [0.0]}, TypeError, "initial must be a tensor, got a list"),
        ({"initial": torch.zeros(3).long()}, ValueError, "must be floating point"),
        ({"initial": torch.zeros(2)}, ValueError, r"got \(2,\) and \(2, 3\)"),
        ({"final": torch.ones(3)}, ValueError, r"use final\[None\]"),
        ({"final": torch.ones(0, 3)}, ValueError, "at least one client"),
        ({"initial": torch.full((3,), torch.nan)}, ValueError, "initial weights hold"),
        (
            {"final": torch.tensor([[1.0, 0, 0], [0, torch.inf, 0]])},
            ValueError,
            "weights of client 1 hold NaN or infinity",
        ),
        (
            {"final": torch.tensor([[1.0, 0, 0], [0, 0, 0]])},
            ValueError,
            "client 1 did not move",
        ),
        ({"labels": torch.zeros(2, 3).long()}, ValueError, r"\(clients, N\) = \(2, 2"),
        ({"labels": torch.zeros(2, 2)}, TypeError, "integer class indices"),
        ({"labels": [[0, 1], [1, 0]]}, TypeError, "a tensor or None, got a list"),
        ({"labels": torch.tensor([[0, -1], [0, 0]])}, ValueError, "at least 0"),
        ({"training": {"epochs": 1}}, TypeError, "a LocalTraining or None"),
        ({"index": (1,)}, ValueError, "each of the 2 clients, got 1"),
    ],
)
def test_impossible_updates_are_refused(
    change: dict[str, object], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        make(**change)


@pytest.mark.parametrize("best", [0.0, 0.04, 0.5, 0.777, 1.0])
def test_the_top_of_a_parabola(best: float) -> None:
    found = search_segment(lambda a: 1 - (a - best) ** 2, points=11, tolerance=1e-5)
    assert found.best_alpha == pytest.approx(best, abs=3e-5)
    assert found.best == pytest.approx(1, abs=1e-9)
    grid = torch.linspace(0, 1, 11, dtype=torch.float64)
    torch.testing.assert_close(found.alphas, grid, rtol=1e-15, atol=1e-16)
    expected = 1 - (grid - best).square()
    torch.testing.assert_close(found.similarity, expected, rtol=1e-14, atol=1e-15)
    assert (found.at_end, found.at_start) == pytest.approx(
        (1 - best**2, 1 - (1 - best) ** 2)
    )


def test_points_without_a_direction_are_passed_over() -> None:
    def similarity(alpha: float) -> float:
        return math.nan if alpha > 0.62 else -((alpha - 0.9) ** 2)

    found = search_segment(similarity, points=6, tolerance=1e-4)
    assert found.best_alpha == pytest.approx(0.62, abs=2e-2)
    assert found.best_alpha <= 0.62
    assert found.similarity.isnan().tolist() == [False] * 4 + [True] * 2


def test_nothing_but_undefined_points() -> None:
    found = search_segment(lambda _: math.nan, points=3, tolerance=1e-3)
    assert math.isnan(found.best_alpha)
    assert math.isnan(found.best)


def test_a_peak_between_grid_points_is_found_where_the_best_point_is() -> None:
    calls: list[float] = []

    def similarity(alpha: float) -> float:
        calls.append(alpha)
        return -abs(alpha - 0.33)

    found = search_segment(similarity, points=11, tolerance=1e-4)
    assert found.best_alpha == pytest.approx(0.33, abs=2e-4)
    assert len(calls) < 11 + 30
    assert min(calls[11:]) >= 0.2
    assert max(calls[11:]) <= 0.4
