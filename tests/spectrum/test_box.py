"""Quadratics over a box: against enumeration, another library, and closed forms."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from scipy.optimize import lsq_linear
from torch import Tensor

from leakwatch.spectrum.box import minima_in_box, minimum_in_box


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


class TestMinimaInBox:
    @pytest.mark.parametrize("condition", [1e1, 1e4])
    def test_are_those_found_one_by_one(self, condition: float) -> None:
        n, k = 60, 5
        generator = torch.Generator().manual_seed(3)
        u = torch.linalg.qr(torch.randn(n, n, generator=generator).double()).Q
        m = u @ torch.diag(torch.logspace(0, -math.log10(condition), n).double()) @ u.T
        # Some at the lower end, as the pixels of a digit are.
        low = -torch.rand(2, n, generator=generator).double().sub(0.5).clamp_min(0)
        b = 0.1 * torch.randn(2, k, n, generator=generator).double()
        both = torch.stack((m, 2 * m))
        found = minima_in_box(both, b, low, low + 1, tolerance=1e-9, steps=9000)
        assert bool(found.converged.all())
        for i in range(2):
            for j in range(k):
                one = minimum_in_box(both[i], b[i, j], low[i], low[i] + 1)
                assert 0 < int((one == low[i]).sum()) < n
                torch.testing.assert_close(found.delta[i, j], one, rtol=1e-6, atol=1e-7)

    def test_the_default_tolerance_is_hundredths_of_a_decibel(self) -> None:
        m, generator = spd(150, 7), torch.Generator().manual_seed(8)
        low = -torch.rand(150, generator=generator, dtype=torch.float64)
        b = torch.randn(6, 150, generator=generator, dtype=torch.float64)
        rough = minima_in_box(m, b, low, low + 1).delta
        fine = minima_in_box(m, b, low, low + 1, tolerance=1e-9, steps=9000).delta
        ratio = rough.square().sum(1) / fine.square().sum(1)
        assert float((10 * ratio.log10()).abs().max()) < 0.04

    @pytest.mark.parametrize(("k", "flat"), [(6, False), (1, False), (6, True)])
    def test_do_not_depend_on_where_the_search_begins(self, k: int, flat: bool) -> None:
        m, generator = spd(150, 7), torch.Generator().manual_seed(8)
        low = -torch.rand(150, generator=generator, dtype=torch.float64)
        b = torch.randn(k, 150, generator=generator, dtype=torch.float64)
        fine = minima_in_box(m, b, low, low + 1, tolerance=1e-9, steps=9000).delta
        other = minima_in_box(m, 2 * b.flip(1), low, low + 1).delta
        assert float((other - fine).norm()) > 0.5 * float(fine.norm())
        found = minima_in_box(
            m, b, low, low + 1, near=other, flat=flat, checked=not flat
        )
        assert bool(found.converged.all())
        ratio = found.delta.square().sum(1) / fine.square().sum(1)
        assert float((10 * ratio.log10()).abs().max()) < 0.04
        if k == 1 or flat:  # by active sets: exact
            torch.testing.assert_close(found.delta, fine, rtol=1e-6, atol=1e-7)

    def test_agree_with_bounded_least_squares(self) -> None:
        generator = torch.Generator().manual_seed(5)
        a = torch.randn(40, 30, generator=generator, dtype=torch.float64)
        right = 4 * torch.randn(40, generator=generator, dtype=torch.float64)
        m, b = a.T @ a, -(a.T @ right)
        low = torch.full((30,), -0.3, dtype=torch.float64)
        found = minima_in_box(m, b[None], low, -low, tolerance=1e-10, steps=9000)
        ours = found.delta[0]
        other = lsq_linear(a.numpy(), right.numpy(), (-0.3, 0.3), tol=1e-14)
        assert 0 < int((ours.abs() < 0.3).sum()) < 30
        torch.testing.assert_close(
            ours, torch.from_numpy(other.x), rtol=1e-7, atol=1e-8
        )

    def test_what_has_no_minimum_has_no_number(self) -> None:
        m = torch.diag(torch.tensor([1.0, 1.0, 1.0])).double()
        m[0, 1] = m[1, 0] = 5.0
        low = -torch.ones(3, dtype=torch.float64)
        found = minima_in_box(m, torch.ones(1, 3).double(), low, -low)
        assert not bool(found.converged.any())
        assert bool(found.delta.isnan().any())
