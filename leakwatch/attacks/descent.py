"""One run of many descents: best so far, restarts, early ends, time."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from leakwatch.attacks.matching import Evaluation, Matcher, MatchingProblem
from leakwatch.attacks.optimizers import make_optimizer, schedule
from leakwatch.attacks.pixels import PixelScale
from leakwatch.attacks.protocol import Progress

if TYPE_CHECKING:
    from leakwatch.attacks.first_order import FirstOrder

__all__ = ["Descent", "Outcome"]

# Attempts with a smaller step after the objective was not finite, and how much smaller.
_ATTEMPTS = 5
_SMALLER = 0.1
# Steps between looks for finished attacks, and points of the history.
_LOOK = 10
_CHECKS = 50
# An objective this many times its first value has diverged.
_DIVERGED = 1e4


@final
@dataclass(frozen=True, eq=False)
class Outcome:
    """What became of each restart of each target.

    Attributes:
        images: the best, ``(restarts, targets, images, *sample)``.
        logits: of jointly optimised labels.
        distance: there, float64; infinite where none was finite.
        steps: gradient evaluations used.
        unfinished: stopped by the clock.
        diverged: given up after several attempts with smaller steps.
        history: distance of the current images at evenly spaced steps.
    """

    images: Float[Tensor, "restarts targets images ..."]
    logits: Float[Tensor, "restarts targets images classes"] | None
    distance: Float[Tensor, "restarts targets"]
    steps: Int[Tensor, "restarts targets"]
    unfinished: Bool[Tensor, "restarts targets"]
    diverged: Bool[Tensor, "restarts targets"]
    history: Float[Tensor, "checks restarts targets"]


@final
class Descent:
    """Runs an attack's settings on a matching problem.

    Args:
        attack: the settings.
        problem: the objective.
        matcher: evaluates it.
        pixels: the box.
        deadline: of ``time.perf_counter()``, ``None`` for no limit.
        progress: called about a hundred times.
    """

    def __init__(
        self,
        attack: FirstOrder,
        problem: MatchingProblem,
        matcher: Matcher,
        pixels: PixelScale,
        *,
        deadline: float | None,
        progress: Progress | None,
    ) -> None:
        self._attack = attack
        self._problem = problem
        self._matcher = matcher
        self._pixels = pixels
        self._deadline = deadline
        self._progress = progress
        target = problem.shared.gradient.to(matcher.device, torch.float64)
        self._enough = self._finished_below(target)
        length = target.norm(dim=1)
        # Adam's ε and the tests of L-BFGS see objectives of moderate size however
        # small a gradient is; plain descent takes the objective as it is.
        self._scale = torch.ones_like(length)
        if not attack.relative and attack.optimizer != "sgd":
            nonzero = torch.where(length > 0, length, self._scale)
            self._scale = nonzero**-problem.distance.degree

    def run(
        self,
        x: Float[Tensor, "restarts targets images ..."],
        labels: Int[Tensor, "targets images"],
        logits: Float[Tensor, "restarts targets images classes"] | None,
    ) -> Outcome:
        """Descends from these images.

        Args:
            x: first images.
            labels: of each target.
            logits: first label logits when labels are optimised too.

        Returns:
            The best of each.
        """
        grid = x.shape[:2]
        state = _State(x, labels, logits, self._attack)
        steps = self._attack.steps
        checks = {round(i * steps / _CHECKS): i for i in range(_CHECKS + 1)}
        history = x.new_full((_CHECKS + 1, grid.numel()), math.nan, dtype=torch.float64)
        factor = schedule(self._attack.schedule)
        last = torch.full_like(history[0], math.inf)
        reported, done = 0.0, 0
        for step in range(steps + 1):
            values = self._evaluate(state)
            last[state.rows] = values.distance.double()
            self._judge(state, values, step)
            if step in checks:
                history[checks[step] :] = last
            late = self._deadline is not None and time.perf_counter() > self._deadline
            done = step
            now = time.perf_counter()
            if self._progress is not None and (step == steps or now - reported > 0.2):
                reported = now
                self._report(state, step, grid)
            if late or step == steps:
                break
            lr = self._attack.lr * factor(step, steps)
            state.move(values, lr)
            if self._attack.box:
                state.clamp(self._pixels)
            if step % _LOOK == _LOOK - 1 and state.finished.any():
                state.compact()
            if len(state.rows) == 0:
                break
        unfinished = torch.zeros(grid.numel(), dtype=torch.bool, device=x.device)
        if done < steps:
            unfinished[state.rows[~state.finished]] = True
        return state.outcome(grid, unfinished, history.view(-1, *grid))

    # -- one step --------------------------------------------------------------------

    def _evaluate(self, state: _State) -> Evaluation:
        """Objective with priors, scaled to a moderate size, and its gradient."""
        found = self._matcher.evaluate(state.images, state.targets(), state.target)
        gradient, target_gradient = found.gradient, found.target_gradient
        objective = found.objective + self._attack.priors.add_to(state.images, gradient)
        scale = self._scale[state.target].to(gradient.dtype)
        gradient = gradient * _over(scale, gradient)
        if target_gradient is not None:
            target_gradient = target_gradient * _over(scale, target_gradient)
        return Evaluation(found.distance, objective * scale, gradient, target_gradient)

    def _judge(self, state: _State, values: Evaluation, step: int) -> None:
        state.note(values, step)
        enough = self._enough[state.target]
        matched = values.distance.double() <= enough
        state.finished |= matched
        stalled = state.optimizer.stalled()
        if stalled is not None:
            state.finished |= stalled
        if self._attack.patience is not None:
            state.finished |= step - state.improved >= self._attack.patience

    def _finished_below(self, target: Tensor) -> Tensor:
        """Distance at which a target counts as matched to rounding."""
        tolerance = self._attack.tolerance
        if tolerance is None:
            tolerance = 20 * torch.finfo(self._matcher.dtype).eps
        name = self._problem.distance.name
        if name == "cosine":
            return torch.full_like(target[:, 0], 0.5 * tolerance**2)
        if name == "l1":
            return tolerance * target.abs().sum(1)
        return 0.5 * tolerance**2 * target.square().sum(1)

    def _report(self, state: _State, step: int, grid: torch.Size) -> None:
        if self._progress is not None:
            best = state.best_distance.view(grid).min(0).values.median()
            self._progress(step, self._attack.steps, float(best))


@final
class _State:
    """All attacks' best, and the points of those that still move.

    Points are flat, images first and label logits, if any, after them.
    """

    def __init__(
        self, x: Tensor, labels: Tensor, logits: Tensor | None, attack: FirstOrder
    ) -> None:
        restarts, targets = x.shape[:2]
        self._size = x.shape[2:]
        self._pixels = x[0, 0].numel()
        flat = x.flatten(0, 1).flatten(1)
        self._soft = None if logits is None else logits.shape[2:]
        if logits is not None:
            flat = torch.cat([flat, logits.flatten(0, 1).flatten(1)], 1)
        self.z = flat.clone()
        self._labels = labels.to(x.device)
        self.rows = torch.arange(restarts * targets, device=x.device)
        self.target = self.rows % targets
        self.optimizer = make_optimizer(
            attack.optimizer, self.z, momentum=attack.momentum, signed=attack.signed
        )
        n = len(flat)
        self._best = flat.clone()
        self._best_objective = x.new_full((n,), math.inf)
        self.best_distance = x.new_full((n,), math.inf, dtype=torch.float64)
        self._steps = torch.zeros(n, dtype=torch.long, device=x.device)
        self._diverged = torch.zeros(n, dtype=torch.bool, device=x.device)
        # Of those that still move only:
        self.finished = torch.zeros_like(self._diverged)
        self.improved = torch.zeros_like(self._steps)
        self._first = torch.full_like(self._best_objective, math.nan)
        self._factor = torch.ones_like(self._best_objective)
        self._attempts = torch.zeros_like(self._steps)
        self._bad = torch.zeros_like(self._diverged)

    @property
    def images(self) -> Tensor:
        """Images of the moving attacks, a view."""
        return self.z[:, : self._pixels].view(-1, *self._size)

    def targets(self) -> Tensor:
        """Their labels, or the distributions that are optimised."""
        if self._soft is None:
            return self._labels[self.target]
        return self.z[:, self._pixels :].view(-1, *self._soft).softmax(-1)

    def note(self, values: Evaluation, step: int) -> None:
        """Keeps the best so far, and marks what left the finite numbers."""
        objective = values.objective
        finite = torch.isfinite(objective) & torch.isfinite(values.distance)
        finite &= torch.isfinite(values.gradient.flatten(1)).all(1)
        self._first = torch.where(
            torch.isnan(self._first) & finite, objective.abs(), self._first
        )
        diverged = objective > _DIVERGED * (self._first + 1e-30)
        self._bad = ~finite | diverged
        before = self._best_objective[self.rows]
        if self.optimizer.survives:
            self._bad &= torch.isinf(before)
        better = finite & (objective < before) & ~self.finished
        self._best_objective[self.rows] = torch.where(better, objective, before)
        distance = self.best_distance[self.rows]
        self.best_distance[self.rows] = torch.where(
            better, values.distance.double(), distance
        )
        kept = torch.where(better[:, None], self.z, self._best[self.rows])
        self._best[self.rows] = kept
        self._steps[self.rows] = torch.where(
            self.finished, self._steps[self.rows], step
        )
        self.improved = torch.where(better, step, self.improved)

    def move(self, values: Evaluation, lr: float) -> None:
        """One step of the optimiser; bad attacks go back to their best instead."""
        gradient = values.gradient.flatten(1)
        if values.target_gradient is not None:
            # Through the softmax from distributions to logits.
            p, g = self.targets(), values.target_gradient
            slope = p * (g - (p * g).sum(-1, keepdim=True))
            gradient = torch.cat([gradient, slope.flatten(1)], 1)
        still = self.z.clone() if bool(self.finished.any()) else None
        sizes = lr * self._factor
        moved = self.optimizer.step(self.z, values.objective, gradient, sizes)
        if still is not None:
            moved = torch.where(self.finished[:, None], still, moved)
        if bool(self._bad.any()):
            moved = self._back(moved)
        self.z = moved

    def _back(self, moved: Tensor) -> Tensor:
        bad = self._bad
        best = self._best[self.rows]
        # A start that is not finite itself: nearer to zero, where networks are tame.
        nowhere = torch.isinf(self._best_objective[self.rows])
        halved = torch.where(nowhere[:, None], best / 2, best)
        self._best[self.rows] = torch.where(bad[:, None], halved, best)
        self.optimizer.reset(bad)
        self._factor = torch.where(bad, self._factor * _SMALLER, self._factor)
        self._attempts += bad
        hopeless = bad & (self._attempts > _ATTEMPTS)
        self._diverged[self.rows] |= hopeless
        self.finished |= hopeless
        return torch.where(bad[:, None], halved, moved)

    def clamp(self, pixels: PixelScale) -> None:
        """Images back into the range of pixels."""
        bounds = pixels.box(self.images)
        if bounds is not None:
            torch.clamp(self.images, *bounds, out=self.images)

    def compact(self) -> None:
        """Finished attacks leave the batch."""
        keep = (~self.finished).nonzero()[:, 0]
        for name in (
            "z",
            "rows",
            "target",
            "finished",
            "improved",
            "_first",
            "_factor",
            "_attempts",
            "_bad",
        ):
            setattr(self, name, getattr(self, name)[keep])
        self.optimizer.select(keep)

    def outcome(self, grid: torch.Size, unfinished: Tensor, history: Tensor) -> Outcome:
        """What is known of all attacks."""
        logits = None
        if self._soft is not None:
            logits = self._best[:, self._pixels :].view(*grid, *self._soft)
        return Outcome(
            self._best[:, : self._pixels].reshape(*grid, *self._size),
            logits,
            self.best_distance.view(grid),
            self._steps.view(grid),
            unfinished.view(grid),
            self._diverged.view(grid),
            history,
        )


def _over(numbers: Tensor, like: Tensor) -> Tensor:
    return numbers.view(-1, *[1] * (like.ndim - 1))
