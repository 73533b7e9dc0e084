"""Layers of networks in which every attack has weights of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd import Function

from leakwatch.derivatives.layers.update_products import Operator

__all__ = ["Node"]


@final
class Node:
    """A layer in a network of which every attack has weights of its own.

    In a backward pass through a derivative it can note what its weights receive, as a
    whole or along a direction.

    Args:
        operator: what it does.
        w: weights ``(attacks, …)``.
        b: biases, ``None`` for none.

    Attributes:
        weights: as given.
        attacks: how many.
        collects: whether what the weights receive is added up.
        direction: of weights and biases, along which it is added up instead.
        received: the sum for weights and biases, flat.
        slope: the sum along the direction.
    """

    def __init__(self, operator: Operator, w: Tensor, b: Tensor | None) -> None:
        self.operator = operator
        self.weights = operator.arranged(w)
        self._b = b
        self.attacks = len(w)
        self.collects = False
        self.direction: tuple[Tensor | None, Tensor | None] | None = None
        self.received: tuple[Tensor, Tensor | None] | None = None
        self.slope: Tensor | float = 0.0

    def __call__(self, a: Tensor) -> tuple[Tensor, Tensor]:
        """w·a + b, twice differentiable in a, and the rows of a."""
        rows = self.operator.rows(a.detach(), self.attacks)
        return _applied(a, self, rows), rows

    def plain(self, rows: Tensor, like: Tensor, with_bias: bool) -> Tensor:
        """The same without derivatives."""
        return self.operator.apply(
            self.weights, self._b if with_bias else None, rows, like
        )

    def adjoint(self, delta: Tensor, like: Tensor) -> Tensor:
        """wᵀδ."""
        return self.operator.adjoint(self.weights, delta, like)

    def note(self, rows: Tensor, like: Tensor, delta: Tensor, with_bias: bool) -> None:
        """What the weights receive through w·a when the output receives δ.

        Args:
            rows: of a.
            like: a, of which only shape and format are read.
            delta: δ.
            with_bias: whether the biases receive δ too.
        """
        if self.direction is not None:
            w, b = self.direction
            self.slope = self.slope + self._along(rows, like, delta, w, b, with_bias)
        if not self.collects:
            return
        biased = with_bias and self._b is not None
        weight, bias = self.operator.gradient(rows, delta, self.attacks, biased)
        if self.received is not None:
            before, shift = self.received
            weight = weight.add_(before)
            bias = shift if bias is None else bias if shift is None else bias + shift
        self.received = weight, bias

    def _along(
        self,
        rows: Tensor,
        like: Tensor,
        delta: Tensor,
        w: Tensor | None,
        b: Tensor | None,
        with_bias: bool,
    ) -> Tensor:
        if w is None:
            w = torch.zeros_like(self.weights)
        return self.operator.along(w, b if with_bias else None, rows, like, delta)


class _Applied(Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, node: Node, rows: Tensor) -> Tensor:
        ctx.node, ctx.like, ctx.rows = node, a.detach(), rows
        return _owned(node.plain(rows, a, True))

    @staticmethod
    def backward(ctx: Any, back: Tensor) -> tuple[Tensor, None, None]:
        ctx.node.note(ctx.rows, ctx.like, back.detach(), True)
        return _adjoint(back, ctx.node, ctx.like), None, None


class _Adjoint(Function):
    @staticmethod
    def forward(ctx: Any, delta: Tensor, node: Node, like: Tensor) -> Tensor:
        ctx.node, ctx.like, ctx.delta = node, like, delta.detach()
        return node.adjoint(delta, like)

    @staticmethod
    def backward(ctx: Any, back: Tensor) -> tuple[Tensor, None, None]:
        # ⟨back, wᵀδ⟩ = ⟨w·back, δ⟩: the same map, from the other side.
        rows = ctx.node.operator.rows(back.detach(), ctx.node.attacks)
        ctx.node.note(rows, ctx.like, ctx.delta, False)
        return ctx.node.plain(rows, ctx.like, False), None, None


_applied: Callable[[Tensor, Node, Tensor], Tensor] = _Applied.apply
_adjoint: Callable[[Tensor, Node, Tensor], Tensor] = _Adjoint.apply


def _owned(t: Tensor) -> Tensor:
    """The same memory as no view of anything, so that a network may write into it."""
    if not t._is_view():
        return t
    own = t.new_empty(0)
    own.set_(t.untyped_storage(), t.storage_offset(), t.shape, t.stride())
    return own
