"""The surrogate's match with w_0 − w_T, layer by layer.

Nothing is formed that has as many numbers as all weights of all attacks: thin linear
layers act through products with w_0 and D = w_0 − w_T (:mod:`low_rank`), and of the
others each has a weight, a gradient and a cotangent of its own size.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple, cast, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from leakwatch.attacks.matching.layerwise import (
    LayerwisePath,
    Node,
    Received,
    Recording,
)
from leakwatch.attacks.updates.descent import for_each
from leakwatch.attacks.updates.low_rank import ThinNode
from leakwatch.derivatives.layers.modules import KnownLayer

__all__ = ["LayeredMatch", "Match"]


class Match(NamedTuple):
    """1 − cos(w_0 − w_T, g) of some attacks.

    Attributes:
        distance: that.
        images: its derivative in them.
        slope: in α, where that was asked for.
    """

    distance: Float[Tensor, " attacks"]
    images: Float[Tensor, "attacks images ..."]
    slope: Float[Tensor, " attacks"] | None


@final
class LayeredMatch:
    """Gradients at ŵ = α w_0 + (1 − α) w_T against w_0 − w_T, for layered networks.

    Args:
        path: records the network.
        initial: w_0, ``(d_θ,)``.
        difference: w_0 − w_T, ``(clients, d_θ)``.
    """

    def __init__(
        self,
        path: LayerwisePath,
        initial: Float[Tensor, " d_theta"],
        difference: Float[Tensor, "clients d_theta"],
    ) -> None:
        self._path = path
        self._initial = path.by_parameter.split(initial[None])
        self._difference = path.by_parameter.split(difference)
        tiny = torch.finfo(difference.dtype).tiny
        self._length = _norm(difference).clamp_min(tiny)
        self._squares = {k: _norm(t).square() for k, t in self._difference.items()}
        self._thin = {
            i
            for i, layer in enumerate(path.layers)
            if type(layer.module) is nn.Linear and layer.weight in layer.shared
        }

    def __call__(
        self,
        x: Float[Tensor, "attacks images ..."],
        y: Int[Tensor, "attacks images"],
        alpha: Float[Tensor, " attacks"],
        clients: slice,
        learns: bool,
    ) -> Match:
        """Distance and derivatives.

        Args:
            x: images of attacks on these clients, client by client, equally many on
                each.
            y: labels.
            alpha: of each attack.
            clients: which.
            learns: whether to form the derivative in α.
        """
        gap = 1 - alpha
        moved = {name: t[clients] for name, t in self._difference.items()}
        while True:
            made = self._path.record(
                lambda _: self._nodes(moved, gap), x, y, x.new_ones(len(x))
            )
            unfit = self._unfit(made)
            if not unfit:
                break
            self._thin -= unfit
        return _Comparison(self, made, moved, clients, x).match(learns)

    def _nodes(self, moved: dict[str, Tensor], gap: Tensor) -> list[Node | ThinNode]:
        return [
            (self._thin_node if i in self._thin else self._node)(layer, moved, gap)
            for i, layer in enumerate(self._path.layers)
        ]

    def _thin_node(
        self, layer: KnownLayer, moved: dict[str, Tensor], gap: Tensor
    ) -> ThinNode:
        shape = cast(Tensor, layer.module.weight).shape
        w, b = self._path.tensors(layer, self._initial, 1)
        return ThinNode(
            w.view(shape),
            None if b is None else b[0],
            moved[layer.weight].view(-1, *shape),
            moved.get(layer.bias or ""),
            gap,
        )

    def _node(self, layer: KnownLayer, moved: dict[str, Tensor], gap: Tensor) -> Node:
        between = {
            name: torch.addcmul(
                self._initial[name],
                for_each(moved[name], len(gap)),
                gap[:, None],
                value=-1,
            )
            for name in layer.shared
        }
        return self._path.node(layer, between, len(gap))

    def _unfit(self, made: Recording[Node | ThinNode]) -> set[int]:
        """Layers that are not thin after all, or used more than once."""
        uses = Counter(id(call.node) for call in made.calls)
        return {
            made.nodes.index(call.node)
            for call in made.calls
            if isinstance(call.node, ThinNode)
            and (uses[id(call.node)] > 1 or not call.node.fits(call.a))
        }


@dataclass(eq=False)
class _Sums:
    """Of g and D, float64."""

    along: Tensor
    squares: Tensor

    def add(self, along: Tensor, squares: Tensor) -> None:
        self.along = self.along + along
        self.squares = self.squares + squares


@final
class _Comparison:
    """With u and v, the cotangent of g is c = u D + v g."""

    def __init__(
        self,
        whole: LayeredMatch,
        made: Recording[Node | ThinNode],
        moved: dict[str, Tensor],
        clients: slice,
        x: Tensor,
    ) -> None:
        self._made, self._moved, self._x = made, moved, x
        zero = x.new_zeros(len(x), dtype=torch.float64)
        thin = _Sums(zero, zero)
        self._gradients: dict[str, Tensor] = {}
        with torch.no_grad():
            for call in made.calls:
                if isinstance(call.node, ThinNode):
                    thin.add(*call.node.compared(call.delta))
                else:
                    call.add_gradient(self._gradients, len(x))
            squares = thin.squares + sum(
                _norm(g).square() for g in self._gradients.values()
            )
            smallest = torch.finfo(x.dtype).tiny ** 0.5  # its square is a number too
            self._length = squares.sqrt().clamp_min(smallest)
            self._other = for_each(whole._length[clients], len(x))
            self._residuals = self._apart()
            # ½‖g/‖g‖ − D/‖D‖‖² = 1 − cos, as far as it goes without cancellation.
            value = 1 + thin.squares / self._length.square()
            value = value - 2 * thin.along / (self._length * self._other)
            for name, r in self._residuals.items():
                # Whose part of D is in what is apart already.
                theirs = for_each(whole._squares[name][clients], len(x))
                value = value - theirs / self._other.square()
                value = value + _norm(r).square()
            # A gradient that vanishes has no direction, so it explains nothing.
            vanished = squares.sqrt() < smallest
            self.distance = torch.where(vanished, 1.0, (value / 2).clamp_min(0))

    def match(self, learns: bool) -> Match:
        """The way back. Ends the graph."""
        received = Received()
        u = -1 / (self._length * self._other)
        v = (1 - self.distance) / self._length.square()
        u, v = u.to(self._x), v.to(self._x)
        with torch.no_grad():
            parts = self._cotangents(v)
            for call in self._made.calls:
                node = call.node
                w, b = call.layer.weight, call.layer.bias or ""
                if isinstance(node, ThinNode):
                    wanted = call.a.requires_grad
                    to_delta, to_input = node.receive(u, v, learns, wanted)
                    if wanted and to_input is None:
                        # Calls its second pass in any case.
                        received.add(call.out, torch.zeros_like(call.out))
                    received.add(call.delta, to_delta)
                    received.add(call.a, to_input)
                    continue
                received.through(call, parts.get(w), parts.get(b), len(self._x))
                if learns and isinstance(node, Node):
                    node.direction = self._for_each(w), self._for_each(b)
        (images,) = received.back([self._made.batch])
        slope = None
        if learns:
            slope = u.new_zeros(len(u))
            for node in self._made.nodes:
                slope = slope + node.slope
        return Match(self.distance.to(u), images.reshape(self._x.shape), slope)

    def _apart(self) -> dict[str, Tensor]:
        """g/‖g‖ − D/‖D‖ of these."""
        ours, theirs = (
            (1 / t).to(self._x)[:, None] for t in (self._length, self._other)
        )
        return {
            name: (for_each(self._moved[name], len(g)) * -theirs).addcmul_(g, ours)
            for name, g in self._gradients.items()
        }

    def _cotangents(self, v: Tensor) -> dict[str, Tensor]:
        """(r − D g/‖g‖)/‖g‖ of these, r being what is apart and D the distance."""
        length = self._length.to(v)[:, None]
        share = (self.distance / self._length.square()).to(v)[:, None]
        return {
            name: r.div(length).addcmul_(self._gradients[name], share, value=-1)
            for name, r in self._residuals.items()
        }

    def _for_each(self, name: str) -> Tensor | None:
        """D of a parameter, for each attack; ``None`` where it is not shared."""
        moved = self._moved.get(name)
        return None if moved is None else for_each(moved, len(self._x))


def _norm(t: Tensor) -> Tensor:
    # In float32 the sum of squares would cost the small distances their digits.
    out: Tensor = torch.linalg.vector_norm(t, dim=1, dtype=torch.float64)
    return out
