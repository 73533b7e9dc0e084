"""g, J v and Jᵀ u by every way of differentiating, compared on one sample."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.func import vmap

from leakwatch.derivatives.autodiff import (
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

__all__ = ["Comparison", "in_general_position"]

# Relative steps of the finite difference. At the first, few ReLUs of a network cross
# their kink and float64 leaves seven digits; the others are for larger networks and
# for those with a rougher arithmetic of their own. In float32 only the last two show
# anything.
_STEPS = (1e-7, 1e-9, 1e-5, 1e-3, 1e-2)
_HIDDEN = 2e-2
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
        self.w = (1 / safe).to(xs)

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
    ) -> Status:
        """Compares J v with (g(x + εv) − g(x − εv))/2ε: nothing can hide from that.

        Args:
            path: the way of differentiating.
            push: its J v.
            eps: machine precision of the roughest arithmetic in the forward.

        Returns:
            ``ok``; ``failed`` where part of the dependence is hidden; ``estimated``
            where that could not be found out, ``not computed`` where no step can be
            told from rounding.
        """
        at, f, y, w = self.at, self.loss, self.ys[0], self.w[0]
        x = self.xs[0]
        v = scale(x) * self.v
        loop = path == "loop"
        g = gradient_by_graph if loop else gradient
        exact = (pushed_by_graph if loop else push)(f, at, x, y, w, v).detach()
        settled, seen, last = False, False, torch.full_like(self.u, torch.nan)
        for step in _STEPS:
            off = _UNITS * eps / step
            if off > _BLURRED * max(1.0, float(exact.norm())):
                continue
            ahead, behind = (g(f, at, x + s * v, y, w).detach() for s in (step, -step))
            change = (ahead - behind) / (2 * step)
            size = torch.maximum(change.norm(), exact.norm())
            if bool((change - exact).norm() <= _HIDDEN * size + off):
                return OK
            seen = True
            size = torch.maximum(change.norm(), last.norm())
            settled |= bool((change - last).norm() <= _HIDDEN * size + off)
            last = change
        if not bool(torch.isfinite(exact).all()):
            return OK
        if not seen:
            return Status("not computed", _UNSEEN)
        return Status("failed", _HIDES) if settled else Status("estimated", _UNSETTLED)

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
