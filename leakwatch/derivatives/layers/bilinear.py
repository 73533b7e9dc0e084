"""Weight gradients of one layer for a whole batch, and products with their tangents.

With a and δ of each sample, the gradient of a weight is G = δᵀa, its tangent along A, Δ
is Ġ = Δᵀa + δᵀA, and a cotangent U comes back as δU for a and aUᵀ for δ. A product with
H is both in a row, and then Ġ need not be formed: δĠ = (δΔᵀ)a + (δδᵀ)A has T×T
matrices for T positions where Ġ has C×P numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias, final

import torch
from torch import Tensor

from leakwatch.derivatives.layers.calls import Call
from leakwatch.derivatives.layers.taps import Layer
from leakwatch.derivatives.layers.unfolding import vectors

__all__ = [
    "Bilinear",
    "Pair",
    "fewer_operations",
    "inputs_by_position",
    "met_by",
    "outputs_by_position",
]

Pair: TypeAlias = tuple[Tensor, Tensor]
"""Something about a and about δ."""


def inputs_by_position(call: Call, a: Tensor) -> Tensor:
    """What the weight meets at each position, ``(samples · groups, T, P)``.

    Args:
        call: the call, of one sample.
        a: its input, ``(samples, *call.input)``.
    """
    if call.kind != "conv":
        return _by_position(call, a, call.weight[-1])
    k = len(a)
    # Samples are further groups: nothing of one meets a weight of another.
    many = replace(
        call,
        input=torch.Size((k, *call.input[1:])),
        groups=k * call.groups,
    )
    return vectors(many, a)


def met_by(call: Call) -> int:
    """How many numbers :func:`inputs_by_position` has for a sample."""
    if call.kind != "conv":
        return call.input.numel()
    return call.positions * call.groups * math.prod(call.weight[1:])


def outputs_by_position(call: Call, delta: Tensor) -> Tensor:
    """δ at each position, ``(samples · groups, T, C)``.

    Args:
        call: the call, of one sample.
        delta: gradient at its output, ``(samples, *call.output)``.
    """
    if call.kind != "conv":
        return _by_position(call, delta, call.weight[0])
    groups = len(delta) * call.groups
    return delta.reshape(groups, -1, call.positions).transpose(1, 2)


def _by_position(call: Call, t: Tensor, size: int) -> Tensor:
    scales = call.weight.numel()
    if call.kind == "channels":
        return t.reshape(*t.shape[:2], scales, -1).transpose(2, 3).flatten(1, 2)
    return t.reshape(len(t), -1, scales if call.kind == "features" else size)


@final
class Bilinear:
    """One layer's part of G, J v, Jᵀu and H v for each sample of a batch.

    Args:
        layer: the layer.
        here: a and δ by position, those of all calls behind each other.
        samples: how many.
    """

    def __init__(self, layer: Layer, here: Pair, samples: int) -> None:
        self.layer = layer
        self._a, self._d = here
        self._samples = samples
        # A convolution has its positions last.
        self._turned = layer.calls[0].kind == "conv"
        self._elementwise = layer.calls[0].elementwise
        self._short = not self._elementwise and fewer_operations(
            self._a.shape[1], self._d.shape[2], self._a.shape[2]
        )
        if self._short:
            self._dd = self._d @ self._d.mT
            self._aa = self._a @ self._a.mT
            if layer.bias is not None:  # a with a 1 appended
                self._aa += 1

    @property
    def sizes(self) -> list[int]:
        """How many numbers each of its parameters has."""
        weight = self.layer.calls[0].weight.numel()
        return [weight, self.layer.numbers - weight][: len(self.layer.names)]

    def gradient(self) -> list[Tensor]:
        """Gradients of its parameters, ``(samples, numbers)`` each."""
        weight = (
            (self._d * self._a).sum(1) if self._elementwise else self._d.mT @ self._a
        )
        return self._rows(weight, self._d)

    def push(self, moved: Pair) -> list[Tensor]:
        """Tangents of its parameters' gradients, ``(samples, numbers)`` each.

        Args:
            moved: A and Δ by position.
        """
        return self._rows(self._tangent(moved), moved[1])

    def pull(self, cotangents: Sequence[Tensor]) -> Pair:
        """What a and δ receive from cotangents of its parameters' gradients.

        Args:
            cotangents: ``(samples, numbers)`` each.
        """
        shape = self._shape()
        bias = None
        if self.layer.bias is not None:
            bias = cotangents[1].reshape(len(self._d), 1, -1)
        return self._received(cotangents[0].reshape(shape), bias)

    def normal(self, moved: Pair) -> Pair:
        """:meth:`pull` of :meth:`push`."""
        if self._short:
            a, d = moved
            given = self._product(self._d @ d.mT, self._a)
            back = self._product(self._a @ a.mT, self._d)
            return self._product(self._dd, a, given), self._product(self._aa, d, back)
        bias = None if self.layer.bias is None else moved[1].sum(1, keepdim=True)
        return self._received(self._tangent(moved), bias)

    def _tangent(self, moved: Pair) -> Tensor:
        a, d = moved
        if self._elementwise:
            return torch.addcmul(d * self._a, self._d, a).sum(1)
        rows, columns = self._d.shape[2], self._a.shape[2]
        if 2 * a.shape[1] * (rows + columns) < rows * columns:
            # Copies of the factors take less than a second pass over Ġ.
            return torch.cat((d, self._d), 1).mT @ torch.cat((self._a, a), 1)
        return torch.baddbmm(d.mT @ self._a, self._d.mT, a)

    def _received(self, weight: Tensor, bias: Tensor | None) -> Pair:
        if self._elementwise:
            each = weight[:, None]
            given, back = self._d * each, self._a * each
            return given, back if bias is None else back.add_(bias)
        back = self._product(self._a, weight.mT, bias)
        return self._product(self._d, weight), back

    def _product(self, x: Tensor, y: Tensor, more: Tensor | None = None) -> Tensor:
        """``x @ y + more``, in the memory format of the layer's own tensors."""
        if not self._turned:
            return x @ y if more is None else torch.baddbmm(more, x, y)
        x, y = y.mT, x.mT
        return (x @ y if more is None else torch.baddbmm(more.mT, x, y)).mT

    def _rows(self, weight: Tensor, deltas: Tensor) -> list[Tensor]:
        parts = [weight.reshape(self._samples, -1)]
        if self.layer.bias is not None:
            parts.append(deltas.sum(1).reshape(self._samples, -1))
        return parts

    def _shape(self) -> tuple[int, ...]:
        if self._elementwise:
            return self._samples, self._a.shape[2]
        return len(self._d), self._d.shape[2], self._a.shape[2]


def fewer_operations(positions: int, rows: int, columns: int) -> bool:
    """Whether H v takes fewer operations by inner products of positions than by Ġ.

    Args:
        positions: T.
        rows: C, of one group.
        columns: P.
    """
    return 3 * positions * (rows + columns) < 4 * rows * columns
