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

from leakwatch.derivatives.layers.calls import Call, Kind
from leakwatch.derivatives.layers.products import (
    ElementwiseProducts,
    LayerProducts,
    MatrixProducts,
    PositionsLast,
)
from leakwatch.derivatives.layers.taps import Layer
from leakwatch.derivatives.layers.unfolding import vectors

__all__ = [
    "Bilinear",
    "Pair",
    "fewer_operations",
    "inputs_by_position",
    "met_by",
    "outputs_by_position",
    "products_of",
]

Pair: TypeAlias = tuple[Tensor, Tensor]
"""Something about a and about δ."""


_PRODUCTS: dict[Kind, LayerProducts] = {
    "linear": MatrixProducts(),
    "conv": PositionsLast(),
    "channels": ElementwiseProducts(),
    "features": ElementwiseProducts(),
}


def products_of(call: Call) -> LayerProducts:
    """The products of a call's layer, of activations and backprops by position."""
    return _PRODUCTS[call.kind]


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
        call = layer.calls[0]
        self._elementwise = call.elementwise
        self._products = products_of(call)
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
        return self._rows(self._products.weight_grad(self._a, self._d), self._d)

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
        rows = len(self._d)
        bias = None
        if self.layer.bias is not None:
            bias = cotangents[1].reshape(rows, -1)
        return self._received(cotangents[0].reshape(rows, -1), bias)

    def normal(self, moved: Pair) -> Pair:
        """:meth:`pull` of :meth:`push`."""
        a, d = moved
        products = self._products
        if self._short and isinstance(products, MatrixProducts):
            through_a = products.product(self._d @ d.mT, self._a)
            through_d = products.product(self._a @ a.mT, self._d)
            return (
                products.product(self._dd, a).add_(through_a),
                products.product(self._aa, d).add_(through_d),
            )
        bias = None if self.layer.bias is None else products.bias_grad(d)
        return self._received(self._tangent(moved), bias)

    def _tangent(self, moved: Pair) -> Tensor:
        a, d = moved
        if self._elementwise:
            return torch.addcmul(d * self._a, self._d, a).sum(1)
        rows, columns = self._d.shape[2], self._a.shape[2]
        if 2 * a.shape[1] * (rows + columns) < rows * columns:
            # Copies of the factors take less than a second pass over Ġ.
            tangent = torch.cat((d, self._d), 1).mT @ torch.cat((self._a, a), 1)
        else:
            tangent = torch.baddbmm(d.mT @ self._a, self._d.mT, a)
        return tangent.flatten(1)

    def _received(self, u: Tensor, b: Tensor | None) -> Pair:
        return (
            self._products.input_adjoint(u, self._d, self._a),
            self._products.output_adjoint(u, b, self._a, self._a),
        )

    def _rows(self, weight: Tensor, deltas: Tensor) -> list[Tensor]:
        parts = [weight.reshape(self._samples, -1)]
        if self.layer.bias is not None:
            bias = self._products.bias_grad(deltas)
            parts.append(bias.reshape(self._samples, -1))
        return parts


def fewer_operations(positions: int, rows: int, columns: int) -> bool:
    """Whether H v takes fewer operations by inner products of positions than by Ġ.

    Args:
        positions: T.
        rows: C, of one group.
        columns: P.
    """
    return 3 * positions * (rows + columns) < 4 * rows * columns
