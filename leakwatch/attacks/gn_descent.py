"""The Levenberg–Marquardt iteration, for many attacks at once, each on its own."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from leakwatch.attacks.gn_linear import Factor, conjugate_gradients, factor
from leakwatch.attacks.gn_objective import Objective

__all__ = ["Descent", "Found", "Method", "Settings"]

Method = Literal["auto", "dense", "cg"]

_PROBES = 2
_SMALLEST_DAMPING = 1e-15
_LARGEST_DAMPING = 1e8


@final
@dataclass(frozen=True)
class Settings:
    """How to iterate; see :class:`leakwatch.attacks.gauss_newton.GaussNewton`."""

    steps: int = 60
    damping: float = 1e-2
    method: Method = "auto"
    products: int = 60
    smoothing: float = 0.5
    widest: float = 0.3
    memory: int = 4
    patience: int = 20
    tolerance: float = 1e-12
    forcing: float = 0.1
    box: bool = True


@final
@dataclass(frozen=True, eq=False)
class Found:
    """Where the attacks ended: their best images, pixels, and what they reached."""

    p: Float[Tensor, "attacks n"]
    value: Float[Tensor, " attacks"]
    residual: Float[Tensor, " attacks"]
    steps: Int[Tensor, " attacks"]
    late: Bool[Tensor, " attacks"]


class Descent:
    """State of the attacks between steps.

    Args:
        objective: what is minimised.
        settings: how.
        bounds: of pixels.
        deadline: ``time.perf_counter()`` at which to stop.
        report: called after every step with the number of the step and the best
            residuals.
    """

    def __init__(
        self,
        objective: Objective,
        settings: Settings,
        bounds: tuple[float, float] | None,
        deadline: float | None = None,
        report: Callable[[int, Tensor], None] | None = None,
    ) -> None:
        self.objective, self.settings, self.bounds = objective, settings, bounds
        self.deadline, self.report = deadline, report
        self._grams: dict[int, Tensor] = {}
        self.trace: list[dict] = []

    def run(self, rows: Int[Tensor, " attacks"], p: Float[Tensor, "attacks n"]) -> Found:
        """Iterates from p.

        Args:
            rows: the attacks' positions in the objective.
            p: first images, pixels, flat.

        Returns:
            The best images met.
        """
        o, s = self.objective, self.settings
        count = len(rows)
        p = self._boxed(p.clone())
        r = o.residual(rows, p)
        phi = o.value(rows, p, r)
        phi = torch.where(torch.isfinite(phi), phi, math.inf)
        recent = phi[None].expand(s.memory if o.kinked else 1, -1).clone()
        best_p, best, best_r = p.clone(), phi.clone(), r.norm(dim=1)
        improved = torch.zeros(count, dtype=torch.long)
        damping = torch.full((count,), s.damping, dtype=torch.float64)
        growth = torch.full((count,), 2.0, dtype=torch.float64)
        slope, diagonal = torch.zeros_like(p), torch.ones(count, dtype=torch.float64)
        width = torch.zeros(count, dtype=torch.float64)
        fresh = torch.ones(count, dtype=torch.bool)
        taken = torch.zeros(count, dtype=torch.long)
        alive = torch.isfinite(phi) & (best_r > s.tolerance)
        late = torch.zeros(count, dtype=torch.bool)
        for step in range(s.steps):
            a = alive.nonzero()[:, 0]
            if len(a) == 0:
                break
            if self.deadline is not None and time.perf_counter() > self.deadline:
                late[a] = True
                break
            new = a[fresh[a]]
            if len(new):
                if o.kinked and s.smoothing > 0:
                    width[new] = (s.smoothing * r[new].norm(dim=1)).clamp_max(s.widest)
                slope[new] = o.slope(rows[new], p[new], r[new], width[new])
                diagonal[new] = self._diagonal(step, rows[new], p[new], width[new])
                fresh[new] = False
            shift = damping[a] * diagonal[a] + o.weight[rows[a]]
            free = self._free(p[a], slope[a])
            delta, used = self._solve(rows[a], p[a], r[a], slope[a], shift, free, width[a])
            trial = self._boxed(p[a] + delta)
            moved = trial - p[a]
            linear = r[a] + o.push(rows[a], p[a], moved, width[a])
            predicted = phi[a] - o.value(rows[a], trial, linear)
            r_new = o.residual(rows[a], trial)
            phi_new = o.value(rows[a], trial, r_new)
            phi_new = torch.where(torch.isfinite(phi_new), phi_new, math.inf)
            gain = (phi[a] - phi_new) / predicted.abs().clamp_min(1e-300)
            gain = torch.where(predicted > 0, gain, -1.0).nan_to_num(-1.0)
            reference = recent[:, a].max(0).values
            accept = (phi_new < phi[a]) & (gain > 1e-3)
            if o.kinked:
                accept |= (phi_new < reference) & (predicted > 0)
            yes = a[accept]
            p[yes], r[yes], phi[yes] = trial[accept], r_new[accept], phi_new[accept]
            recent[step % len(recent), a] = phi[a]
            fresh[yes] = True
            taken[a] += 1
            good = gain > 1e-3
            ratio = torch.where(
                good, (1 - (2 * gain.clamp(-1, 1) - 1) ** 3).clamp_min(0.2), growth[a]
            )
            damping[a] = (damping[a] * ratio).clamp(_SMALLEST_DAMPING)
            growth[a] = torch.where(good, 2.0, growth[a] * 2)
            better = phi[a] < best[a]
            much = phi[a] < 0.99 * best[a]
            w = a[better]
            best_p[w], best[w], best_r[w] = p[w], phi[w], r[w].norm(dim=1)
            improved[a[much]] = step
            self.trace.append(
                dict(phi=phi.clone(), gain=gain, damping=damping.clone(), used=used, p=p.clone())
            )
            still = predicted <= 1e-13 * phi[a]
            done = (best_r[a] <= s.tolerance) | (damping[a] > _LARGEST_DAMPING)
            done |= step - improved[a] > s.patience
            done |= still
            alive[a[done]] = False
            if self.report is not None:
                self.report(step + 1, best_r)
        return Found(best_p, best, best_r, taken, late)

    def _boxed(self, p: Tensor) -> Tensor:
        if self.bounds is None or not self.settings.box:
            return p
        return p.clamp(*self.bounds)

    def _free(self, p: Tensor, slope: Tensor) -> Tensor:
        """Pixels that are not pressed against the box (Bertsekas 1982)."""
        if self.bounds is None or not self.settings.box:
            return torch.ones_like(p, dtype=torch.bool)
        low, high = self.bounds
        tiny = 1e-9 * (high - low)
        held = (p <= low + tiny) & (slope > 0) | (p >= high - tiny) & (slope < 0)
        return ~held

    def _diagonal(self, step: int, rows: Tensor, p: Tensor, width: Tensor) -> Tensor:
        """Mean diagonal of H, by Hutchinson's estimate, the same probes for all."""
        generator = torch.Generator().manual_seed(step)
        total = torch.zeros(len(rows), dtype=torch.float64)
        for _ in range(_PROBES):
            v = torch.randint(0, 2, (p.shape[1],), generator=generator).to(p) * 2 - 1
            total += self.objective.push(rows, p, v.expand_as(p), width).square().sum(1)
        mean = total / (_PROBES * p.shape[1])
        return mean.clamp_min(1e-300)

    def _solve(
        self,
        rows: Tensor,
        p: Tensor,
        r: Tensor,
        slope: Tensor,
        shift: Tensor,
        free: Tensor,
        width: Tensor,
    ) -> tuple[Tensor, Tensor]:
        o, s = self.objective, self.settings

        def product(which: Tensor, v: Tensor) -> Tensor:
            at = rows[which], p[which]
            return o.pull(*at, o.push(*at, v, width[which]), width[which])

        if s.method == "dense":
            delta = torch.zeros_like(p)
            for i, row in enumerate(rows.tolist()):
                found = factor(o.gram(row, p[i], width[i]), float(shift[i]), free[i])
                if found is not None:
                    delta[i] = found.solve(-slope[i])
            return delta, torch.zeros(len(rows))
        eta = torch.full((len(rows),), s.forcing, dtype=torch.float64)
        eta = torch.minimum(eta, r.norm(dim=1).sqrt()*s.forcing).clamp_min(1e-6)
        factors = None
        if self._grams:
            factors = [
                factor(self._grams[row], float(shift[i]), free[i])
                if row in self._grams
                else None
                for i, row in enumerate(rows.tolist())
            ]
        delta, reached, used = conjugate_gradients(
            product, -slope, shift, free, tolerance=eta, most=s.products, factors=factors
        )
        if s.method == "cg" or bool(reached.all()):
            return delta, used
        for i in (~reached).nonzero()[:, 0].tolist():
            self._grams[int(rows[i])] = h = o.gram(int(rows[i]), p[i], width[i])
            found = factor(h, float(shift[i]), free[i])
            if found is not None:
                delta[i] = found.solve(-slope[i])
                used[i] += 1000
        return delta, used
