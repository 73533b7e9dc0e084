"""The Levenberg–Marquardt iteration, for many attacks at once, each on its own."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from leakwatch.attacks.clock import Clock
from leakwatch.attacks.gauss_newton.objective import PosteriorObjective
from leakwatch.attacks.gauss_newton.steps import Iterates, Steps
from leakwatch.checks import check_integer, check_number

__all__ = [
    "LevenbergMarquardt",
    "LevenbergMarquardtResult",
    "LevenbergMarquardtSettings",
]

Report = Callable[[int, Float[Tensor, " attacks"]], None]

_SMALLEST_DAMPING = 1e-15
_LARGEST_DAMPING = 1e8
# Least part of the predicted decrease that a step must bring.
_POOR = 1e-3
# A Jacobian of an earlier image is used on while it predicts this well and steps are
# worth their cost.
_TRUSTED, _WORTH = (0.7, 1.4), 0.5
_DOUBTED = 0.5
# A relative residual that rounding may stop from falling further.
_CLOSE = 1e-6
# Relative decreases of φ: below the first an attack is at its minimum; within the
# patience it must gain the second, or the third where the gradient was noisy.
_STATIONARY, _GAIN, _NOISY_GAIN = 1e-9, 1e-2, 1e-6
# Factors of the kinks' width, taken in turn where steps fail.
_WIDTHS = (1.0, 0.25, 4.0)
_FAILURES = 4
# Relative step from which the width is taken at first where noise hides the residual.
_FIRST_MOVE = 0.1
# Attacks that are looked at are on their way below this part of their first residual,
# and near below this residual.
_PROGRESS, _NEAR = 0.7, 0.15


@dataclass(frozen=True, kw_only=True)
class LevenbergMarquardtSettings:
    """How to iterate.

    Args:
        steps: at most.
        damping: λ at the start.
        smoothing: spread of pre-activations as a part of their size, per unit of the
            relative residual; 0 for none.
        widest: most of that spread.
        memory: steps among which one may be uphill, ReLU networks only.
        patience: steps without 1 % of improvement after which an attack ends.

    Raises:
        ValueError: for values that make no sense; quotes them.
    """

    steps: int = 60
    damping: float = 1e-2
    smoothing: float = 0.3
    widest: float = 0.3
    memory: int = 4
    patience: int = 20

    def __post_init__(self) -> None:
        check_integer("steps", self.steps, example=60)
        check_integer("memory", self.memory, example=4)
        check_integer("patience", self.patience, example=20)
        check_number("damping", self.damping, example=1e-2)
        check_number("widest", self.widest, example=0.3)
        check_number("smoothing", self.smoothing, "[0, inf)", example=0.3)


@final
@dataclass(frozen=True, eq=False)
class LevenbergMarquardtResult:
    """Where attacks ended.

    Attributes:
        p: the best image that each met, pixels, flat; always finite.
        value: φ there.
        residual: ‖g − g̃‖/‖g̃‖ there.
        steps: taken by each.
        late: those that the clock stopped.
        given_up: those that had made no way.
    """

    p: Float[Tensor, "attacks n"]
    value: Float[Tensor, " attacks"]
    residual: Float[Tensor, " attacks"]
    steps: Int[Tensor, " attacks"]
    late: Bool[Tensor, " attacks"]
    given_up: Bool[Tensor, " attacks"]


@final
class LevenbergMarquardt:
    """State of all attacks. Nothing that happens to one changes another.

    Numbers of attacks, of which each step depends, are on the CPU: once in a step they
    are waited for, all together. What the device is told goes there together too: each
    copy, and each index on the CPU is one, waits as well.

    Args:
        objective: what is minimised.
        how: way to find the next images.
        settings: of the iteration.
        tolerance: relative residual at which an attack ends.
        rows: positions of the attacks in the objective.
        p: first images, pixels, flat, finite.
        bounds: of pixels; ``None`` for no box.
    """

    def __init__(
        self,
        objective: PosteriorObjective,
        how: Steps,
        settings: LevenbergMarquardtSettings,
        tolerance: float,
        rows: Int[Tensor, " attacks"],
        p: Float[Tensor, "attacks n"],
        bounds: tuple[float, float] | None,
    ) -> None:
        self.objective, self.how, self.settings = objective, how, settings
        self.tolerance = tolerance
        self.rows, self.bounds = rows.cpu(), bounds
        rows = self.rows
        self.p = p.clone() if bounds is None else p.clamp(*bounds)
        row = self._tell(rows)[0].long()
        self.residual = objective.residual(row, self.p)
        phi = objective.value(row, self.p, self.residual)
        self.noisy = (objective.noise > 0).cpu()[rows]
        self.phi, self.distance = self._read(phi, self.residual.norm(dim=1))
        count = len(rows)
        memory = settings.memory if objective.kinked else 1
        self.recent = self.phi.expand(memory, -1).clone()
        self.best_p, self.best = self.p.clone(), self.phi.clone()
        self.best_residual = self.distance.clone()
        self.slope = torch.zeros_like(self.p)
        self.width = torch.zeros_like(self.phi)
        self.damping = torch.full_like(self.phi, settings.damping)
        self.growth = torch.full_like(self.phi, 2.0)
        self.move = torch.full_like(self.phi, _FIRST_MOVE)
        self.widths = torch.tensor(_WIDTHS).to(self.phi)
        none = torch.zeros(count, dtype=torch.long)
        self.failures, self.turn = none.clone(), none.clone()
        self.improved, self.steps = none.clone(), none.clone()
        self.moved = torch.ones_like(none, dtype=torch.bool)
        self.late = torch.zeros_like(self.moved)
        self.alive = torch.isfinite(self.phi)
        self.alive &= self.best_residual > tolerance

    def run(
        self,
        *,
        clock: Clock | None = None,
        report: Report | None = None,
        look_at: float | None = None,
    ) -> LevenbergMarquardtResult:
        """Iterates to the end.

        Args:
            clock: says when to stop, and knows how long a step took before.
            report: called after each step with its number and the residuals.
            look_at: time of ``time.perf_counter()`` at which attacks end that are
                neither near nor on their way; ``None`` for never.

        Returns:
            The best images met.
        """
        clock = Clock(None) if clock is None else clock
        first = self.best_residual.clone()
        given_up = torch.zeros_like(self.late)
        for step in range(self.settings.steps):
            a = self.alive.nonzero()[:, 0]
            if len(a) == 0:
                break
            if clock.over():
                self.late[a] = True
                break
            if look_at is not None and time.perf_counter() > look_at:
                given_up = self.alive & (self.best_residual > _PROGRESS * first)
                given_up &= self.best_residual > _NEAR
                self.alive &= ~given_up
                look_at, a = None, self.alive.nonzero()[:, 0]
                if len(a) == 0:
                    break
            self._step(step, a)
            if report is not None:
                report(step + 1, self.best_residual)
        numbers = (self.best, self.best_residual, self.steps, self.late, given_up)
        place = self.p.device
        return LevenbergMarquardtResult(self.best_p, *(t.to(place) for t in numbers))

    def _step(self, step: int, a: Tensor) -> None:
        """One step of the attacks at positions a."""
        rows, new = self.rows[a], a[self.moved[a]]
        if self.objective.kinked:
            self._set_widths(new)
        told = self._tell(
            *(new, self.rows[new], self.width[new]),
            *(a, rows, self.width[a], self.damping[a]),
        )
        self._differentiate(*told[:3])
        width, damping = told[5:]
        places, row = (t.long() for t in told[3:5])
        p = self.p[places]
        trial, predicted = self.how.step(
            Iterates(rows, p, self.residual[places], self.slope[places], width),
            damping,
            self.bounds,
        )
        residual = self.objective.residual(row, trial)
        phi, predicted, distance, moved, size = self._read(
            self.objective.value(row, trial, residual),
            predicted,
            residual.norm(dim=1),
            (trial - p).norm(dim=1),
            p.norm(dim=1),
        )
        gain = (self.phi[a] - phi) / predicted.clamp_min(1e-300)
        gain = torch.where(predicted > 0, gain, -1.0).nan_to_num(-1.0)
        stale = self.how.stale(rows)
        good = (phi < self.phi[a]) & (gain > _POOR)
        accept = good
        if self.objective.kinked:
            accept = good | (phi < self.recent[:, a].max(0).values) & (predicted > 0)
        fell = phi / self.phi[a].clamp_min(1e-300)
        ended = (predicted <= _STATIONARY * self.phi[a]) & ~stale

        yes = a[accept]
        self.move[yes] = moved[accept] / size[accept].clamp_min(1e-300)
        self.phi[yes], self.distance[yes] = phi[accept], distance[accept]
        best = self.phi[a] < self.best[a]
        taken, best_yet = (t[:, None] > 0 for t in self._tell(accept, best))
        self.p[places] = p = torch.where(taken, trial, p)
        self.residual[places] = torch.where(taken, residual, self.residual[places])
        self.best_p[places] = torch.where(best_yet, p, self.best_p[places])
        self.recent[step % len(self.recent), a] = self.phi[a]
        self.moved[a] = accept
        self.steps[a] += 1
        # A Jacobian of an earlier image is replaced before the damping is blamed.
        blame = ~(stale & (gain < _DOUBTED))
        self._damp(a[blame], gain[blame], good[blame])
        self._widen(a[good], a[~good & ~stale])
        keep = accept & (gain > _TRUSTED[0]) & (gain < _TRUSTED[1]) & (fell < _WORTH)
        keep |= ~stale & ~self.moved[a]
        self.how.renew(rows[~keep])
        self._remember(step, a, ended)

    def _set_widths(self, new: Tensor) -> None:
        """Widths of the kinks, of attacks that moved."""
        spread = self.distance[new]
        # With noise the residual stays large; the last step still shrinks.
        spread = torch.where(
            self.noisy[new], torch.minimum(spread, self.move[new]), spread
        )
        spread = self.settings.smoothing * spread * self.widths[self.turn[new]]
        self.width[new] = spread.clamp_max(self.settings.widest)

    def _differentiate(self, places: Tensor, rows: Tensor, width: Tensor) -> None:
        """Slopes of attacks that moved; where the images are, as told."""
        if len(places):
            places, rows = places.long(), rows.long()
            p, r = self.p[places], self.residual[places]
            self.slope[places] = self.objective.slope(rows, p, r, width)

    def _damp(self, a: Tensor, gain: Tensor, good: Tensor) -> None:
        """Nielsen's rule: damping falls smoothly with the gain, and rises ever faster.

        At most by 5 at once: greedier choices end in worse minima.
        """
        less = (1 - (2 * gain.clamp(-1, 1) - 1) ** 3).clamp_min(0.2)
        factor = torch.where(good, less, self.growth[a])
        self.damping[a] = (self.damping[a] * factor).clamp_min(_SMALLEST_DAMPING)
        self.growth[a] = torch.where(good, 2.0, self.growth[a] * 2)

    def _widen(self, good: Tensor, failed: Tensor) -> None:
        """Another width of the kinks after several failures in a row."""
        self.failures[good] = 0
        self.failures[failed] += 1
        if self.objective.kinked:
            again = failed[self.failures[failed] % _FAILURES == 0]
            self.turn[again] = (self.turn[again] + 1) % len(_WIDTHS)
            self.moved[again] = True

    def _remember(self, step: int, a: Tensor, ended: Tensor) -> None:
        """Keeps the best values, and ends attacks that can't improve."""
        # Noise makes most of φ: a hundredth of it may be all that there is to gain.
        less = torch.where(self.noisy[a], 1 - _NOISY_GAIN, 1 - _GAIN)
        self.improved[a[self.phi[a] < less * self.best[a]]] = step
        w = a[self.phi[a] < self.best[a]]
        self.best[w], self.best_residual[w] = self.phi[w], self.distance[w]
        close = self.best_residual[a] < _CLOSE
        most = self.settings.patience
        patience = torch.where(close, max(2, most // 4), most)
        done = ended | (self.best_residual[a] <= self.tolerance)
        done |= self.damping[a] > _LARGEST_DAMPING
        done |= step - self.improved[a] > patience
        self.alive[a[done]] = False
        self.how.forget(self.rows[a[done]])

    def _tell(self, *numbers: Tensor) -> tuple[Tensor, ...]:
        """Numbers of attacks where the images are, in float64, by one copy."""
        told = torch.cat([t.double() for t in numbers]).to(self.p.device)
        return torch.split(told, [len(t) for t in numbers])

    def _read(self, phi: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
        """Numbers of attacks on the CPU, with φ infinite where it is not a number."""
        read = torch.stack([phi, *more]).cpu()
        first = torch.where(torch.isfinite(read[0]), read[0], math.inf)
        return (first, *read[1:])
