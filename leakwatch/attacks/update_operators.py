"""Layers with weights of their own for each attack, as maps that are linear in both.

On weight updates every attack has another network: its client's, at its own place
between w_0 and w_T. What a layer does is w·a for a weight w and an input a, linear in
each; so are its adjoint in a, wᵀδ, and its weight gradient, Σ δ aᵀ. All that an attack
needs of the layer's first and second derivatives are these three.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeAlias, cast, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leakwatch.attacks.convolutions import Convolution
from leakwatch.attacks.known_layers import Layer

__all__ = ["Operator", "operator_of"]

_Sizes: TypeAlias = tuple[int, int]

# Channels with which the library's convolutions work well.
_REGISTER = 8


class Operator(ABC):
    """The products of one kind of layer, for attacks in rows.

    Inputs and gradients hold the attacks' samples one after the other, equally many
    for each; weights have the attacks as their first dimension.
    """

    def rows(self, a: Tensor) -> Tensor:
        """The input as :meth:`apply` and :meth:`weight` take it."""
        return a

    @abstractmethod
    def apply(self, w: Tensor, b: Tensor | None, rows: Tensor, like: Tensor) -> Tensor:
        """w·a + b. Of ``like``, the input a, only shape and format are read."""

    @abstractmethod
    def adjoint(self, w: Tensor, delta: Tensor, like: Tensor) -> Tensor:
        """wᵀδ, of the shape of the input ``like``, whose numbers are not read."""

    @abstractmethod
    def weight(self, rows: Tensor, delta: Tensor, attacks: int) -> Tensor:
        """Σ δ aᵀ over the samples of each attack, ``(attacks, numbers)``."""

    @abstractmethod
    def bias(self, delta: Tensor, attacks: int) -> Tensor:
        """Σ δ over samples and positions, ``(attacks, numbers)``."""


@final
class _Linear(Operator):
    def apply(self, w: Tensor, b: Tensor | None, rows: Tensor, like: Tensor) -> Tensor:
        a = rows.reshape(len(w), -1, rows.shape[-1])
        turned = w.transpose(1, 2)
        if b is None:
            out = torch.bmm(a, turned)
        else:
            out = torch.baddbmm(b[:, None], a, turned)
        return out.view(*rows.shape[:-1], w.shape[1])

    def adjoint(self, w: Tensor, delta: Tensor, like: Tensor) -> Tensor:
        d = delta.reshape(len(w), -1, delta.shape[-1])
        return torch.bmm(d, w).view(like.shape)

    def weight(self, rows: Tensor, delta: Tensor, attacks: int) -> Tensor:
        a = rows.reshape(attacks, -1, rows.shape[-1])
        d = delta.reshape(attacks, -1, delta.shape[-1])
        return torch.bmm(d.transpose(1, 2), a).flatten(1)

    def bias(self, delta: Tensor, attacks: int) -> Tensor:
        return delta.reshape(attacks, -1, delta.shape[-1]).sum(1)


class _Sliding(Operator):
    """What both ways to convolve have in common."""

    def __init__(self, module: nn.Conv2d) -> None:
        self._shape = module.weight.shape
        self._stride = cast(_Sizes, module.stride)
        self._padding = cast(_Sizes, module.padding)
        self._dilation = cast(_Sizes, module.dilation)
        self._groups = module.groups

    def bias(self, delta: Tensor, attacks: int) -> Tensor:
        by_sample = delta.sum((2, 3))
        return by_sample.view(attacks, -1, by_sample.shape[1]).sum(1)


@final
class _Convolution(_Sliding):
    """One call of the library for each attack: its samples fill it well enough."""

    def apply(self, w: Tensor, b: Tensor | None, rows: Tensor, like: Tensor) -> Tensor:
        return _joined(
            [
                F.conv2d(
                    part,
                    w[i],
                    None if b is None else b[i],
                    self._stride,
                    self._padding,
                    self._dilation,
                    self._groups,
                )
                for i, part in enumerate(rows.chunk(len(w)))
            ]
        )

    def adjoint(self, w: Tensor, delta: Tensor, like: Tensor) -> Tensor:
        pairs = zip(delta.chunk(len(w)), like.chunk(len(w)), strict=True)
        mask = (True, False, False)
        return _joined(
            [self._backward(d, a, w[i], mask)[0] for i, (d, a) in enumerate(pairs)]
        )

    def weight(self, rows: Tensor, delta: Tensor, attacks: int) -> Tensor:
        pairs = zip(delta.chunk(attacks), rows.chunk(attacks), strict=True)
        # Of the weight only the shape and memory format are looked at.
        w = rows.new_empty(self._shape)
        mask = (False, True, False)
        parts = [self._backward(d, a, w, mask)[1] for d, a in pairs]
        return torch.stack([p.reshape(-1) for p in parts])

    def _backward(
        self, delta: Tensor, a: Tensor, w: Tensor, mask: tuple[bool, bool, bool]
    ) -> Any:
        return torch.ops.aten.convolution_backward(
            delta,
            a,
            w,
            None,
            self._stride,
            self._padding,
            self._dilation,
            False,
            (0, 0),
            self._groups,
            mask,
        )


@final
class _Patches(_Sliding):
    """Products of unfolded patches, for few input channels.

    The library's kernels want channels that fill a vector register, and are many times
    slower than these otherwise.
    """

    def __init__(self, module: nn.Conv2d) -> None:
        super().__init__(module)
        self._kernel = Convolution(True, True, module)

    def rows(self, a: Tensor) -> Tensor:
        return self._kernel.patches(a)

    def apply(self, w: Tensor, b: Tensor | None, rows: Tensor, like: Tensor) -> Tensor:
        a = rows.view(len(w), -1, rows.shape[2])
        turned = self._flat(w).transpose(1, 2)
        if b is None:
            out = torch.bmm(a, turned)
        else:
            out = torch.baddbmm(b[:, None], a, turned)
        height, width = (self._size(like, i) for i in (0, 1))
        return out.view(len(rows), height, width, -1).permute(0, 3, 1, 2)

    def adjoint(self, w: Tensor, delta: Tensor, like: Tensor) -> Tensor:
        kernel = w.flatten(2).transpose(1, 2)
        kernel = kernel.repeat_interleave(len(delta) // len(w), 0)
        return F.fold(
            torch.bmm(kernel, delta.flatten(2)),
            like.shape[2:],
            self._shape[2:],
            self._dilation,
            self._padding,
            self._stride,
        )

    def weight(self, rows: Tensor, delta: Tensor, attacks: int) -> Tensor:
        a = rows.view(attacks, -1, rows.shape[2])
        d = self._by_attack(delta, attacks)
        return self._kernel.restore(torch.bmm(d.transpose(1, 2), a).flatten(1))

    def _flat(self, w: Tensor) -> Tensor:
        """Kernels in the order of patches, whose channels come last."""
        return w.permute(0, 1, 3, 4, 2).flatten(2)

    def _by_attack(self, delta: Tensor, attacks: int) -> Tensor:
        return delta.permute(0, 2, 3, 1).reshape(attacks, -1, delta.shape[1])

    def _size(self, a: Tensor, i: int) -> int:
        window = self._dilation[i] * (self._shape[2 + i] - 1) + 1
        return (a.shape[2 + i] + 2 * self._padding[i] - window) // self._stride[i] + 1


@final
class _Scale(Operator):
    """Scale and shift after a normalisation.

    Args:
        shape: of the scale.
        trailing: whether it stretches over the last dimensions, as in a LayerNorm, and
            not over the channels.
    """

    def __init__(self, shape: tuple[int, ...], trailing: bool) -> None:
        self._shape = shape
        self._trailing = trailing

    def apply(self, w: Tensor, b: Tensor | None, rows: Tensor, like: Tensor) -> Tensor:
        out = self._by_attack(rows, len(w)) * self._spread(w, rows)
        if b is not None:
            out += self._spread(b, rows)
        return out.flatten(0, 1)

    def adjoint(self, w: Tensor, delta: Tensor, like: Tensor) -> Tensor:
        return (self._by_attack(delta, len(w)) * self._spread(w, delta)).flatten(0, 1)

    def weight(self, rows: Tensor, delta: Tensor, attacks: int) -> Tensor:
        return self.bias(rows * delta, attacks)

    def bias(self, delta: Tensor, attacks: int) -> Tensor:
        t = self._by_attack(delta, attacks)
        first = t.ndim - len(self._shape)
        kept = range(first, t.ndim) if self._trailing else (2,)
        return t.sum([d for d in range(1, t.ndim) if d not in kept]).flatten(1)

    def _by_attack(self, t: Tensor, attacks: int) -> Tensor:
        # A split of the first dimension, whatever the memory format of the others.
        sizes = (attacks, len(t) // attacks, *t.shape[1:])
        return t.view(sizes)

    def _spread(self, w: Tensor, like: Tensor) -> Tensor:
        if self._trailing:
            middle = like.ndim - len(self._shape)
            return w.view(len(w), *[1] * middle, *self._shape)
        return w.view(len(w), 1, -1, *[1] * (like.ndim - 2))


def operator_of(layer: Layer) -> tuple[Operator, Callable[[Tensor], Tensor] | None]:
    """What a known layer does, and what it does before that without any weights.

    Args:
        layer: linear, convolution or normalisation.
    """
    module = layer.module
    if isinstance(module, nn.Linear):
        return _Linear(), None
    if isinstance(module, nn.Conv2d):
        small = module.groups == 1 and module.in_channels < _REGISTER
        return (_Patches if small else _Convolution)(module), None
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return _Scale((module.num_features,), False), _normalised(module)
    shape = tuple(cast(Tensor, module.weight).shape)
    return _Scale(shape, isinstance(module, nn.LayerNorm)), layer.made.prepare


def _normalised(module: nn.modules.batchnorm._BatchNorm) -> Callable[[Tensor], Tensor]:
    def prepare(a: Tensor) -> Tensor:
        shape = (-1, *[1] * (a.ndim - 2))
        mean = cast(Tensor, module.running_mean).to(a)
        variance = cast(Tensor, module.running_var).to(a)
        inverse = (variance + module.eps).rsqrt()
        return (a - mean.view(shape)) * inverse.view(shape)

    return prepare


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
