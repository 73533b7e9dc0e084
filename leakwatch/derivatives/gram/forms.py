"""Coordinates of a layer's gradient tangents in which inner products are the same.

Each form is a linear map from the tangents Δ, A of a layer's factors to a row of
numbers, such that rows have the inner products of the gradient's tangents
Ġ = Δᵀa + δᵀA. Put side by side they are a factor of H = JᵀJ, usually far smaller than
J itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, final

import torch
from torch import Tensor

from leakwatch.derivatives.gram.conv_factors import ConvFactors, fewer_operations
from leakwatch.derivatives.gram.tangents import Parts
from leakwatch.derivatives.layers.bilinear import (
    inputs_by_position,
    outputs_by_position,
    products_of,
)
from leakwatch.derivatives.layers.calls import Call
from leakwatch.derivatives.layers.taps import Layer
from leakwatch.derivatives.layers.unfolding import spread, vectors

Form: TypeAlias = Literal["plain", "isometric", "ranged", "factors"]

# Numbers of gradients that are formed at once.
_BLOCK = 2**23
# H is symmetric, so 4/7 of its entries are formed.
_FORMED = 4 / 7


@final
class Plain:
    """Ġ itself.

    Args:
        layer: the layer.
        deltas: δ of each call.
        inputs: a of each call.
    """

    def __init__(
        self, layer: Layer, deltas: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> None:
        self._layer = layer
        self._deltas, self._inputs = deltas, inputs
        self._bias = layer.numbers - layer.calls[0].weight.numel()
        self._products = products_of(layer.calls[0])
        self._vectors = [
            inputs_by_position(call, a[None])
            for call, a in zip(layer.calls, inputs, strict=True)
        ]
        self._turned = [
            spread(call, d).flatten(1, 2)
            if call.kind == "conv"
            else outputs_by_position(call, d[None])
            for call, d in zip(layer.calls, deltas, strict=True)
        ]
        self.gradient = self.of_deltas([d[None] for d in deltas])[0]

    def of_deltas(self, deltas: Sequence[Tensor]) -> Tensor:
        """The part Δᵀa and the bias' ΣΔ, ``(k, width)``."""
        k = len(deltas[0])
        total = deltas[0].new_zeros(k, self._layer.numbers)
        size = self._layer.calls[0].weight.numel()
        for call, a, d in zip(self._layer.calls, self._vectors, deltas, strict=True):
            by_group = _by_group(call, d)
            total[:, :size] += self._products.weight_grad(a, by_group).reshape(k, -1)
            if self._bias:
                total[:, size:] += self._products.bias_grad(by_group).reshape(k, -1)
        return total

    def of_inputs(self, inputs: Sequence[Tensor]) -> Tensor:
        """The part δᵀA, ``(k, width)``; zero for the bias."""
        k = len(inputs[0])
        size = self._layer.calls[0].weight.numel()
        total = inputs[0].new_zeros(k, size + self._bias)
        for call, d, a in zip(self._layer.calls, self._turned, inputs, strict=True):
            if call.kind == "conv":
                # Patches of k tangents would take many times their memory.
                kernel = math.prod(call.weight[2:])
                by_pixel = over_pixels(a.reshape(k, call.groups, -1, d.shape[2]), d)
                by_pixel = by_pixel.view(*by_pixel.shape[:3], -1, kernel)
                part = by_pixel.transpose(2, 3)
            else:
                part = self._products.weight_grad(inputs_by_position(call, a), d)
            total[:, :size] += part.reshape(k, -1)
        return total


@final
class Isometric:
    """Ġ of a linear layer with few tokens in bases of what it can be made of.

    With orthonormal bases Q_a of the span of the a (bias: with a 1 appended) and Q_d
    of that of the δ, the numbers [Ġ Q_a ; Q_dᵀ δᵀA (I − Q_a Q_aᵀ)] have the same inner
    products as Ġ: T(C + P) numbers in place of C·P.

    Args:
        layer: a linear layer.
        deltas: δ of each call.
        inputs: a of each call.
    """

    def __init__(
        self, layer: Layer, deltas: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> None:
        self._rows, self._columns = layer.calls[0].weight
        d = self._tokens(deltas, self._rows, one=True)
        a = self._tokens(inputs, self._columns, one=True)
        self._bias = layer.bias is not None
        seen = torch.cat((a, torch.ones_like(a[:, :1])), 1) if self._bias else a
        q = torch.linalg.qr(seen.double().T).Q
        along = torch.linalg.qr(d.double().T).Q
        self._q = q.to(a)
        self._root: Tensor = (seen.double() @ q).to(a)  # (T, columns of Q_a)
        self._delta = d
        self._turned: Tensor = (d.double() @ along).to(a)  # (T, columns of Q_d)
        first = self.of_deltas([t[None] for t in deltas])[0]
        rest = self._turned.shape[1] * len(self._q)
        self.gradient = torch.cat((first, first.new_zeros(rest)))

    def of_deltas(self, deltas: Sequence[Tensor]) -> Tensor:
        """The first ``(k, C · columns of Q_a)`` coordinates; the rest is zero."""
        d = self._tokens(deltas, self._rows)
        if d.shape[1] == 1:  # several times faster than products of small matrices
            return d[:, 0] * self._root
        return (d.transpose(1, 2) @ self._root).flatten(1)

    def of_inputs(self, inputs: Sequence[Tensor]) -> Tensor:
        """``(k, width)``."""
        a = self._tokens(inputs, self._columns)
        if a.shape[1] == 1:
            return self._of_one(a[:, 0])
        inside = a @ self._q[: self._columns]
        outside = inside @ -self._q.T
        outside[:, :, : self._columns] += a
        seen = (self._delta.T @ inside).flatten(1)
        return torch.cat((seen, (self._turned.T @ outside).flatten(1)), 1)

    def _of_one(self, a: Tensor) -> Tensor:
        k, columns, rows = len(a), self._columns, self._rows
        inside = a @ self._q[:columns]
        out = a.new_empty(k, rows + len(self._q))
        out[:, :rows] = inside * self._delta[0]
        # Never read as a number, for which a GPU would be waited for.
        outside = torch.addmm(a, inside, self._q[:columns].T, alpha=-1)
        torch.mul(outside, self._turned, out=out[:, rows : rows + columns])
        if self._bias:
            out[:, -1:] = inside * (-self._turned[0] * self._q[-1])
        return out

    def _tokens(
        self, parts: Sequence[Tensor], size: int, *, one: bool = False
    ) -> Tensor:
        if one:
            return torch.cat([p.reshape(-1, size) for p in parts])
        return torch.cat([p.reshape(len(p), -1, size) for p in parts], 1)


@final
class Ranged:
    """Ġ in a basis of what can reach it, where few Δ span all of them.

    δᵀA is linear in A and lies in the range of the map from inputs to gradients, whose
    dimension is at most that of the input. Where all Δ are combinations of r known
    ones, what lies outside of that range has r dimensions.

    Args:
        layer: a linear layer or a convolution that is called once.
        delta: δ.
        a: its input.
        basis: the r known Δ, ``(r, *shape of δ)``.
    """

    def __init__(self, layer: Layer, delta: Tensor, a: Tensor, basis: Tensor) -> None:
        call = self._call = layer.calls[0]
        to = spread(call, delta.double()).flatten(1, 2)
        # Pixels that no patch reaches, as with a stride, count for nothing.
        kept = to.ne(0).any(1).any(0)
        self._kept = None if bool(kept.all()) else kept.nonzero()[:, 0]
        base, root = torch.linalg.qr(to[:, :, kept])
        self._root = root.to(a)
        blocks = torch.split(basis, max(1, _BLOCK // layer.numbers))
        inside = torch.cat([_inside(layer, base, a, block) for block in blocks])
        apart = _outside(layer, delta.double(), a.double(), basis.double(), inside)
        self._rest = apart.shape[1]
        self.moved = torch.cat((inside, apart[:-1]), 1).to(a)
        own = self.of_inputs([a[None]])[0]
        own[len(own) - self._rest :] = apart[-1]
        self.gradient = own

    def of_inputs(self, inputs: Sequence[Tensor]) -> Tensor:
        """The part δᵀA, ``(k, width)``."""
        k, call = len(inputs[0]), self._call
        if call.kind == "linear":
            pixels = inputs[0].reshape(k, 1, -1, call.weight[1]).transpose(2, 3)
        else:
            pixels = inputs[0].reshape(k, call.groups, -1, math.prod(call.input[2:]))
        if self._kept is not None:
            pixels = pixels[..., self._kept]
        reached = over_pixels(pixels, self._root).flatten(1)
        return torch.cat((reached, reached.new_zeros(k, self._rest)), 1)


@final
@dataclass(frozen=True, eq=False)
class Rows:
    """A layer of which coordinates of Ġ are kept for each direction.

    Attributes:
        layer: the layer; a single parameter by its name.
        columns: the coordinates; ``None`` for a parameter that is not taken apart.
        gradient: the gradient in them.
        moved: part of the coordinates that each of the known Δ has, ``(r, width)``,
            where all Δ are combinations of a few.
    """

    layer: Layer | str
    columns: Plain | Isometric | Ranged | None
    gradient: Tensor
    moved: Tensor | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Full names of its parameters."""
        return (self.layer,) if isinstance(self.layer, str) else self.layer.names

    @property
    def keys(self) -> tuple[str, ...]:
        """Calls whose inputs it needs."""
        return () if isinstance(self.layer, str) else self.layer.keys

    @property
    def width(self) -> int:
        """Numbers for each direction."""
        return len(self.gradient)

    def rows(self, tangents: Parts, shares: Tensor | None) -> Tensor:
        """Coordinates for each of k directions, ``(k, width)``.

        Args:
            tangents: along these directions.
            shares: ``(k, r)``, how Δ is combined from the known ones; ``None`` if
                ``tangents`` has Δ itself.
        """
        if isinstance(self.layer, str) or self.columns is None:
            tangent = tangents.others[str(self.layer)]
            return tangent.reshape(len(tangent), math.prod(tangent.shape[1:]))
        coordinates = self.columns.of_inputs(
            [tangents.inputs[k] for k in self.layer.keys]
        )
        if shares is not None and self.moved is not None:
            return coordinates.addmm_(shares, self.moved)
        if isinstance(self.columns, Ranged):
            raise TypeError(f"{self.layer.weight} needs the known Δ")
        part = self.columns.of_deltas([tangents.deltas[k] for k in self.layer.keys])
        coordinates[:, : part.shape[1]] += part
        return coordinates


def choose(layer: Layer, n: int, rank: int | None) -> Form:
    """The form that takes the fewest operations for n directions.

    Args:
        layer: the layer.
        n: number of directions, on which the cost of an inner product depends.
        rank: how many known Δ span all of them; ``None`` where that is not so.
    """
    call = layer.calls[0]
    if call.elementwise:
        return "plain"
    if rank is not None:
        once = len(layer.calls) == 1
        return "ranged" if once and _range_pays(layer, n, rank) else "plain"
    if call.kind == "conv":
        single = len(layer.calls) == 1 and call.groups == 1
        return "factors" if single and fewer_operations(layer, n) else "plain"
    rows, columns = call.weight
    tokens = sum(c.positions for c in layer.calls)
    inner = 2 * _FORMED * n
    plain = (inner + 4 * tokens) * rows * columns
    turned = 2 * tokens * (rows + 2 * columns) * min(tokens, columns)
    turned += 2 * tokens * (rows + columns) * min(tokens, rows)
    isometric = inner * width_of(layer, "isometric", None) + turned
    return "isometric" if isometric < plain else "plain"


def _range_pays(layer: Layer, n: int, rank: int) -> bool:
    """Whether n directions gain by coordinates in the range what finding it takes."""
    call = layer.calls[0]
    width = width_of(layer, "ranged", rank)
    saved = 2 * _FORMED * n * n * (layer.numbers - width)
    kernel = math.prod(call.weight[2:])
    pixels = call.positions if call.kind == "linear" else math.prod(call.input[2:])
    rows = call.weight[0] * kernel
    return saved > 4 * rows * pixels * min(rows // call.groups, pixels)


def width_of(layer: Layer, form: Form, rank: int | None) -> int:
    """At most how many numbers a form keeps for each direction.

    Args:
        layer: the layer.
        form: the form.
        rank: how many known Δ span all of them, for ``"ranged"``.
    """
    call = layer.calls[0]
    if form == "plain":
        return layer.numbers
    if form == "factors":
        return call.output.numel() + call.input.numel()
    rows, columns = call.weight[0], call.weight[1]
    if form == "isometric":
        tokens = sum(c.positions for c in layer.calls)
        seen = columns + (layer.bias is not None)
        return rows * min(tokens, seen) + min(tokens, rows) * seen
    kernel = math.prod(call.weight[2:])
    pixels = call.positions if call.kind == "linear" else math.prod(call.input[2:])
    pixels = min(pixels, call.positions * kernel)
    reached = min(pixels, rows // call.groups * kernel)
    return call.groups * columns * reached + (rank or 0) + 1


def in_form(
    layer: Layer, form: Form, here: Parts, basis: Mapping[str, Tensor] | None
) -> Rows | ConvFactors:
    """A layer in the chosen form.

    Args:
        layer: the layer.
        form: the form.
        here: its factors at the sample.
        basis: the known Δ of each call, if there are any.
    """
    deltas = [here.deltas[key] for key in layer.keys]
    inputs = [here.inputs[key] for key in layer.keys]
    if form == "factors":
        return ConvFactors(layer, deltas[0], inputs[0])
    if form == "ranged" and basis is not None:
        ranged = Ranged(layer, deltas[0], inputs[0], basis[layer.keys[0]])
        return Rows(layer, ranged, ranged.gradient, ranged.moved)
    columns = (Isometric if form == "isometric" else Plain)(layer, deltas, inputs)
    moved = None
    if basis is not None:
        moved = columns.of_deltas([basis[key] for key in layer.keys])
    return Rows(layer, columns, columns.gradient, moved)


def over_pixels(a: Tensor, to: Tensor) -> Tensor:
    """A matrix for each group applied to each channel.

    Args:
        a: ``(k, groups, channels, pixels)``.
        to: ``(groups, m, pixels)``.

    Returns:
        ``(k, groups, channels, m)``.
    """
    if len(to) == 1:
        return a @ to[0].T
    product = torch.bmm(a.transpose(0, 1).flatten(1, 2), to.transpose(1, 2))
    return product.view(len(to), *a[:, 0].shape[:2], -1).transpose(0, 1)


def _inside(layer: Layer, base: Tensor, a: Tensor, deltas: Tensor) -> Tensor:
    """Coordinates of Δᵀa in ``base``, the range of A ↦ δᵀA, ``(k, …)``, float64."""
    call = layer.calls[0]
    kernel = math.prod(call.weight[2:])
    moved = products_of(call).weight_grad(
        vectors(call, a.double()), _by_group(call, deltas.double())
    )
    by_filter = moved.view(len(moved), call.groups, -1, call.weight[1], kernel)
    by_channel = by_filter.transpose(2, 3).flatten(3)
    return over_pixels(by_channel, base.transpose(1, 2)).flatten(1)


def _outside(
    layer: Layer, delta: Tensor, a: Tensor, basis: Tensor, inside: Tensor
) -> Tensor:
    """Coordinates of what of Δᵀa is outside of the range, and of the bias' gradient.

    Returns:
        ``(r + 1, r + 1)``: rows with the inner products that the r parts have; the
        last is for the gradient.
    """
    call, r = layer.calls[0], len(basis)
    seen = vectors(call, a)
    if layer.bias is not None:
        seen = torch.cat((seen, torch.ones_like(seen[..., :1])), 2)
    root = torch.linalg.qr(seen.transpose(1, 2), mode="r").R.transpose(1, 2)
    rows = [_by_group(call, part) for part in (basis, delta[None])]
    flat = (rows[0].mT @ root).flatten(1)
    squares = flat.new_zeros(r + 1, r + 1)
    squares[:r, :r] = flat @ flat.T - inside @ inside.T
    if layer.bias is not None:
        sums = torch.cat([part.sum(-2).flatten(1) for part in rows])
        squares[r] = squares[:, r] = sums @ sums[r]
    values, turn = torch.linalg.eigh(squares)
    coordinates: Tensor = turn * values.clamp_min(0).sqrt()
    return coordinates


def _by_group(call: Call, deltas: Tensor) -> Tensor:
    """Δ of k tangents at each position; of convolutions ``(k, groups, T, C)``."""
    by_position = outputs_by_position(call, deltas)
    if call.kind != "conv":
        return by_position
    return by_position.view(len(deltas), call.groups, *by_position.shape[1:])
