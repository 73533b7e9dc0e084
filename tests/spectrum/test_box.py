"""Quadratics over a box: against enumeration, another library, and closed forms."""

from __future__ import annotations

import itertools

import pytest
import torch
from scipy.optimize import lsq_linear
from torch import Tensor

from leakwatch.spectrum.box import minimize_in_box, minimum_in_box


def spd(n: int, seed: int) -> Tensor:
    """A symmetric positive definite matrix, condition about 100."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(n, n, generator=generator, dtype=torch.float64)
    return a @ a.T + 0.1 * torch.eye(n, dtype=torch.float64)


class TestMinimumInBox:
    @pytest.mark.parametrize("seed", range(8))
    def test_is_the_best_of_all_faces(self, seed: int) -> None:
        n = 4
        m, generator = spd(n, seed), torch.Generator().manual_seed(seed)
        b = 3 * torch.randn(n, generator=generator, dtype=torch.float64)
        low = -torch.rand(n, generator=generator, dtype=torch.float64)
        high = torch.rand(n, generator=generator, dtype=torch.float64)
        low[seed % n] = 0.0
        best = float("inf")
        for face in itertools.product((0, 1, 2), repeat=n):
            kind = torch.tensor(face)
            v = torch.where(kind == 1, low, torch.where(kind == 2, high, 0.0))
            k = kind == 0
            if bool(k.any()):
                v[k] = torch.linalg.solve(m[k][:, k], -b[k] - m[k] @ v)
            if bool(((v >= low - 1e-12) & (v <= high + 1e-12)).all()):
                best = min(best, float(0.5 * v @ m @ v + b @ v))
        v = minimum_in_box(m, b, low, high)
        assert bool(((v >= low) & (v <= high)).all())
        assert float(0.5 * v @ m @ v + b @ v) == pytest.approx(best, rel=1e-10)

    def test_without_bounds_is_the_newton_step(self) -> None:
        m, b = spd(12, 0), torch.linspace(-1, 2, 12, dtype=torch.float64)
        far = torch.full((12,), torch.inf, dtype=torch.float64)
        torch.testing.assert_close(
            minimum_in_box(m, b, -far, far),
            torch.linalg.solve(m, -b),
            rtol=1e-9,
            atol=1e-11,
        )

    def test_satisfies_the_optimality_conditions_in_many_dimensions(self) -> None:
        n = 150
        m, generator = spd(n, 7) / n, torch.Generator().manual_seed(7)
        b = torch.randn(n, generator=generator, dtype=torch.float64)
        low = -torch.rand(n, generator=generator, dtype=torch.float64)
        low[::2] = 0.0
        high = low + 1
        v = minimum_in_box(m, b, low, high)
        slope = m @ v + b
        inside = (v > low) & (v < high)
        assert 0 < int(inside.sum()) < n
        assert float(slope[inside].abs().max()) < 1e-10
        assert float(slope[v == low].min()) > -1e-10
        assert float(slope[v == high].max()) < 1e-10


class TestWithASharedInverse:
    @pytest.mark.parametrize("pressed", [0.1, 0.9])
    def test_gives_what_the_other_way_gives(self, pressed: float) -> None:
        n = 60
        m, generator = spd(n, 3), torch.Generator().manual_seed(3)
        # Room for few or for many entries decides which factor is the smaller one.
        room = torch.rand(n, generator=generator, dtype=torch.float64)
        low = -9.0 * (room >= pressed).double()
        b = torch.randn(n, generator=generator, dtype=torch.float64)
        plain = minimize_in_box(m, b, low, -low)
        shared = minimize_in_box(m, b, low, -low, inverse=torch.linalg.inv(m))
        assert plain.exact
        assert shared.exact
        torch.testing.assert_close(shared.delta, plain.delta, rtol=1e-9, atol=1e-11)

    def test_agrees_with_bounded_least_squares(self) -> None:
        generator = torch.Generator().manual_seed(5)
        a = torch.randn(40, 30, generator=generator, dtype=torch.float64)
        right = 4 * torch.randn(40, generator=generator, dtype=torch.float64)
        m, b = a.T @ a, -(a.T @ right)
        low = torch.full((30,), -0.3, dtype=torch.float64)
        ours = minimize_in_box(m, b, low, -low, inverse=torch.linalg.inv(m))
        other = lsq_linear(a.numpy(), right.numpy(), (-0.3, 0.3), tol=1e-14)
        assert 0 < int((ours.delta.abs() < 0.3).sum()) < 30
        assert ours.exact
        torch.testing.assert_close(
            ours.delta, torch.from_numpy(other.x), rtol=1e-7, atol=1e-8
        )

    def test_too_few_guesses_are_said_and_still_give_a_better_point(self) -> None:
        m, b = spd(50, 1), torch.linspace(-3, 3, 50, dtype=torch.float64)
        low = torch.full((50,), -0.05, dtype=torch.float64)
        stopped = minimize_in_box(m, b, low, -low, guesses=1)
        assert not stopped.exact
        assert float(0.5 * stopped.delta @ m @ stopped.delta + b @ stopped.delta) < 0
