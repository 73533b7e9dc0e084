"""One run of many descents: best so far, restarts, early ends, time."""

from __future__ import annotations

import math
import time
from typing import Protocol

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from leakwatch.attacks.base import Progress, SearchResult
from leakwatch.attacks.clock import Clock
from leakwatch.attacks.matching.objective import Evaluation
from leakwatch.attacks.optimizers.first_order import DescentSettings
from leakwatch.attacks.optimizers.state import DescentState
from leakwatch.attacks.pixels import PixelScale

__all__ = ["DescentObjective", "descend"]

# Steps between looks for finished attacks, and points of the history.
_LOOK = 10
_CHECKS = 50


class DescentObjective(Protocol):
    """What a descent makes small; to be inherited from.

    Attributes:
        matched_below: distance up to which a target counts as matched to rounding,
            ``(targets,)``; ``None``: attacks go on to their last step.
    """

    matched_below: Float[Tensor, " targets"] | None = None

    def evaluate(self, state: DescentState, step: int) -> Evaluation:
        """Distance, objective and derivatives at the present images of the attacks.

        Args:
            state: holds them.
            step: how many steps were made before.
        """

    def keep_best(self, state: DescentState) -> None:
        """Remembers what belongs to the images of ``state.kept``, the best so far."""
        return

    def move(self, state: DescentState, lr_factor: float) -> None:
        """Moves what is optimised beside the images, just before these move.

        Args:
            state: the attacks.
            lr_factor: what the schedule multiplies step sizes by.
        """
        return


def descend(
    x: Float[Tensor, "restarts targets images ..."],
    objective: DescentObjective,
    settings: DescentSettings,
    pixels: PixelScale,
    *,
    labels: Shaped[Tensor, "targets images ..."] | None = None,
    logits: Float[Tensor, "restarts targets images classes"] | None = None,
    deadline: float | None = None,
    progress: Progress | None = None,
) -> SearchResult:
    """Descends from these images, each attack on its own.

    Args:
        x: first images.
        objective: what is minimised.
        settings: how.
        pixels: the box.
        labels: of each target, for objectives that ask the state for them.
        logits: first label logits when labels are optimised too.
        deadline: of ``time.perf_counter()``, ``None`` for no limit.
        progress: called a few times a second.

    Returns:
        The best of each restart and target.
    """
    grid, steps = x.shape[:2], settings.steps
    state = DescentState(x, labels, logits, settings)
    checks = {round(i * steps / _CHECKS): i for i in range(_CHECKS + 1)}
    history = x.new_full((_CHECKS + 1, grid.numel()), math.nan, dtype=torch.float64)
    last = torch.full_like(history[0], math.inf)
    reported, clock = 0.0, Clock(deadline)
    for step in range(steps + 1):
        values = objective.evaluate(state, step)
        last[state.rows] = values.distance.double()
        state.note(values, step)
        objective.keep_best(state)
        _finish(state, values, step, objective, settings)
        if step in checks:
            history[checks[step] :] = last
        now, late = time.perf_counter(), clock.over()
        if progress is not None and (step == steps or now - reported > 0.2):
            reported = now
            best = state.best_distance.view(grid).min(0).values.median()
            progress(step, steps, float(best))
        if late or step == steps:
            break
        objective.move(state, settings.lr_factor(step))
        state.move(values, settings.lr_at(step))
        if settings.box:
            state.clamp(pixels)
        if step % _LOOK == _LOOK - 1 and state.finished.any():
            state.compact()
        if len(state.rows) == 0:
            break
    unfinished = torch.zeros(grid.numel(), dtype=torch.bool, device=x.device)
    if step < steps:
        unfinished[state.rows[~state.finished]] = True
    return state.result(grid, unfinished, history.view(-1, *grid))


def _finish(
    state: DescentState,
    values: Evaluation,
    step: int,
    objective: DescentObjective,
    settings: DescentSettings,
) -> None:
    """Marks attacks that have nothing left to do."""
    if objective.matched_below is not None:
        enough = objective.matched_below[state.target]
        state.finished |= values.distance.double() <= enough
    stalled = state.optimizer.stalled()
    if stalled is not None:
        state.finished |= stalled
    if settings.patience is not None:
        state.finished |= step - state.improved >= settings.patience
