"""A convolution with constant weights, any number of times differentiable in its input.

Autograd's second derivative of a convolution also forms what the weight receives, which
nobody asks for here, by a convolution whose kernel is as large as the image.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

__all__ = ["ConstantConvolution"]


@final
@dataclass(frozen=True, eq=False)
class ConstantConvolution:
    """a ↦ W ∗ a + b for images a, ``(n, channels, height, width)``.

    Attributes:
        weight: W, ``(out, in / groups, height, width)``, constant.
        bias: b, ``(out,)``, constant, or ``None``.
        stride: as of ``torch.nn.Conv2d``.
        padding: as of ``torch.nn.Conv2d``, zeros.
        dilation: as of ``torch.nn.Conv2d``.
        groups: as of ``torch.nn.Conv2d``.

    Example:
        >>> import torch
        >>> square = ConstantConvolution(torch.ones(1, 1, 2, 2), None)
        >>> x = torch.ones(1, 1, 2, 2, requires_grad=True)
        >>> (slope,) = torch.autograd.grad(square(x) ** 2, x, create_graph=True)
        >>> torch.autograd.grad(slope.sum(), x)[0].flatten().tolist()
        [8.0, 8.0, 8.0, 8.0]
    """

    weight: Tensor
    bias: Tensor | None
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1

    def __call__(self, a: Tensor) -> Tensor:
        """The outputs, ``(n, out, rows, columns)``."""
        return _forward(a, self)

    def plain(self, a: Tensor) -> Tensor:
        """The same, not differentiable."""
        return F.conv2d(
            a,
            self.weight,
            self.bias,
            self.stride,
            self.padding,
            self.dilation,
            self.groups,
        )

    def adjoint(self, delta: Tensor, a: Tensor) -> Tensor:
        """Wᵀδ, of the shape and memory format of a, whose numbers are not read."""
        image: Tensor = torch.ops.aten.convolution_backward(
            delta,
            a,
            self.weight,
            None,
            self.stride,
            self.padding,
            self.dilation,
            False,
            (0, 0),
            self.groups,
            (True, False, False),
        )[0]
        return image


class _Forward(Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, convolution: ConstantConvolution) -> Tensor:
        ctx.convolution, ctx.like = convolution, a.detach()
        return convolution.plain(a)

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor, None]:
        return _adjoint(delta, ctx.convolution, ctx.like), None


class _Adjoint(Function):
    @staticmethod
    def forward(
        ctx: Any, delta: Tensor, convolution: ConstantConvolution, like: Tensor
    ) -> Tensor:
        ctx.convolution = convolution
        return convolution.adjoint(delta, like)

    @staticmethod
    def backward(ctx: Any, back: Tensor) -> tuple[Tensor, None, None]:
        linear = replace(ctx.convolution, bias=None)
        return _forward(back, linear), None, None


_forward: Callable[[Tensor, ConstantConvolution], Tensor] = _Forward.apply
_adjoint: Callable[[Tensor, ConstantConvolution, Tensor], Tensor] = _Adjoint.apply
