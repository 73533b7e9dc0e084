"""g, J v and Jᵀ u by every way of differentiating, compared on one sample."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.func import vmap

from leakwatch.derivatives.autodiff import (
    LossFunction,
    Product,
    gradient,
    gradient_by_graph,
    graph,
    pulled,
    pulled_back,
    pulled_by_graph,
    pulled_by_reverse,
    pushed,
    pushed_by_graph,
    pushed_by_reverse,
)
from leakwatch.derivatives.runtime import SampleLoss, Weights
from leakwatch.derivatives.verification.agreement import Agreement, agreement
from leakwatch.derivatives.verification.failures import Failure, attempt, first_line
from leakwatch.derivatives.verification.rounding import Rounding, normal, scale
from leakwatch.status import OK, Status

__all__ = [
    "SMALL_STEP",
    "Comparison",
    "difference",
    "hidden_dependence",
    "in_general_position",
    "near",
    "shown",
    "shows_all",
]

_Gradient: TypeAlias = Callable[[LossFunction, Weights, Tensor, Tensor, Tensor], Tensor]

# Relative steps of the finite difference. At the first, few ReLUs of a network cross
# their kink and float64 leaves seven digits; the others are for larger networks and
# for those with a rougher arithmetic of their own. In float32 only the last two show
# anything.
_STEPS = (1e-7, 1e-9, 1e-5, 1e-3, 1e-2)
# Where there is one step for all samples: ten times fewer kinks, and five digits.
SMALL_STEP = 1e-8
# Share of a difference that derivatives may miss: what kinks and float32 leave, and
# what float64 does. At little noise a share of 1e-3 can be half of what is predicted.
_HIDDEN, _SHARP = 2e-2, 1e-4
# Where a difference stands for the derivative itself: what it is off by is taken for
# rounding then, and makes a score doubtful where it is more.
_NEAR = 1e-5
_HIDES = (
    "the gradient changes with the input in ways that its derivatives do not show: "
    "part of the forward is constant to autograd (detach, no_grad, .data, rounding, or "
    "a custom autograd.Function whose backward is not differentiable), and that part "
    "is left out"
)
_UNSETTLED = (
    "no finite difference of its gradient settles (every step gives another slope), so "
    "whether part of its forward is constant to autograd could not be found out"
)
_UNSEEN = (
    "its arithmetic is too rough to find out whether part of its forward is constant "
    "to autograd"
)
# Units in the last place of a gradient that its difference may be off by, and the share
# of a difference beyond which it shows nothing.
_UNITS, _BLURRED = 450, 0.3
# A factor on the loss that a gradient has to follow, a power of two.
_FACTOR = 2.0**20
_UNEVEN = (
    "its gradient is not proportional to the loss: a backward hook or an "
    "autograd.Function clamps, normalises or adds to gradients inside of it. "
    "Derivatives are taken by further backward passes, in which it does that, too"
)
# Steps that what has no derivative has to bear, as shares of the range, and the share
# of a gradient that rounding can't have moved.
_COARSE = {"level": 1 / 255, "tenth of the range": 0.1}
_MOVED = 1e-4
# How often inputs that a step switches on are left out of it.
_TRIES = 4


class Comparison:
    """g, J v and Jᵀ u of two samples at one v and u, by every way."""

    def __init__(
        self, loss: SampleLoss, at: Weights, xs: Tensor, ys: Tensor, rounding: Rounding
    ) -> None:
        self.loss, self.at, self.xs, self.ys = loss.sample, at, xs, ys
        self.rounding = rounding
        self.v, self.u = normal(xs, xs.shape[1:]), normal(xs, (at.size,))
        norms = torch.stack([self._norm(x, y) for x, y in zip(xs, ys, strict=True)])
        self.conclusive = bool(((norms > 0) & torch.isfinite(norms)).all())
        # A confident sample's derivatives would leave the range of float32.
        safe = torch.where(norms > 0, norms.clamp_min(1e-30), torch.ones_like(norms))
        # A power of two, which rounds nothing.
        self.w = torch.exp2(-safe.log2().round()).to(xs)

    def reference(self) -> tuple[Tensor, Tensor]:
        """The first sample's g and Jᵀ u by double backward."""
        sample = graph(self.loss, self.at, self.xs[0], self.ys[0], self.w[0])
        return sample[1].detach(), pulled_back(sample, self.u).reshape(-1)

    def by_loop(self) -> Tensor:
        """The first sample's J v by double backward."""
        x, y, w = self.xs[0], self.ys[0], self.w[0]
        return pushed_by_graph(self.loss, self.at, x, y, w, self.v)

    def batched(self, product: Callable[..., Tensor], *direction: Tensor) -> Tensor:
        """The first sample's result, evaluated together with the second."""

        def one(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
            return product(self.loss, self.at, x, y, w, *direction)

        out: Tensor = vmap(one)(self.xs, self.ys, self.w)
        return out[0].detach()

    def ways(
        self, slow: tuple[Tensor, Tensor] | None
    ) -> tuple[Product, Product, Failure | None]:
        """The cheapest J v and Jᵀ u that agree with the loop, or why there is none.

        Of J v the agreement is that of ⟨u, J v⟩ with ⟨Jᵀ u, v⟩: by the loop it would
        cost more than everything else together.
        """
        failures: list[Failure] = []

        def image(product: Callable[..., Tensor], *direction: Tensor) -> Tensor | None:
            run = functools.partial(self.batched, product, *direction)
            result: Tensor | None
            result, error = attempt(run)
            if error is not None:
                detail = f" ({first_line(error)})"
                failures.append(Failure(run, "can't transform it", detail))
            return result

        def differ(product: Callable[..., Tensor], *direction: Tensor) -> None:
            run = functools.partial(self.batched, product, *direction)
            text = "and double backward differ, and the latter is used"
            failures.append(Failure(run, text))

        g = image(gradient)
        if g is not None and slow is not None and not self.agree(g, slow[0], self._g):
            differ(gradient)
        if failures:
            return pushed, pulled, failures[0]
        for pull in (pulled, pulled_by_reverse):
            back = image(pull, self.u)
            if back is None:
                continue
            if slow is not None and not self.agree(back, slow[1], self._back):
                differ(pull, self.u)
                continue
            for push in (pushed, pushed_by_reverse):
                there = image(push, self.v)
                if there is None:
                    continue
                if self.adjoint(there, back):
                    return push, pull, None
                differ(push, self.v)
        return pushed, pulled, failures[0]

    def agree(
        self, a: Tensor, b: Tensor, result: Callable[[Weights, Tensor], Tensor]
    ) -> bool:
        """Equal but for rounding."""
        compared = agreement(a[None], b[None], "derivative", dtype=self.xs.dtype)
        return self._explained(compared, result)

    def adjoint(self, there: Tensor, back: Tensor) -> bool:
        """Whether ⟨u, J v⟩ = ⟨Jᵀ u, v⟩ but for rounding."""
        there, back = there.double(), back.double().reshape(-1)
        compared = agreement(
            (there @ self.u.double())[None],
            (back @ self.v.double().reshape(-1))[None],
            "derivative",
            dtype=self.xs.dtype,
            size=torch.maximum(there.norm(), back.norm())[None],
        )
        return self._explained(compared, self._back)

    def _explained(
        self, compared: Agreement, result: Callable[[Weights, Tensor], Tensor]
    ) -> bool:
        if compared.holds:
            return True
        by_rounding, _ = attempt(
            lambda: self.rounding.explains(compared.gap, result, self.at, self.xs[0])
        )
        return bool(by_rounding)

    def _g(self, at: Weights, x: Tensor) -> Tensor:
        return gradient_by_graph(self.loss, at, x, self.ys[0], self.w[0])

    def _back(self, at: Weights, x: Tensor) -> Tensor:
        return pulled_by_graph(self.loss, at, x, self.ys[0], self.w[0], self.u)

    def hidden_dependence(
        self, path: Literal["vmap", "loop"], push: Product, eps: float
    ) -> tuple[Status, bool]:
        """:func:`hidden_dependence` of the first sample.

        Args:
            path: the way of differentiating.
            push: its J v.
            eps: machine precision of the roughest arithmetic in the forward.
        """
        x, y, w = self.xs[0], self.ys[0], self.w[0]
        return hidden_dependence(self.loss, self.at, x, y, w, path, push, eps)

    def without_derivative(self, back: Tensor) -> Status:
        """Looks at inputs that no derivative sees for whether coarse steps see them.

        A kink is no reason for doubt: an input that only a switched-off unit or the
        loser of a maximum sees has a derivative where a step has switched it on. One
        that is rounded has none anywhere.

        Args:
            back: Jᵀ u of the first sample.

        Returns:
            ``ok``, or ``failed`` where some inputs have no derivative and yet count.
        """
        x, y, w = self.xs[0], self.ys[0], self.w[0]
        flat = (back == 0).view_as(x)
        if not bool(flat.any()) or bool(flat.all()):  # all: see GradientJacobian.doubts
            return OK
        common = self.loss, self.at
        here = gradient_by_graph(*common, x, y, w)
        size = _MOVED * here.norm()
        span = float(x.max() - x.min())
        ways = normal(x, x.shape, seed=2).sign()
        for (name, share), side in itertools.product(_COARSE.items(), (1, -1)):
            left = flat
            for _ in range(_TRIES):
                there = x + side * share * span * ways * left
                moved = gradient_by_graph(*common, there, y, w) - here
                if not bool(moved.norm() > size):
                    break
                seen = pulled_by_graph(*common, there, y, w, self.u).view_as(x) != 0
                if not bool((seen & left).any()):
                    return Status(
                        "failed",
                        f"derivatives of the gradient in {int(left.sum())} of "
                        f"{x.numel()} input elements are zero, but moving these by a "
                        f"{name} changes it by {float(moved.norm() / here.norm()):.0e} "
                        f"of its size: that part of the input is rounded, quantised or "
                        f"compared with a threshold, and is left out",
                    )
                left = left & ~seen
        return OK

    def _norm(self, x: Tensor, y: Tensor) -> Tensor:
        one = x.new_ones(())
        common = self.loss, self.at, x, y, one
        g, _ = attempt(lambda: gradient_by_graph(*common))
        if g is None:
            g, _ = attempt(lambda: gradient(*common))
        if g is None:
            g = one * torch.nan
        norm: Tensor = torch.linalg.vector_norm(g, dtype=torch.float64)
        return norm


def hidden_dependence(
    loss: LossFunction,
    at: Weights,
    x: Tensor,
    y: Tensor,
    w: Tensor,
    path: Literal["vmap", "loop"],
    push: Product,
    eps: float,
) -> tuple[Status, bool]:
    """Compares J v with (g(x + εv) − g(x − εv))/2ε: nothing can hide from that.

    Args:
        loss: of one sample.
        at: the weights.
        x: the sample, in general position.
        y: its label.
        w: factor on its loss, about 1/‖g‖, a power of two.
        path: the way of differentiating.
        push: its J v.
        eps: machine precision of the roughest arithmetic in the forward.

    Returns:
        ``ok``; ``failed`` where part of the dependence is hidden; ``estimated``
        where that could not be found out, ``not computed`` where no step can be
        told from rounding. And whether it is ``ok`` to what float64 can show.
    """
    v = scale(x) * normal(x, x.shape)
    loop = path == "loop"
    g = gradient_by_graph if loop else gradient
    exact = (pushed_by_graph if loop else push)(loss, at, x, y, w, v).detach()
    precise = eps <= torch.finfo(torch.float64).eps
    if precise:
        here, larger = (g(loss, at, x, y, w * k).detach() for k in (1, _FACTOR))
        if bool((larger / _FACTOR - here).norm() > _SHARP * here.norm()):
            return Status("failed", _UNEVEN), False
    share = _SHARP if precise else _HIDDEN
    near = settled = sharply = seen = False
    last = torch.full_like(exact, torch.nan)
    for step in _STEPS:
        off = _UNITS * eps / step
        if off > _BLURRED * max(1.0, float(exact.norm())):
            continue
        ahead, behind = (g(loss, at, x + s * v, y, w).detach() for s in (step, -step))
        change = (ahead - behind) / (2 * step)
        size, gap = torch.maximum(change.norm(), exact.norm()), (change - exact).norm()
        if bool(gap <= share * size + off):
            return OK, precise
        seen, near = True, near or bool(gap <= _HIDDEN * size + off)
        size, moved = torch.maximum(change.norm(), last.norm()), (change - last).norm()
        settled |= bool(moved <= _HIDDEN * size + off)
        sharply |= bool(moved <= share * size + off)
        last = change
    if not bool(torch.isfinite(exact).all()):
        return OK, False
    if not seen:
        return Status("not computed", _UNSEEN), False
    if near and not sharply:  # kinks
        return OK, False
    return Status(*("failed", _HIDES) if settled else ("estimated", _UNSETTLED)), False


def difference(
    loss: LossFunction,
    at: Weights,
    x: Tensor,
    y: Tensor,
    w: Tensor,
    v: Tensor,
    step: Tensor,
    g: _Gradient = gradient,
) -> Tensor:
    """(g(x + εv) − g(x − εv))/2ε, in float64.

    Args:
        loss: of one sample.
        at: the weights.
        x: the sample.
        y: its label.
        w: factor on its loss, about 1/‖g‖, a power of two.
        v: a direction, standard normal.
        step: ε, :data:`SMALL_STEP` of the size of the input.
        g: the gradient.

    Returns:
        What J v would be if nothing were hidden.
    """
    ahead = g(loss, at, x + step * v, y, w)
    # A gradient that is not proportional to the loss shows, too.
    behind = g(loss, at, x - step * v, y, w * _FACTOR) / _FACTOR
    return (ahead - behind) / (2 * step)


def shown(change: Tensor, there: Tensor, step: Tensor) -> Tensor:
    """Whether differences are what derivatives say.

    Args:
        change: from :func:`difference`, ``(..., d_θ)``.
        there: J v, the same.
        step: ε of each, ``(...)``.

    Returns:
        ``(...)``: True, or False where kinks may be at fault, too.
    """
    # ‖g‖ is about 1, and so rounds to about its units.
    off = _UNITS * torch.finfo(change.dtype).eps / step
    gap, size = _gap(change, there)
    missed: Tensor = gap > _SHARP * size + off
    return ~missed


def near(change: Tensor, there: Tensor) -> Tensor:
    """Whether differences are so good that they could stand for J v, ``(...)``."""
    gap, size = _gap(change, there)
    close: Tensor = gap <= _NEAR * size
    return close


def _gap(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    gap, here, there = (
        torch.linalg.vector_norm(t, dim=-1, dtype=torch.float64) for t in (a - b, a, b)
    )
    return gap, torch.maximum(here, there)


def shows_all(
    loss: LossFunction,
    at: Weights,
    x: Tensor,
    y: Tensor,
    w: Tensor,
    v: Tensor,
    step: Tensor,
    there: Tensor,
    g: _Gradient = gradient,
) -> Tensor:
    """:func:`shown` of a :func:`difference`, with the arguments of both."""
    return shown(difference(loss, at, x, y, w, v, step, g), there, step)


def in_general_position(
    loss: SampleLoss,
    at: Weights,
    shaken: Weights,
    xs: Tensor,
    ys: Tensor,
    rounding: Rounding,
) -> Comparison:
    """A comparison at weights and inputs in general position, if these give a gradient.

    What is found holds for the rest of a training, so it must not rest on what is
    zero at its start: the weights of a last layer, biases, a blank background.
    """
    moved = xs + 0.01 * scale(xs) * normal(xs, xs.shape, seed=1)
    shared = {name: t.to(xs) for name, t in shaken.shared.items()}
    comparison = Comparison(loss, Weights(shared, at.fixed), moved, ys, rounding)
    return (
        comparison if comparison.conclusive else Comparison(loss, at, xs, ys, rounding)
    )
