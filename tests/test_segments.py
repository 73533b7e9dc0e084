"""The search for the best point of a segment."""

from __future__ import annotations

import math

import pytest
import torch

from leakwatch.segments import search_segment


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
