"""First-order gradient matching over any search space."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, final

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from leakwatch.attacks.base import GradientTask, SearchResult
from leakwatch.attacks.clock import Clock
from leakwatch.attacks.generators.search_space import Candidates
from leakwatch.attacks.matching.objective import Matcher
from leakwatch.attacks.matching.priors import total_variation
from leakwatch.attacks.optimizers.first_order import schedule
from leakwatch.checks import check_integer, check_number

__all__ = ["AdamResult", "Phase", "search"]

_BETAS: Final = (0.9, 0.999)
_EPSILON: Final = 1e-8
_SMALLER: Final = 0.25
_MOST_RESTARTS: Final = 5
_CHECKS: Final = 50


@final
@dataclass(frozen=True)
class Phase:
    """One run of Adam (Kingma & Ba 2015).

    Args:
        steps: how many.
        lr: learning rate.
        signed: use the sign of the gradient in its place.
        decay: multiply the rate by 0.1 after 3/8, 5/8 and 7/8 of the steps (Geiping et
            al. 2020).
        tv: weight of :func:`leakwatch.attacks.matching.priors.total_variation`.
        l2: weight of the squared norm of the parameters.

    Raises:
        ValueError: for fewer than one step, a rate that isn't positive, or a negative
            weight.
    """

    steps: int
    lr: float
    signed: bool = False
    decay: bool = False
    tv: float = 0.0
    l2: float = 0.0

    def __post_init__(self) -> None:
        check_integer("steps", self.steps, example=1000)
        check_number("lr", self.lr, example=0.1)
        check_number("tv", self.tv, "[0, inf)", example=1e-6)
        check_number("l2", self.l2, "[0, inf)", example=1e-6)

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0.

        Example:
            >>> phase = Phase(8, lr=1.0, decay=True)
            >>> [round(phase.rate(i), 4) for i in range(8)]
            [1.0, 1.0, 1.0, 0.1, 0.1, 0.01, 0.01, 0.001]
        """
        factor = schedule("step" if self.decay else "constant")
        return self.lr * factor(step, self.steps)


@final
@dataclass(frozen=True, eq=False)
class AdamResult:
    """The best images of each attack, and what made them.

    Attributes:
        images: network-input units, finite.
        loss: their matching distance, without priors, float64; infinite where no step
            gave a finite one.
        steps: done by each attack until it stood still for good.
        parameters: of the best images, in the order of the search space.
        stopped: whether the time was over before the steps were.
        broken: attacks that were given up after the objective or its derivative had
            been infinite or NaN too often.
        history: distance of the images at up to 50 evenly spaced steps.
    """

    images: Float[Tensor, "attacks images ..."]
    loss: Float[Tensor, " attacks"]
    steps: Int[Tensor, " attacks"]
    parameters: tuple[Float[Tensor, "rows ..."], ...]
    stopped: bool
    broken: tuple[bool, ...]
    history: Float[Tensor, "checks attacks"]

    def judged(self, task: GradientTask) -> SearchResult:
        """By restart and target, with images in the range of pixels.

        Args:
            task: the run, whose attacks these are, restart by restart.
        """
        grid = (task.restarts, task.shared.targets)
        loss = self.loss.view(grid)
        return SearchResult(
            # A generator may leave the range of pixels.
            images=task.pixels.clamp(self.images.view(*grid, *self.images.shape[1:])),
            loss=loss,
            steps=self.steps.view(grid),
            late=torch.full_like(loss, self.stopped, dtype=torch.bool),
            diverged=torch.tensor(self.broken, device=loss.device).view(grid),
            history=self.history.view(-1, *grid),
        )


def search(
    matcher: Matcher,
    candidates: Candidates,
    labels: Shaped[Tensor, "attacks images ..."],
    targets: Int[Tensor, " attacks"],
    phase: Phase,
    *,
    deadline: float | None = None,
    tick: Callable[[int, Tensor], None] | None = None,
) -> AdamResult:
    """Moves the parameters until the images share the same gradients.

    Attacks are independent: each has its own optimiser state and best images. One
    whose objective or derivative isn't finite goes back to its best parameters and
    goes on with a quarter of the step; after five times it is left there.

    Args:
        matcher: evaluates distances, inside of its context.
        candidates: the search space, changed in place.
        labels: of each attack.
        targets: which shared gradient each attack is after.
        phase: how.
        deadline: ``time.perf_counter()`` at which to stop, ``None`` for no limit; one
            step is always done.
        tick: called with the steps done and the best distances after each.

    Returns:
        The best images, by matching distance.
    """
    run, clock = _Run(candidates), Clock(deadline)
    stopped = False
    history: list[Tensor] = []
    every = -(-phase.steps // _CHECKS)
    for step in range(phase.steps):
        images = candidates.images()
        values = matcher.evaluate(images, labels, targets)
        push = values.gradient.detach().to(images.dtype)
        if phase.tv:
            push = push.clone()
            total_variation(images.detach(), push, phase.tv)
        gradients = torch.autograd.grad(
            images, candidates.parameters, push, allow_unused=True
        )
        run.update(images.detach(), values.distance.double(), gradients, phase, step)
        if step % every == 0:
            history.append(values.distance.double())
        if tick is not None:
            tick(step + 1, run.loss)
        if clock.over() and step + 1 < phase.steps:
            stopped = True
            break
    # What the last step led to is still to be judged.
    images = candidates.images().detach()
    last = matcher.evaluate(images, labels, targets)
    run.keep(images, last.distance.double(), None)
    broken = tuple((run.setbacks > _MOST_RESTARTS).tolist())
    return AdamResult(
        run.best,
        run.loss,
        run.steps,
        tuple(run.saved),
        stopped,
        broken,
        torch.stack(history),
    )


class _Run:
    """Optimiser state and best results of all attacks."""

    def __init__(self, candidates: Candidates) -> None:
        self.count = candidates.attacks
        self.parameters = candidates.parameters
        device = self.parameters[0].device
        self.saved = [p.detach().clone() for p in self.parameters]
        self.first = [torch.zeros_like(p) for p in self.saved]
        self.second = [torch.zeros_like(p) for p in self.saved]
        self.best = torch.empty(0)
        self.loss = torch.full(
            (self.count,), math.inf, dtype=torch.float64, device=device
        )
        self.steps = torch.zeros(self.count, dtype=torch.long, device=device)
        self.age = torch.zeros(self.count, dtype=torch.long, device=device)
        self.scale = torch.ones(self.count, dtype=torch.float64, device=device)
        self.setbacks = torch.zeros(self.count, dtype=torch.long, device=device)

    def update(
        self,
        images: Tensor,
        loss: Tensor,
        gradients: tuple[Tensor | None, ...],
        phase: Phase,
        step: int,
    ) -> None:
        rows = [
            torch.zeros_like(p) if g is None else g
            for p, g in zip(self.saved, gradients, strict=True)
        ]
        if phase.l2:
            rows = [
                g + 2 * phase.l2 * p.detach()
                for g, p in zip(rows, self.parameters, strict=True)
            ]
        fine = torch.isfinite(loss)
        for g in rows:
            fine = fine & torch.isfinite(g).reshape(self.count, -1).all(1)
        self.keep(images, loss, fine)
        alive = self.setbacks <= _MOST_RESTARTS
        self.setbacks += (~fine & alive).long()
        self.scale = torch.where(fine, self.scale, self.scale * _SMALLER)
        self.age = torch.where(fine, self.age + 1, torch.zeros_like(self.age))
        self.steps += (fine & alive).long()
        moving = fine & alive
        rate = phase.rate(step) * self.scale
        correct = [1 - b ** self.age.clamp(min=1).double() for b in _BETAS]
        # On a GPU a look costs more than what it saves.
        whole = moving.device.type == "cpu" and bool(moving.all())
        with torch.no_grad():
            for i, g in enumerate(rows):
                some = None if whole else moving
                self._move(i, g.sign() if phase.signed else g, some, rate, correct)

    def _move(
        self,
        i: int,
        g: Tensor,
        moving: Tensor | None,
        rate: Tensor,
        correct: list[Tensor],
    ) -> None:
        p, m, v = self.parameters[i], self.first[i], self.second[i]
        go = None if moving is None else self._rows(moving, p)
        if go is None:
            m.lerp_(g, 1 - _BETAS[0])
            v.lerp_(g.square(), 1 - _BETAS[1])
        else:
            # Products with zero would keep NaN.
            zero = torch.zeros_like(g)
            g = torch.where(go, g, zero)
            m.copy_(torch.where(go, torch.lerp(m, g, 1 - _BETAS[0]), zero))
            v.copy_(torch.where(go, torch.lerp(v, g.square(), 1 - _BETAS[1]), zero))
        length = self._rows(rate / correct[0], p).to(p.dtype)
        size = (v / self._rows(correct[1], p).to(p.dtype)).sqrt_().add_(_EPSILON)
        moved = p - length * m / size
        p.copy_(moved if go is None else torch.where(go, moved, self.saved[i]))

    def keep(self, images: Tensor, loss: Tensor, fine: Tensor | None) -> None:
        """Notes images and parameters of attacks that are better than ever."""
        finite = torch.isfinite(images).flatten(1).all(1)
        better = (loss < self.loss) & finite
        if fine is not None:
            better = better & fine
        if len(self.best) == 0:
            self.best = torch.where(
                self._rows(finite, images), images, torch.zeros_like(images)
            )
        if better.device.type == "cpu" and not bool(better.any()):
            return
        self.loss = torch.where(better, loss, self.loss)
        self.best = torch.where(self._rows(better, images), images, self.best)
        for kept, p in zip(self.saved, self.parameters, strict=True):
            kept.copy_(torch.where(self._rows(better, p), p.detach(), kept))

    def _rows(self, values: Tensor, like: Tensor) -> Tensor:
        each = values.repeat_interleave(len(like) // self.count)
        return each.view(-1, *[1] * (like.ndim - 1))
