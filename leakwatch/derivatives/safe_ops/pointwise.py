"""Activations and pools whose second derivatives take no detours.

Torch's derivative of a ReLU's derivative has a part in the output, which is zero
everywhere: it is formed, filled and added for each of them, and averages are spread
by a kernel that is slower than copying. What is large in a network's first layers, such
passes cost as much as its convolutions do. Values and derivatives are Torch's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

__all__ = ["Lean"]

_aten = torch.ops.aten


@final
class Lean(TorchFunctionMode):
    """Replaces ``relu`` and ``avg_pool2d`` by the same with leaner derivatives.

    Example:
        >>> x = torch.tensor([-1.0, 2.0], requires_grad=True)
        >>> with Lean():
        ...     y = torch.nn.functional.relu(x) ** 2
        >>> (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        >>> torch.autograd.grad(slope.sum(), x)[0]
        tensor([0., 2.])
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Calls ``func``, or what stands for it."""
        return _LEAN.get(func, func)(*args, **(kwargs or {}))


class _Relu(Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        out = torch.relu(a)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, back: Tensor) -> Tensor:
        (out,) = ctx.saved_tensors
        return _masked(back, out.detach())


class _Masked(Function):
    @staticmethod
    def forward(ctx: Any, back: Tensor, out: Tensor) -> Tensor:
        ctx.save_for_backward(out)
        return _where_positive(back, out)

    @staticmethod
    def backward(ctx: Any, back: Tensor) -> tuple[Tensor, None]:
        (out,) = ctx.saved_tensors
        return _where_positive(back, out), None


class _Pooled(Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, sizes: tuple[Any, ...]) -> Tensor:
        ctx.like, ctx.sizes = a.detach(), sizes
        out: Tensor = _aten.avg_pool2d(a, *sizes)
        return out

    @staticmethod
    def backward(ctx: Any, back: Tensor) -> tuple[Tensor, None]:
        return _spread(back, ctx.like, ctx.sizes), None


class _Spread(Function):
    @staticmethod
    def forward(ctx: Any, back: Tensor, like: Tensor, sizes: tuple[Any, ...]) -> Tensor:
        ctx.sizes = sizes
        # Mixed memory formats make everything that follows slow.
        channels_last = like.is_contiguous(memory_format=torch.channels_last)
        if channels_last:
            back = back.contiguous(memory_format=torch.channels_last)
        kernel, stride = sizes[:2]
        apart = all(k == s for k, s in zip(kernel, stride, strict=True))
        # Other factors might be rounded to a neighbour.
        exact = all(k & (k - 1) == 0 for k in kernel)
        whole = all(k * n == m for k, n, m in _lengths(kernel, back, like))
        if apart and exact and whole and sizes[2] == [0, 0] and sizes[5] is None:
            share = back / (kernel[0] * kernel[1])
            out: Tensor = _aten.upsample_nearest2d(share, like.shape[2:])
            return out
        out = _aten.avg_pool2d_backward(back, like, *sizes)
        return out

    @staticmethod
    def backward(ctx: Any, back: Tensor) -> tuple[Tensor, None, None]:
        return _aten.avg_pool2d(back, *ctx.sizes), None, None


_masked: Callable[[Tensor, Tensor], Tensor] = _Masked.apply
_spread: Callable[[Tensor, Tensor, tuple[Any, ...]], Tensor] = _Spread.apply


def _where_positive(back: Tensor, out: Tensor) -> Tensor:
    if back.stride() != out.stride():
        back = torch.empty_like(out).copy_(back)
    masked: Tensor = _aten.threshold_backward(back, out, 0)
    return masked


def _lengths(
    kernel: list[int], small: Tensor, large: Tensor
) -> list[tuple[int, int, int]]:
    return list(zip(kernel, small.shape[2:], large.shape[2:], strict=True))


def _relu(input: Tensor, inplace: bool = False) -> Tensor:
    if inplace or not input.requires_grad:
        return F.relu(input, inplace)
    out: Tensor = _Relu.apply(input)
    return out


def _avg_pool2d(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    stride = kernel_size if stride is None or stride == () else stride
    kernel, step, pad = (_pair(t) for t in (kernel_size, stride, padding))
    sizes = kernel, step, pad, ceil_mode, count_include_pad, divisor_override
    if input.ndim != 4 or not input.requires_grad:
        plain: Tensor = _aten.avg_pool2d(input, *sizes)
        return plain
    out: Tensor = _Pooled.apply(input, sizes)
    return out


def _pair(t: Any) -> list[int]:
    numbers = [t] if isinstance(t, int) else list(t)
    return numbers * 2 if len(numbers) == 1 else numbers


_LEAN: dict[Any, Callable[..., Tensor]] = {
    F.relu: _relu,
    torch.relu: _relu,
    Tensor.relu: _relu,
    F.avg_pool2d: _avg_pool2d,
}
