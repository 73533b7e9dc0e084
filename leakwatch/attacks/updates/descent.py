"""One descent for all attacks on updates: images, and α where it is learned."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from leakwatch.attacks.base import Progress
from leakwatch.attacks.first_order import FirstOrder
from leakwatch.attacks.matching.objective import Evaluation
from leakwatch.attacks.optimizers.first_order import Adam
from leakwatch.attacks.optimizers.state import State
from leakwatch.attacks.pixels import PixelScale

__all__ = ["Alphas", "Objective", "UpdateDescent", "UpdateOutcome", "Values"]

_CHECKS = 50


class Values(NamedTuple):
    """The objective of some attacks.

    Attributes:
        distance: of the updates, without priors, ``(attacks,)``.
        objective: what the best step is judged by.
        gradient: of what is minimised, in the images.
        slope: of it in α, ``None`` where α is not learned.
    """

    distance: Float[Tensor, " attacks"]
    objective: Float[Tensor, " attacks"]
    gradient: Float[Tensor, "attacks images ..."]
    slope: Float[Tensor, " attacks"] | None


class Objective(Protocol):
    """Evaluates attacks in rows."""

    def __call__(
        self,
        x: Float[Tensor, "attacks images ..."],
        alpha: Float[Tensor, " attacks"],
        clients: Int[Tensor, " attacks"],
        step: int,
    ) -> Values:
        """The objective at these images and α.

        Args:
            x: images, network-input units.
            alpha: α of each attack.
            clients: which client each is after.
            step: how many steps were made before.
        """


@final
class Alphas:
    """α of every attack, with an optimiser of its own, and where it was best.

    Zhu, Yao and Blaschko, "Surrogate Model Extension" (ICML 2023), Algorithm 1: one
    step of Adam on α for each on the images, from the gradient at the same point.

    Args:
        start: α_0.
        like: gives number, precision and device of the attacks.
        lr: step size, in units of α; 0 keeps α where it is.
        low: least α; steps beyond are cut off.
        high: largest α.
    """

    def __init__(
        self, start: float, like: Tensor, lr: float, low: float, high: float
    ) -> None:
        self.now = like.new_full((len(like),), start)
        self.best = self.now.clone()
        self._lr = lr
        self._bounds = low, high
        self._adam = Adam(self.now[:, None])

    def keep(self, better: Bool[Tensor, " attacks"]) -> None:
        """Remembers α where the images were remembered."""
        self.best = torch.where(better, self.now, self.best)

    def move(
        self,
        slope: Float[Tensor, " attacks"] | None,
        factor: float,
        lost: Bool[Tensor, " attacks"],
    ) -> None:
        """One step; attacks that left the finite numbers go back to their best."""
        if slope is None or not self._lr:
            return
        sizes = self.now.new_full((len(self.now),), self._lr * factor)
        before = self.now
        slope = torch.where(lost, torch.zeros_like(slope), slope)
        moved = self._adam.step(before[:, None].clone(), slope, slope[:, None], sizes)
        self.now = torch.where(lost, self.best, moved[:, 0].clamp(*self._bounds))
        if bool(lost.any()):
            self._adam.reset(lost)


@final
@dataclass(frozen=True, eq=False)
class UpdateOutcome:
    """What became of each restart of each client.

    Attributes:
        images: the best.
        alpha: there.
        distance: there, float64; infinite where none was finite.
        late: whether the clock stopped it.
        diverged: whether it was given up.
        steps: that were made.
        history: distance at evenly spaced steps.
    """

    images: Float[Tensor, "restarts clients images ..."]
    alpha: Float[Tensor, "restarts clients"]
    distance: Float[Tensor, "restarts clients"]
    late: bool
    diverged: Bool[Tensor, "restarts clients"]
    steps: int
    history: Float[Tensor, "checks restarts clients"]


@final
class UpdateDescent:
    """Descends for a fixed number of steps.

    Args:
        settings: optimiser, step size, steps and box.
        factor: on the step size, of the step.
        pixels: the box.
        deadline: of ``time.perf_counter()``, ``None`` for no limit.
        progress: called now and then.
    """

    def __init__(
        self,
        settings: FirstOrder,
        factor: Callable[[int], float],
        pixels: PixelScale,
        *,
        deadline: float | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._settings = settings
        self._factor = factor
        self._pixels = pixels
        self._deadline = deadline
        self._progress = progress

    def run(
        self,
        x: Float[Tensor, "restarts clients images ..."],
        objective: Objective,
        alphas: Alphas,
    ) -> UpdateOutcome:
        """Descends from these images.

        Args:
            x: first images.
            objective: what is minimised.
            alphas: of all attacks, restarts first.

        Returns:
            The best of each.
        """
        grid, steps = x.shape[:2], self._settings.steps
        labels = torch.zeros(grid[1], 1, dtype=torch.long)  # only looked up
        state = State(x, labels, None, self._settings)
        checks = {round(i * steps / _CHECKS): i for i in range(_CHECKS + 1)}
        history = x.new_full((_CHECKS + 1, grid.numel()), math.nan, dtype=torch.float64)
        reported = 0.0
        for step in range(steps + 1):
            found = objective(state.images, alphas.now, state.target, step)
            values = Evaluation(found.distance, found.objective, found.gradient)
            state.note(values, step)
            alphas.keep(state.kept)
            if step in checks:
                history[checks[step] :] = found.distance.double()
            now = time.perf_counter()
            late = self._deadline is not None and now > self._deadline
            if self._progress is not None and (step == steps or now - reported > 0.2):
                reported = now
                best = state.best_distance.view(grid).min(0).values.median()
                self._progress(step, steps, float(best))
            if late or step == steps or bool(state.finished.all()):
                break
            factor = self._factor(step)
            alphas.move(found.slope, factor, ~torch.isfinite(found.objective))
            state.move(values, self._settings.lr * factor)
            if self._settings.box:
                state.clamp(self._pixels)
        out = state.outcome(grid, torch.zeros_like(state.finished), history)
        return UpdateOutcome(
            out.images,
            alphas.best.view(grid),
            out.distance,
            late and step < steps,
            out.diverged,
            step,
            history.view(-1, *grid),
        )
