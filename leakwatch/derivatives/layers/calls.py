"""Calls of torch functions with a weight, as far as its gradient comes apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, final

import torch
from torch import Tensor
from torch.nn import functional

Kind: TypeAlias = Literal["linear", "conv", "channels", "features"]
Pair: TypeAlias = tuple[int, int]


@final
@dataclass(frozen=True)
class Call:
    """One use of a weight.

    Attributes:
        kind: ``channels`` and ``features`` are the elementwise weights of
            normalisations, of the second dimension and of the last ones.
        weight: shape of the weight; a convolution in one dimension is one in two.
        input: shape of a: the input, with whatever asymmetric padding adds; the
            normalised input where the weight is elementwise.
        output: shape of what the call returns, and of δ.
        stride: of a convolution, as the rest.
        padding: zeros added at each side.
        dilation: distance between the entries of a patch.
        groups: of channels.
    """

    kind: Kind
    weight: torch.Size
    input: torch.Size
    output: torch.Size
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    groups: int = 1

    @property
    def elementwise(self) -> bool:
        """Whether the gradient is a sum of products of elements, δ·a."""
        return self.kind in ("channels", "features")

    @property
    def positions(self) -> int:
        """T, how many vectors the weight meets."""
        return self.output.numel() // self.weight[0]

    @property
    def made(self) -> Pair:
        """Rows and columns of what a convolution returns."""
        return (1, *self.output[2:])[-2:]


@final
@dataclass(frozen=True)
class Use:
    """A call with a weight, as its arguments tell.

    Attributes:
        kind: of the call.
        input: its first argument.
        weight: its weight, if it has one.
        bias: its bias, if it has one.
        activation: forms a.
        geometry: further attributes of the :class:`Call`.
    """

    kind: Kind
    input: Tensor
    weight: Tensor | None
    bias: Tensor | None
    activation: Callable[[], Tensor]
    geometry: Mapping[str, Any]

    def call(self, out: Tensor) -> Call | None:
        """What it is, or ``None`` if such a call does not come apart."""
        nested = torch._C._functorch.is_functorch_wrapped_tensor(self.input)
        if self.weight is None or nested or not self.weight.numel():
            return None
        # Torch takes a vector for a weight, and broadcasts a bias.
        if self.kind in ("linear", "conv") and (
            self.weight.ndim < 2
            or (self.bias is not None and self.bias.shape != self.weight.shape[:1])
        ):
            return None
        entering, shape, leaving = self.activation().shape, self.weight.shape, out.shape
        if self.kind == "conv":
            one = self.input.ndim == self.weight.ndim and len(self.input) == 1
            if not one:
                return None
            shape = torch.Size((*shape[:2], *[1] * (4 - len(shape)), *shape[2:]))
        return Call(self.kind, shape, entering, leaving, **self.geometry)


def use_of(func: Any, args: Any, kwargs: Any) -> Use | None:
    """What a call of a torch function is; ``None`` if its gradient isn't a product."""
    parse = _PARSERS.get(func)
    return None if parse is None else parse(*args, **kwargs)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Use:
    return Use("linear", input, weight, bias, lambda: input, {})


def _convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, ...] = 1,
    padding: int | str | tuple[int, ...] = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
) -> Use:
    count = weight.ndim - 2
    dilated = _each(dilation, count)
    spare = [d * (k - 1) for d, k in zip(dilated, weight.shape[2:], strict=True)]
    uneven: list[int] = []
    if padding == "same":
        padding = tuple(s // 2 for s in spare)
        if any(s % 2 for s in spare):
            uneven = [n for s in reversed(spare) for n in (s // 2, s - s // 2)]
            padding = 0
    elif isinstance(padding, str):
        padding = 0

    def activation() -> Tensor:
        a = functional.pad(input, uneven) if uneven else input
        return a.unsqueeze(2) if count == 1 else a

    first = 2 - count
    geometry = {
        "stride": (*[1] * first, *_each(stride, count)),
        "padding": (*[0] * first, *_each(padding, count)),
        "dilation": (*[1] * first, *dilated),
        "groups": groups,
    }
    return Use("conv", input, weight, bias, activation, geometry)


def _layer_norm(
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Use:
    def activation() -> Tensor:
        return functional.layer_norm(input, normalized_shape, None, None, eps)

    return Use("features", input, weight, bias, activation, {})


def _group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Use:
    def activation() -> Tensor:
        return functional.group_norm(input, num_groups, None, None, eps)

    return Use("channels", input, weight, bias, activation, {})


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Use | None:
    if training:
        return None

    def activation() -> Tensor:
        return functional.batch_norm(
            input, running_mean, running_var, None, None, False, momentum, eps
        )

    return Use("channels", input, weight, bias, activation, {})


_PARSERS: dict[Any, Callable[..., Use | None]] = {
    functional.linear: _linear,
    torch.conv1d: _convolution,
    torch.conv2d: _convolution,
    functional.layer_norm: _layer_norm,
    functional.group_norm: _group_norm,
    functional.batch_norm: _batch_norm,
}


def _each(value: Any, count: int) -> tuple[int, ...]:
    """One number for each dimension; torch takes a single one for all."""
    if isinstance(value, int):
        return (value,) * count
    return tuple(value) * (count if len(value) == 1 else 1)
