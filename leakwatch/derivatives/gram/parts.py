"""How each layer contributes to H = JᵀJ: which form takes least, and what it needs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, final

from torch import Tensor

from leakwatch.derivatives.gram.conv_factors import Products, fewer_operations
from leakwatch.derivatives.gram.forms import Columns, Isometric, Plain, Ranged
from leakwatch.derivatives.gram.tangents import Parts
from leakwatch.derivatives.layers.taps import Layer

Form: TypeAlias = Literal["plain", "isometric", "ranged", "products"]

# H is symmetric, so 4/7 of its entries are formed.
_FORMED = 4 / 7


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
    columns: Columns | None
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
            found = tangents.others[str(self.layer)]
            return found.reshape(len(found), math.prod(found.shape[1:]))
        found = self.columns.of_inputs([tangents.inputs[k] for k in self.layer.keys])
        if shares is not None and self.moved is not None:
            return found.addmm_(shares, self.moved)
        if not isinstance(self.columns, Plain | Isometric):
            raise TypeError(f"{self.layer.weight} needs the known Δ")
        part = self.columns.of_deltas([tangents.deltas[k] for k in self.layer.keys])
        found[:, : part.shape[1]] += part
        return found


def choose(layer: Layer, n: int, known: int | None) -> Form:
    """The form that takes the fewest operations for n directions.

    Args:
        layer: the layer.
        n: number of directions, on which the cost of an inner product depends.
        known: how many Δ span all of them; ``None`` if they are not known.
    """
    call = layer.calls[0]
    if call.elementwise:
        return "plain"
    if known is not None:
        once = len(layer.calls) == 1
        less = width_of(layer, "ranged", known) < width_of(layer, "plain", known)
        return "ranged" if once and less else "plain"
    if call.kind == "conv":
        single = len(layer.calls) == 1 and call.groups == 1
        return "products" if single and fewer_operations(layer, n) else "plain"
    rows, columns = call.weight
    tokens = sum(c.positions for c in layer.calls)
    inner = 2 * _FORMED * n
    plain = (inner + 4 * tokens) * rows * columns
    turned = 2 * tokens * (rows + 2 * columns) * min(tokens, columns)
    turned += 2 * tokens * (rows + columns) * min(tokens, rows)
    isometric = inner * width_of(layer, "isometric", None) + turned
    return "isometric" if isometric < plain else "plain"


def width_of(layer: Layer, form: Form, known: int | None) -> int:
    """At most how many numbers a form keeps for each direction.

    Args:
        layer: the layer.
        form: the form.
        known: how many Δ span all of them, for ``"ranged"``.
    """
    call = layer.calls[0]
    if form == "plain":
        return layer.numbers
    if form == "products":
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
    return call.groups * columns * reached + (known or 0) + 1


def made(
    layer: Layer, form: Form, here: Parts, basis: Mapping[str, Tensor] | None
) -> Rows | Products:
    """A layer in the chosen form.

    Args:
        layer: the layer.
        form: the form.
        here: its factors at the sample.
        basis: the known Δ of each call, if there are any.
    """
    deltas = [here.deltas[key] for key in layer.keys]
    inputs = [here.inputs[key] for key in layer.keys]
    if form == "products":
        return Products(layer, deltas[0], inputs[0])
    if form == "ranged" and basis is not None:
        ranged = Ranged(layer, deltas[0], inputs[0], basis[layer.keys[0]])
        return Rows(layer, ranged, ranged.gradient, ranged.moved)
    columns = (Isometric if form == "isometric" else Plain)(layer, deltas, inputs)
    moved = None
    if basis is not None:
        known = [basis[key] for key in layer.keys]
        moved = columns.of_deltas(known)
    return Rows(layer, columns, columns.gradient, moved)
