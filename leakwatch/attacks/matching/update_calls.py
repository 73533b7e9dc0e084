"""Calls of a network's layers, and what follows from what their outputs receive."""

from __future__ import annotations

from typing import Generic, NamedTuple, Protocol, TypeVar, final

import torch
from torch import Tensor

from leakwatch.attacks.matching.update_layers import Node

__all__ = ["Call", "NodeT", "Placed", "Recorded", "own", "received"]


class Placed(Protocol):
    """What takes the place of a layer: gives its output, and its input in rows."""

    def __call__(self, a: Tensor) -> tuple[Tensor, Tensor]:
        """Output and rows for this input."""


NodeT = TypeVar("NodeT", bound=Placed)


@final
class Call:
    """One call of a layer.

    Attributes:
        layer: which.
        a: its input.
        rows: as its operator takes them.
        out: its output.
        version: of that, as it was.
    """

    def __init__(self, layer: int, a: Tensor, rows: Tensor, out: Tensor) -> None:
        self.layer, self.a, self.rows, self.out = layer, a, rows, out
        self.version = out._version


class Recorded(NamedTuple, Generic[NodeT]):
    """A forward of all attacks and what the outputs of its layers received.

    Attributes:
        batch: all images, a leaf.
        nodes: that took the place of the layers.
        calls: of them, in order.
        deltas: what each call's output received, with a graph.
    """

    batch: Tensor
    nodes: list[NodeT]
    calls: list[Call]
    deltas: list[Tensor]


def received(
    node: Node, call: Call, delta: Tensor, u: Tensor | None, b: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """What δ and a receive from ⟨U, δ aᵀ⟩ + ⟨b, δ⟩: U a + b and Uᵀδ.

    Args:
        node: of the layer.
        call: of it.
        delta: δ.
        u: of the weight, ``None`` for none.
        b: of the bias, ``None`` for none.
    """
    if u is None:
        zero = torch.zeros_like(node.weights)
        return node.operator.apply(zero, b, call.rows, call.a), None
    u, taken = node.operator.arranged(u), None
    if call.a.requires_grad:
        taken = node.operator.adjoint(u, delta.detach(), call.a)
    return node.operator.apply(u, b, call.rows, call.a), taken


def own(
    names: tuple[str, ...], parts: dict[str, Tensor]
) -> tuple[Tensor | None, Tensor | None]:
    """A layer's part for its weight and its bias, ``None`` for what there isn't.

    Args:
        names: of its weight and bias, as far as they are shared.
        parts: by name.
    """
    found = {name.rsplit(".", 1)[1]: parts.get(name) for name in names}
    return found.get("weight"), found.get("bias")
