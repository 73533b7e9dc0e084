"""The attacks of one run: points, optimiser state, best so far."""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor

from leakwatch.attacks.base import SearchResult
from leakwatch.attacks.matching.objective import Evaluation
from leakwatch.attacks.optimizers.first_order import DescentSettings, make_optimizer
from leakwatch.attacks.pixels import PixelScale

__all__ = ["DescentState"]

# Attempts with a smaller step after the objective was not finite, and how much smaller.
_ATTEMPTS = 5
_SMALLER = 0.1
# An objective this many times its first value has diverged.
_DIVERGED = 1e4
# What is known of each attack in the end, and what only a moving one has.
_RESULTS = ("_best", "_best_distance", "_best_objective", "_steps", "_diverged")
_MOVING = (
    "z",
    "rows",
    "target",
    "finished",
    "improved",
    "_first",
    "_factor",
    "_attempts",
    "_bad",
)


@final
class DescentState:
    """All attacks' best, and the points of those that still move.

    Points are flat, images first and label logits, if any, after them.
    """

    def __init__(
        self,
        x: Tensor,
        labels: Tensor | None,
        logits: Tensor | None,
        settings: DescentSettings,
    ) -> None:
        restarts, targets = x.shape[:2]
        self._size = x.shape[2:]
        self._pixels = x[0, 0].numel()
        flat = x.flatten(0, 1).flatten(1)
        self._soft = None if logits is None else logits.shape[2:]
        if logits is not None:
            flat = torch.cat([flat, logits.flatten(0, 1).flatten(1)], 1)
        self.z = flat.clone()
        self._labels = None if labels is None else labels.to(x.device)
        self.rows = torch.arange(restarts * targets, device=x.device)
        self.target = self.rows % targets
        self.optimizer = make_optimizer(
            settings.optimizer,
            self.z,
            momentum=settings.momentum,
            signed=settings.signed,
        )
        n = len(flat)
        self._best = flat.clone()
        self._best_objective = x.new_full((n,), math.inf)
        self._best_distance = x.new_full((n,), math.inf, dtype=torch.float64)
        self._steps = torch.zeros(n, dtype=torch.long, device=x.device)
        self._diverged = torch.zeros(n, dtype=torch.bool, device=x.device)
        self.finished = torch.zeros_like(self._diverged)
        self.improved = torch.zeros_like(self._steps)
        self.kept = torch.zeros_like(self._diverged)
        self._first = torch.full_like(self._best_objective, math.nan)
        self._factor = torch.ones_like(self._best_objective)
        self._attempts = torch.zeros_like(self._steps)
        self._bad = torch.zeros_like(self._diverged)
        # Everything else is of those that still move.
        self._of_all = {name: getattr(self, name).clone() for name in _RESULTS}

    @property
    def images(self) -> Tensor:
        """Images of the moving attacks, a view."""
        return self.z[:, : self._pixels].view(-1, *self._size)

    @property
    def best_distance(self) -> Tensor:
        """At the best so far of all attacks, float64."""
        self._file()
        distance: Tensor = self._of_all["_best_distance"]
        return distance

    def targets(self) -> Tensor:
        """Their labels, or the distributions that are optimised."""
        if self._soft is not None:
            return self.z[:, self._pixels :].view(-1, *self._soft).softmax(-1)
        if self._labels is None:
            raise ValueError("these attacks were given no labels.")
        return self._labels[self.target]

    def note(self, values: Evaluation, step: int) -> None:
        """Keeps the best so far, and marks what left the finite numbers."""
        objective = values.objective
        finite = torch.isfinite(objective) & torch.isfinite(values.distance)
        largest = torch.linalg.vector_norm(values.gradient.flatten(1), math.inf, dim=1)
        finite &= torch.isfinite(largest)
        self._first = torch.where(
            torch.isnan(self._first) & finite, objective.abs(), self._first
        )
        diverged = objective > _DIVERGED * (self._first + 1e-30)
        self._bad = ~finite | diverged
        before = self._best_objective
        if self.optimizer.survives:
            self._bad &= torch.isinf(before)
        # Of equals the later one: where values have no more digits, images still do.
        better = finite & (objective <= before) & ~self.finished
        self._best_objective = torch.where(better, objective, before)
        self._best_distance = torch.where(
            better, values.distance.double(), self._best_distance
        )
        torch.where(better[:, None], self.z, self._best, out=self._best)
        self._steps = torch.where(self.finished, self._steps, step)
        self.kept = better
        less = better & (objective < before)
        self.improved = torch.where(less, step, self.improved)

    def move(self, values: Evaluation, lr: float) -> None:
        """One step of the optimiser; bad attacks go back to their best instead."""
        gradient = values.gradient.flatten(1)
        if values.target_gradient is not None:
            # Through the softmax from distributions to logits.
            p, g = self.targets(), values.target_gradient
            slope = p * (g - (p * g).sum(-1, keepdim=True))
            gradient = torch.cat([gradient, slope.flatten(1)], 1)
        # Both at once: on a GPU each look waits for all before it.
        looked = torch.stack([self.finished.any(), self._bad.any()])
        finished, bad = looked.tolist()
        still = self.z.clone() if finished else None
        sizes = lr * self._factor
        moved = self.optimizer.step(self.z, values.objective, gradient, sizes)
        if still is not None:
            moved = torch.where(self.finished[:, None], still, moved)
        if bad:
            moved = self._back(moved)
        self.z = moved

    def _back(self, moved: Tensor) -> Tensor:
        bad = self._bad
        best = self._best
        # A start that is not finite itself: nearer to zero, where networks are tame.
        nowhere = torch.isinf(self._best_objective)
        halved = torch.where(nowhere[:, None], best / 2, best)
        self._best = torch.where(bad[:, None], halved, best)
        self.optimizer.reset(bad)
        self._factor = torch.where(bad, self._factor * _SMALLER, self._factor)
        self._attempts += bad
        hopeless = bad & (self._attempts > _ATTEMPTS)
        self._diverged |= hopeless
        self.finished |= hopeless
        return torch.where(bad[:, None], halved, moved)

    def clamp(self, pixels: PixelScale) -> None:
        """Images back into the range of pixels."""
        bounds = pixels.box(self.images)
        if bounds is not None:
            torch.clamp(self.images, *bounds, out=self.images)

    def compact(self) -> None:
        """Finished attacks leave the batch."""
        self._file()
        keep = (~self.finished).nonzero()[:, 0]
        for name in (*_RESULTS, *_MOVING):
            setattr(self, name, getattr(self, name)[keep])
        self.optimizer.select(keep)

    def result(
        self, grid: torch.Size, unfinished: Tensor, history: Tensor
    ) -> SearchResult:
        """What all attacks came to, restarts by targets."""
        self._file()
        best, distance, _, taken, diverged = (self._of_all[n] for n in _RESULTS)
        labels = None
        if self._soft is not None:
            labels = best[:, self._pixels :].view(*grid, *self._soft).argmax(-1)
        return SearchResult(
            images=best[:, : self._pixels].reshape(*grid, *self._size),
            loss=distance.view(grid),
            steps=taken.view(grid),
            labels=labels,
            late=unfinished.view(grid),
            diverged=diverged.view(grid),
            history=history,
        )

    def _file(self) -> None:
        for name, whole in self._of_all.items():
            whole[self.rows] = getattr(self, name)
