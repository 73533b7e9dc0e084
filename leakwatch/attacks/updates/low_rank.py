"""Linear layers on the segment from w_0 to w_T that see few vectors of each attack.

With D = w_0 − w_T, ŵ = w_0 − (1 − α) D, so ŵ·a is one product with a w_0 that all
attacks share and one with D. D is also what the gradient g is compared with, and D·a
and Dᵀδ are all of it that this takes. g = Σ δ aᵀ over few vectors acts through their
Gram matrices. So neither ŵ nor g nor a cotangent of g is ever formed, and the
derivative in α is made of products that are there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

__all__ = ["ThinNode"]


@final
class ThinNode:
    """A linear layer at ŵ = w_0 − (1 − α) D for attacks in rows, called once.

    Args:
        w: of w_0, ``(out, in)``.
        b: of w_0, ``None`` for none.
        moved: D of the weight, ``(clients, out, in)``; attacks stand client by client,
            equally many for each.
        shifted: D of the bias, ``None`` where it is not shared.
        gap: 1 − α, ``(attacks,)``.

    Attributes:
        slope: the derivative of ⟨c, g⟩ in α after the second pass, ``(attacks,)``.
    """

    def __init__(
        self,
        w: Tensor,
        b: Tensor | None,
        moved: Tensor,
        shifted: Tensor | None,
        gap: Tensor,
    ) -> None:
        self._w, self._b = w, b
        self._moved, self._shifted = moved, shifted
        self._gap = gap[:, None, None]
        self.slope: Tensor | float = 0.0
        self._learns = False
        self._second = False
        self._a = self._delta = self._forth = w
        # Dᵀδ, which nobody asks for where the input is the image.
        self._back: Tensor | None = None
        self._u = self._v = self._gap

    def fits(self, a: Tensor) -> bool:
        """Whether Gram matrices are less work than the weights' gradient.

        Args:
            a: its input.
        """
        vectors = a.numel() // a.shape[-1] // len(self._gap)
        return vectors * sum(self._w.shape) <= self._w.numel()

    def __call__(self, a: Tensor) -> tuple[Tensor, Tensor]:
        """ŵ a + b, twice differentiable in a, and a."""
        return _thin_output(a, self), a.detach()

    def compared(self, delta: Tensor) -> tuple[Tensor, Tensor]:
        """⟨g, D⟩ and ‖g‖² of this layer, float64.

        Args:
            delta: what its output received, δ.
        """
        self._delta = delta.detach()
        a, d = (self._rows(t).double() for t in (self._a, self._delta))
        self._inputs = torch.bmm(a, a.transpose(1, 2))
        if self._shifted is not None:
            self._inputs += 1.0  # the bias sees a one
        self._outputs = torch.bmm(d, d.transpose(1, 2))
        along = (self._rows(self._forth).double() * d).sum((1, 2))
        return along, (self._inputs * self._outputs).sum((1, 2))

    def receive(
        self, u: Tensor, v: Tensor, learns: bool, wanted: bool
    ) -> tuple[Tensor, Tensor | None]:
        """What δ and a receive from ⟨c, g⟩ with c = u D + v g.

        Args:
            u: ``(attacks,)``.
            v: ``(attacks,)``.
            learns: whether the derivative in α is wanted.
            wanted: whether that of a is.

        Returns:
            c·a and cᵀδ; the latter ``None`` where it is added in the second pass.
        """
        self._second, self._learns = True, learns
        self._u, self._v = u[:, None, None], v[:, None, None]
        d = self._rows(self._delta)
        # v times δ: where gradients vanish, v alone is too large to be multiplied.
        to_delta = torch.bmm(self._inputs.to(d), d * self._v)
        to_delta.addcmul_(self._rows(self._forth), self._u)
        to_input = None
        if wanted and self._back is not None:
            to_input = self._own().addcmul_(self._rows(self._back), self._u)
            to_input = to_input.view(self._a.shape)
        return to_delta.view(self._delta.shape), to_input

    def apply(self, a: Tensor) -> Tensor:
        """ŵ·a + b."""
        self._a = a.detach()
        self._forth = self._product(self._a, self._shifted)
        out = F.linear(self._a, self._w, self._b)
        self._view(out).addcmul_(self._rows(self._forth), self._gap, value=-1)
        return out

    def adjoint(self, delta: Tensor) -> Tensor:
        """ŵᵀδ; in the second pass, for its derivative δ', that and what is missing."""
        out = delta.matmul(self._w)
        rows = self._view(out)
        if not self._second:
            self._back = self._transposed(delta)
            rows.addcmul_(self._rows(self._back), self._gap, value=-1)
            return out
        if self._learns:
            self.slope = self.slope + self._sum(self._forth, delta)
        if self._back is not None:
            rows.addcmul_(self._rows(self._transposed(delta)), self._gap, value=-1)
            return out
        # Both sums go through D at once.
        own = self._rows(self._delta) * self._u
        own.addcmul_(self._rows(delta), self._gap, value=-1)
        rows += self._rows(self._transposed(own.view(delta.shape)))
        rows += self._own()
        return out

    def tangent(self, a: Tensor) -> Tensor:
        """ŵ·a' for the derivative a' of the input."""
        moved = self._product(a, None)
        if self._learns:
            self.slope = self.slope + self._sum(moved, self._delta)
        out = F.linear(a, self._w)
        self._view(out).addcmul_(self._rows(moved), self._gap, value=-1)
        return out

    def _own(self) -> Tensor:
        """The part v gᵀδ of what a receives."""
        a = self._rows(self._a)
        return torch.bmm(self._outputs.to(a) * self._v, a)

    def _product(self, a: Tensor, b: Tensor | None) -> Tensor:
        rows = a.reshape(len(self._moved), -1, a.shape[-1])
        turned = self._moved.transpose(1, 2)
        if b is None:
            out = torch.bmm(rows, turned)
        else:
            out = torch.baddbmm(b[:, None], rows, turned)
        return out.view(*a.shape[:-1], -1)

    def _transposed(self, delta: Tensor) -> Tensor:
        rows = delta.reshape(len(self._moved), -1, delta.shape[-1])
        return torch.bmm(rows, self._moved).view(*delta.shape[:-1], -1)

    def _rows(self, t: Tensor) -> Tensor:
        return t.reshape(len(self._gap), -1, t.shape[-1])

    def _view(self, t: Tensor) -> Tensor:
        return t.view(len(self._gap), -1, t.shape[-1])

    def _sum(self, a: Tensor, b: Tensor) -> Tensor:
        return (self._rows(a) * self._rows(b)).sum((1, 2))


class _ThinOutput(Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, node: ThinNode) -> Tensor:
        ctx.node = node
        return node.apply(a)

    @staticmethod
    def backward(ctx: Any, back: Tensor) -> tuple[Tensor, None]:
        return _thin_adjoint(back, ctx.node), None


class _ThinAdjoint(Function):
    @staticmethod
    def forward(ctx: Any, delta: Tensor, node: ThinNode) -> Tensor:
        ctx.node = node
        return node.adjoint(delta)

    @staticmethod
    def backward(ctx: Any, back: Tensor) -> tuple[Tensor, None]:
        return ctx.node.tangent(back), None


_thin_output: Callable[[Tensor, ThinNode], Tensor] = _ThinOutput.apply
_thin_adjoint: Callable[[Tensor, ThinNode], Tensor] = _ThinAdjoint.apply
