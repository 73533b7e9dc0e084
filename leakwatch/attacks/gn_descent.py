"""The Levenberg–Marquardt iteration, for many attacks at once, each on its own."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from leakwatch.attacks.gn_objective import Objective
from leakwatch.attacks.gn_steps import DenseSteps, MatrixFreeSteps, Point

__all__ = ["Found", "Settings", "descend"]

_SMALLEST_DAMPING = 1e-15
_LARGEST_DAMPING = 1e8
_POOR = 1e-3
# A relative residual that rounding may stop from falling further.
_CLOSE = 1e-6
_WIDTHS = torch.tensor([1.0, 0.25, 4.0], dtype=torch.float64)


@final
@dataclass(frozen=True)
class Settings:
    """How to iterate; see :class:`leakwatch.attacks.gauss_newton.GaussNewton`."""

    steps: int = 60
    damping: float = 1e-2
    smoothing: float = 0.5
    widest: float = 0.3
    memory: int = 4
    patience: int = 20
    tolerance: float = 1e-12
    shrink: float = 0.2
    cycle: int = 0


@final
@dataclass(frozen=True, eq=False)
class Found:
    """Where the attacks ended: their best images, pixels, and what they reached."""

    p: Float[Tensor, "attacks n"]
    value: Float[Tensor, " attacks"]
    residual: Float[Tensor, " attacks"]
    steps: Int[Tensor, " attacks"]
    late: Bool[Tensor, " attacks"]


def descend(
    o: Objective,
    how: DenseSteps | MatrixFreeSteps,
    s: Settings,
    rows: Int[Tensor, " attacks"],
    p: Float[Tensor, "attacks n"],
    bounds: tuple[float, float] | None,
    *,
    deadline: float | None = None,
    report: Callable[[int, Tensor], None] | None = None,
    trace: list[Any] | None = None,
) -> Found:
    count = len(rows)
    p = p.clone() if bounds is None else p.clamp(*bounds)
    r = o.residual(rows, p)
    phi = o.value(rows, p, r)
    phi = torch.where(torch.isfinite(phi), phi, math.inf)
    recent = phi[None].expand(s.memory if o.kinked else 1, -1).clone()
    best_p, best, best_r = p.clone(), phi.clone(), r.norm(dim=1)
    improved = torch.zeros(count, dtype=torch.long)
    damping = torch.full((count,), s.damping, dtype=torch.float64)
    factors = torch.tensor(how.choices, dtype=torch.float64)[:, None]
    growth = torch.full((count,), 2.0, dtype=torch.float64)
    streak = torch.zeros(count, dtype=torch.long)
    turn = torch.zeros(count, dtype=torch.long)
    slope = torch.zeros_like(p)
    width = torch.zeros(count, dtype=torch.float64)
    moved = torch.ones(count, dtype=torch.bool)
    taken = torch.zeros(count, dtype=torch.long)
    alive = torch.isfinite(phi) & (best_r > s.tolerance)
    late = torch.zeros(count, dtype=torch.bool)
    for step in range(s.steps):
        a = alive.nonzero()[:, 0]
        if len(a) == 0:
            break
        if deadline is not None and time.perf_counter() > deadline:
            late[a] = True
            break
        new = a[moved[a]]
        if len(new):
            if o.kinked:
                spread = s.smoothing * r[new].norm(dim=1) * _WIDTHS[turn[new] % 3]
                width[new] = spread.clamp_max(s.widest)
            slope[new] = o.slope(rows[new], p[new], r[new], width[new])
        at = Point(rows[a], p[a], r[a], slope[a], width[a])
        tried = (damping[a] * factors).clamp_min(_SMALLEST_DAMPING)
        trials, predictions = how.step(at, tried, bounds)
        rests = [o.residual(rows[a], t) for t in trials]
        values = torch.stack(
            [o.value(rows[a], t, q) for t, q in zip(trials, rests, strict=True)]
        )
        values = torch.where(torch.isfinite(values), values, math.inf)
        # Of equal ones the most damped, which is the last.
        k = len(tried) - 1 - values.flip(0).argmin(0)
        each = torch.arange(len(a))
        trial, predicted, phi_new = (
            trials[k, each],
            predictions[k, each],
            values[k, each],
        )
        r_new = torch.stack(rests)[k, each]
        gain = (phi[a] - phi_new) / predicted.clamp_min(1e-300)
        gain = torch.where(predicted > 0, gain, -1.0).nan_to_num(-1.0)
        stale = how.stale(rows[a])
        fell = phi_new / phi[a].clamp_min(1e-300)
        good = (phi_new < phi[a]) & (gain > _POOR)
        accept = good
        if o.kinked:
            accept = good | (phi_new < recent[:, a].max(0).values) & (predicted > 0)
        # A Jacobian of an earlier image is replaced before the damping is blamed.
        blame = ~(stale & (gain < 0.5))
        yes = a[accept]
        p[yes], r[yes], phi[yes] = trial[accept], r_new[accept], phi_new[accept]
        recent[step % len(recent), a] = phi[a]
        moved[a] = accept
        taken[a] += 1
        ratio = (1 - (2 * gain.clamp(-1, 1) - 1) ** 3).clamp_min(s.shrink)
        if len(factors) > 1:
            ratio = torch.ones_like(ratio)
        ratio = torch.where(good, ratio, growth[a])
        b = a[blame]
        growth[b] = torch.where(good, 2.0, growth[a] * 2)[blame]
        damping[a[blame]] = (tried[k, each] * ratio).clamp_min(_SMALLEST_DAMPING)[blame]
        failed = a[~good & ~stale]
        streak[failed] += 1
        if o.kinked and s.cycle:
            again = failed[streak[failed] % s.cycle == 0]
            turn[again] += 1
            moved[again] = True
        streak[a[good]] = 0
        # Kept where the step was as predicted and still large enough to be worth it.
        keep = ~accept & ~stale & ~moved[a]
        keep |= accept & (gain > 0.7) & (gain < 1.4) & (fell < 0.5)
        how.renew(Point(*(t[a[~keep]] for t in (rows, p, r, slope, width))))
        w = a[phi[a] < best[a]]
        improved[a[phi[a] < 0.99 * best[a]]] = step
        best_p[w], best[w], best_r[w] = p[w], phi[w], r[w].norm(dim=1)
        if trace is not None:
            trace.append(
                dict(
                    phi=phi.clone(),
                    gain=gain,
                    damping=damping.clone(),
                    stale=stale,
                    p=p.clone(),
                )
            )
        done = (best_r[a] <= s.tolerance) | (damping[a] > _LARGEST_DAMPING)
        patience = torch.where(best_r[a] < _CLOSE, s.patience // 4, s.patience)
        done |= step - improved[a] > patience
        done |= (predicted <= 1e-14 * phi[a]) & ~accept & ~stale
        alive[a[done]] = False
        how.forget(rows[a[done]])
        if report is not None:
            report(step + 1, best_r)
    return Found(best_p, best, best_r, taken, late)
