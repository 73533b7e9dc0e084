"""L-BFGS with a line search for each attack, one evaluation of all at a time."""

from __future__ import annotations

import math
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

__all__ = ["LBFGS"]

# Conditions of sufficient decrease and of curvature (Nocedal & Wright, Section 3.1).
_ARMIJO = 1e-4
_CURVATURE = 0.9
# Evaluations of one line search, after which the direction is given up.
_MOST_TRIALS = 25


@final
class LBFGS:
    """Limited-memory BFGS, batched over independent attacks.

    Nocedal & Wright, "Numerical Optimization", Algorithm 7.4, with a weak Wolfe line
    search by bracketing and bisection (Lewis & Overton, Math. Programming 2013), which
    needs no more than values and slopes and survives points where the objective is NaN.
    Attacks are at different places of their line searches: each step evaluates one
    trial point of each, so a step is an evaluation, not an accepted iteration.

    Args:
        like: the points of all attacks.
        history: pairs of steps and gradient changes that are kept.
    """

    survives = True

    def __init__(self, like: Float[Tensor, "attacks n"], history: int = 20) -> None:
        attacks, n = like.shape
        self._size = history
        self._s = like.new_zeros(attacks, history, n)
        self._y = like.new_zeros(attacks, history, n)
        self._rho = like.new_zeros(attacks, history)
        self._kept = torch.zeros(attacks, dtype=torch.long, device=like.device)
        self._next = torch.zeros_like(self._kept)
        self._most = 0
        # The point that each line search starts from, and the search itself.
        self._point = torch.zeros_like(like)
        self._gradient = torch.zeros_like(like)
        self._direction = torch.zeros_like(like)
        self._value = like.new_zeros(attacks)
        self._slope = like.new_zeros(attacks)
        self._length = like.new_ones(attacks)
        self._low = like.new_zeros(attacks)
        self._high = like.new_full((attacks,), math.inf)
        self._trials = torch.zeros_like(self._kept)
        self._begun = torch.zeros(attacks, dtype=torch.bool, device=like.device)
        self._stuck = torch.zeros_like(self._begun)

    def step(
        self, z: Tensor, value: Tensor, gradient: Tensor, lr: Tensor
    ) -> Float[Tensor, "attacks n"]:
        """The next trial points; ``lr`` is the first length tried along a direction.

        See :class:`leakwatch.attacks.optimizers.first_order.Optimizer`.
        """
        finite = torch.isfinite(value) & torch.isfinite(gradient).all(1)
        slope = (gradient * self._direction).sum(1)
        enough = self._value + _ARMIJO * self._length * self._slope
        lower = finite & (value <= enough)
        flat = slope >= _CURVATURE * self._slope
        accepted = self._begun & lower & flat
        searching = self._begun & ~accepted
        too_far = searching & ~lower
        too_near = searching & lower
        self._high = torch.where(too_far, self._length, self._high)
        self._low = torch.where(too_near, self._length, self._low)
        self._trials += searching
        tired = searching & (self._trials >= _MOST_TRIALS)
        # A lower point is progress even where the slope is not flat yet.
        accepted = accepted | (tired & lower)
        given_up = tired & ~lower
        self._remember(accepted, z, gradient)
        # Along the negative gradient itself nothing else can be tried.
        self._stuck |= given_up & (self._kept == 0)
        self._kept = torch.where(given_up, 0, self._kept)
        new = ~self._begun | accepted
        self._point = torch.where(new[:, None], z, self._point)
        self._value = torch.where(new, value, self._value)
        self._gradient = torch.where(new[:, None], gradient, self._gradient)
        self._begun |= new
        turn = new | given_up
        # On a GPU a look costs more than what it saves.
        if turn.device.type != "cpu" or bool(turn.any()):
            self._turn(turn, lr)
        bisect = torch.isfinite(self._high)
        middle = torch.where(bisect, (self._low + self._high) / 2, 2 * self._low)
        self._length = torch.where(searching & ~turn, middle, self._length)
        return self._point + self._length[:, None] * self._direction

    def stalled(self) -> Bool[Tensor, " attacks"] | None:
        """Attacks whose negative gradient leads nowhere lower."""
        return self._stuck

    def select(self, rows: Int[Tensor, " some"]) -> None:
        """See :class:`leakwatch.attacks.optimizers.first_order.Optimizer`."""
        for name, t in vars(self).items():
            if isinstance(t, Tensor):
                setattr(self, name, t[rows])

    def reset(self, rows: Bool[Tensor, " attacks"]) -> None:
        """See :class:`leakwatch.attacks.optimizers.first_order.Optimizer`."""
        self._begun &= ~rows
        self._stuck &= ~rows
        self._kept = torch.where(rows, 0, self._kept)

    def _remember(self, rows: Tensor, z: Tensor, gradient: Tensor) -> None:
        s, y = z - self._point, gradient - self._gradient
        curvature = (s * y).sum(1)
        # Weak Wolfe points have positive curvature; lower ones need not.
        usable = rows & (curvature > 1e-12 * s.norm(dim=1) * y.norm(dim=1))
        every, at = torch.arange(len(z), device=z.device), self._next
        for kept, new in ((self._s, s), (self._y, y)):
            kept[every, at] = torch.where(usable[:, None], new, kept[every, at])
        self._rho[every, at] = torch.where(usable, 1 / curvature, self._rho[every, at])
        self._next = torch.where(usable, (at + 1) % self._size, at)
        more = (self._kept + 1).clamp_max(self._size)
        self._kept = torch.where(usable, more, self._kept)
        self._most = min(self._most + 1, self._size)

    def _turn(self, rows: Tensor, lr: Tensor) -> None:
        direction = -self._two_loops()
        slope = (direction * self._gradient).sum(1)
        downhill = torch.isfinite(slope) & (slope < 0)
        steepest = rows & ~downhill
        self._kept = torch.where(steepest, 0, self._kept)
        direction = torch.where(downhill[:, None], direction, -self._gradient)
        slope = torch.where(downhill, slope, -self._gradient.square().sum(1))
        size = self._gradient.abs().sum(1).clamp_min(torch.finfo(lr.dtype).tiny)
        # The first length along a gradient, as torch.optim.LBFGS chooses it.
        first = torch.where(self._kept == 0, (1 / size).clamp_max(1.0), 1.0) * lr
        self._direction = torch.where(rows[:, None], direction, self._direction)
        self._slope = torch.where(rows, slope, self._slope)
        self._length = torch.where(rows, first, self._length)
        self._low = torch.where(rows, 0.0, self._low)
        self._high = torch.where(rows, math.inf, self._high)
        self._trials = torch.where(rows, 0, self._trials)

    def _two_loops(self) -> Tensor:
        """The inverse Hessian's approximation times the gradient."""
        q = self._gradient.clone()
        # On a GPU as many as there can be: those that are not there count for nothing.
        on_cpu = q.device.type == "cpu"
        most = int(self._kept.max()) if on_cpu else self._most
        every = torch.arange(len(q), device=q.device)
        pairs = []
        for i in range(1, most + 1):
            at = (self._next - i) % self._size
            there = self._kept >= i
            s, y = self._s[every, at], self._y[every, at]
            alpha = self._rho[every, at] * (s * q).sum(1)
            alpha = torch.where(there, alpha, 0.0)
            q.sub_(alpha[:, None] * y)
            pairs.append((s, y, alpha, there, at))
        if pairs:
            s, y, _, there, at = pairs[0]
            ratio = 1 / (self._rho[every, at] * y.square().sum(1))
            q.mul_(torch.where(there, ratio, 1.0)[:, None])
        for s, y, alpha, there, at in reversed(pairs):
            beta = self._rho[every, at] * (y * q).sum(1)
            q.add_(torch.where(there, alpha - beta, 0.0)[:, None] * s)
        return q
