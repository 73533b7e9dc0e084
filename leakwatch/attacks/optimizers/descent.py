"""One run of many descents: best so far, restarts, early ends, time."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from leakwatch.attacks.base import Progress
from leakwatch.attacks.matching.objective import Evaluation, Matcher, MatchingProblem
from leakwatch.attacks.optimizers.first_order import schedule
from leakwatch.attacks.optimizers.state import Outcome, State
from leakwatch.attacks.pixels import PixelScale

if TYPE_CHECKING:
    from leakwatch.attacks.first_order import FirstOrder

__all__ = ["Descent", "Outcome"]

# Steps between looks for finished attacks, and points of the history.
_LOOK = 10
_CHECKS = 50


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
        self._rescales = (
            not attack.relative
            and attack.optimizer != "sgd"
            and problem.distance.degree != 0
        )
        if self._rescales:
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
        state = State(x, labels, logits, self._attack)
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

    def _evaluate(self, state: State) -> Evaluation:
        """Objective with priors, scaled to a moderate size, and its gradient."""
        found = self._matcher.evaluate(state.images, state.targets(), state.target)
        gradient, target_gradient = found.gradient, found.target_gradient
        objective = found.objective + self._attack.priors.add_to(state.images, gradient)
        if not self._rescales:
            return Evaluation(found.distance, objective, gradient, target_gradient)
        scale = self._scale[state.target].to(gradient.dtype)
        gradient = gradient * _over(scale, gradient)
        if target_gradient is not None:
            target_gradient = target_gradient * _over(scale, target_gradient)
        return Evaluation(found.distance, objective * scale, gradient, target_gradient)

    def _judge(self, state: State, values: Evaluation, step: int) -> None:
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

    def _report(self, state: State, step: int, grid: torch.Size) -> None:
        if self._progress is not None:
            best = state.best_distance.view(grid).min(0).values.median()
            self._progress(step, self._attack.steps, float(best))


def _over(numbers: Tensor, like: Tensor) -> Tensor:
    return numbers.view(-1, *[1] * (like.ndim - 1))
