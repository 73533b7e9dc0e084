"""Linear layers, normalisations and which operator belongs to a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast, final

import torch
from torch import Tensor, nn

from leakwatch.derivatives.layers.modules import Layer
from leakwatch.derivatives.layers.update_convolutions import convolution
from leakwatch.derivatives.layers.update_products import Operator

__all__ = ["operator_of"]


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

    def gradient(
        self, rows: Tensor, delta: Tensor, attacks: int, biased: bool
    ) -> tuple[Tensor, Tensor | None]:
        a = rows.reshape(attacks, -1, rows.shape[-1])
        d = delta.reshape(attacks, -1, delta.shape[-1])
        weight = torch.bmm(d.transpose(1, 2), a).flatten(1)
        return weight, d.sum(1) if biased else None


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

    def gradient(
        self, rows: Tensor, delta: Tensor, attacks: int, biased: bool
    ) -> tuple[Tensor, Tensor | None]:
        weight = self._summed(rows * delta, attacks)
        return weight, self._summed(delta, attacks) if biased else None

    def _summed(self, delta: Tensor, attacks: int) -> Tensor:
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
        return convolution(module), None
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
