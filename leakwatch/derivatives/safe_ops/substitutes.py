"""Operations of which Torch lacks a right second derivative, by others of equal value.

A few operations have a derivative but no derivative of that, or one that is wrong: a
network that uses one trains, and yet ∂(∇_θ ℓ)/∂x can't be formed. Inside `Substitutes`
each is computed from operations that can be differentiated any number of times. Values
are the same but for rounding, and at kinks so are the first derivatives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

__all__ = ["Substitutes", "substituting"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Substitutes(TorchFunctionMode):
    """Replaces some operations by others of equal value.

    ``hardsigmoid``, ``cdist``, ``pdist``, ``layer_norm`` and inference's
    ``batch_norm``.

    The gradient of an ``embedding`` is dense inside.

    Other modes that look at a network's calls belong inside of this one, so that they
    see what the network called.

    Example:
        >>> x = torch.tensor(1.0, requires_grad=True)
        >>> with Substitutes():
        ...     y = torch.nn.functional.hardsigmoid(x) ** 2
        >>> (slope,) = torch.autograd.grad(y, x, create_graph=True)
        >>> torch.autograd.grad(slope, x)[0]  # 2/6²
        tensor(0.0556)
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Calls ``func``, or what stands for it."""
        if func is torch.autograd.grad:
            # Checkpointed parts of a forward run again in there.
            with self:
                return _undispatched_grad(*args, **(kwargs or {}))
        return _SUBSTITUTES.get(func, func)(*args, **(kwargs or {}))


def substituting(call: Callable[_P, _R]) -> Callable[_P, _R]:
    """Makes a function run inside :class:`Substitutes`.

    Args:
        call: the function.

    Returns:
        The same, inside.
    """

    @functools.wraps(call)
    def inside(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with Substitutes():
            return call(*args, **kwargs)

    return inside


# The same code, which does not ask the mode that is on whether to run.
_undispatched_grad = FunctionType(
    torch.autograd.grad.__code__,
    {**torch.autograd.grad.__globals__, "has_torch_function": lambda _: False},
    argdefs=torch.autograd.grad.__defaults__,
)


def _hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    value = F.relu6(input + 3) / 6
    return input.copy_(value) if inplace else value


def _hardsigmoid_in_place(input: Tensor) -> Tensor:
    return _hardsigmoid(input, inplace=True)


def _cdist(
    x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: str | None = None
) -> Tensor:
    return _lengths(x1.unsqueeze(-2) - x2.unsqueeze(-3), p)


def _pdist(input: Tensor, p: float = 2.0) -> Tensor:
    i, j = torch.triu_indices(len(input), len(input), 1, device=input.device)
    return _lengths(input[i] - input[j], p)


def _lengths(gaps: Tensor, p: float) -> Tensor:
    """The p-norms of differences, with derivative 0 where a difference is 0."""
    if p in (0, 1, torch.inf):
        norms: Tensor = torch.linalg.vector_norm(gaps, p, dim=-1)
        return norms
    powers = gaps.square() if p == 2 else gaps.abs().pow(p)
    total = powers.sum(-1)
    # A point is at distance 0 from itself, where the root has no derivative.
    same = total == 0
    return torch.where(same, total, torch.where(same, 1, total).pow(1 / p))


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if training or running_mean is None or running_var is None:
        return F.batch_norm(
            input, running_mean, running_var, weight, bias, training, momentum, eps
        )
    # On the CPU, Torch 2.14 gives even the first derivative wrong for a batch of one
    # whose gradient arrives with strides (C, 1, …) while the input is contiguous, as
    # after flatten(2).transpose(1, 2): it takes both for channels-last.
    shape = (1, -1, *[1] * (input.ndim - 2))
    scale = (running_var + eps).rsqrt()
    if weight is not None:
        scale = scale * weight
    out = (input - running_mean.view(shape)) * scale.view(shape)
    return out if bias is None else out + bias.view(shape)


def _torch_batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    return _batch_norm(
        input, running_mean, running_var, weight, bias, training, momentum, eps
    )


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    # In Torch 2.14 a transform of its derivative leaves a part of the second one out.
    dims = tuple(range(-len(normalized_shape), 0))
    centred = input - input.mean(dims, keepdim=True)
    out = centred * (centred.square().mean(dims, keepdim=True) + eps).rsqrt()
    if weight is not None:
        out = out * weight
    return out if bias is None else out + bias


def _dense(function: Any, place: int) -> Callable[..., Tensor]:
    """The function without its argument ``sparse``, which stands at that place.

    The gradient is the same, and a sparse one has no derivative.
    """

    def dense(*args: Any, **kwargs: Any) -> Tensor:
        if len(args) > place:
            args = (*args[:place], False, *args[place + 1 :])
        else:
            kwargs["sparse"] = False
        out: Tensor = function(*args, **kwargs)
        return out

    return dense


_SUBSTITUTES: dict[Any, Callable[..., Tensor]] = {
    F.hardsigmoid: _hardsigmoid,
    torch._C._nn.hardsigmoid: _hardsigmoid,
    torch._C._nn.hardsigmoid_: _hardsigmoid_in_place,
    torch.cdist: _cdist,
    torch.pdist: _pdist,
    F.batch_norm: _batch_norm,
    torch.batch_norm: _torch_batch_norm,
    F.pdist: _pdist,
    F.layer_norm: _layer_norm,
    torch.layer_norm: _layer_norm,
    F.embedding: _dense(F.embedding, 6),
    torch.embedding: _dense(torch.embedding, 4),
}
