"""The surrogate's match with w_0 − w_T, layer by layer.

Nothing is formed that has as many numbers as all weights of all attacks: thin linear
layers act through products with w_0 and D = w_0 − w_T (:mod:`update_thin`), and of the
others each has a weight, a gradient and a cotangent of its own size.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from leakwatch.attacks.matching.update_calls import Recorded, own, received
from leakwatch.attacks.matching.update_engines import by_name
from leakwatch.attacks.matching.update_layered import LayeredPath
from leakwatch.attacks.matching.update_layers import Node
from leakwatch.attacks.updates.descent import for_each
from leakwatch.attacks.updates.low_rank import ThinNode

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
        path: LayeredPath,
        initial: Float[Tensor, " d_theta"],
        difference: Float[Tensor, "clients d_theta"],
    ) -> None:
        self._path = path
        self._initial = by_name(path.at, initial[None])
        self._difference = by_name(path.at, difference)
        tiny = torch.finfo(difference.dtype).tiny
        self._length = _norm(difference).clamp_min(tiny)
        self._squares = {
            name: _norm(t.flatten(1)).square() for name, t in self._difference.items()
        }
        self._thin = {
            i
            for i, layer in enumerate(path.layers)
            if type(layer.module) is nn.Linear and layer.names[0].endswith("weight")
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
            made = self._path.record(lambda: self._nodes(moved, gap), x, y)
            unfit = self._unfit(made, len(x))
            if not unfit:
                break
            self._thin -= unfit
        return _Comparison(self, made, moved, clients, x).match(learns)

    def _nodes(self, moved: dict[str, Tensor], gap: Tensor) -> list[Node | ThinNode]:
        return [
            (self._thin_node if i in self._thin else self._node)(i, moved, gap)
            for i in range(len(self._path.layers))
        ]

    def _thin_node(self, i: int, moved: dict[str, Tensor], gap: Tensor) -> ThinNode:
        w, b = self._path.tensors(i, self._initial, 1)
        dw, db = own(self._path.layers[i].names, moved)
        assert dw is not None
        return ThinNode(w[0], None if b is None else b[0], dw, db, gap)

    def _node(self, i: int, moved: dict[str, Tensor], gap: Tensor) -> Node:
        at = {
            name: torch.addcmul(
                self._initial[name],
                for_each(moved[name], len(gap)),
                gap.view(-1, *[1] * (moved[name].ndim - 1)),
                value=-1,
            )
            for name in self._path.layers[i].names
        }
        return self._path.node(i, at, len(gap))

    def _unfit(self, made: Recorded[Node | ThinNode], attacks: int) -> set[int]:
        """Layers that are not thin after all, or used more than once."""
        uses = Counter(call.layer for call in made.calls)
        unfit: set[int] = set()
        for call in made.calls:
            layer = self._path.layers[call.layer].module
            if call.layer in self._thin and isinstance(layer, nn.Linear):
                fits = ThinNode.fits(layer.weight, call.a, attacks)
                if uses[call.layer] > 1 or not fits:
                    unfit.add(call.layer)
        return unfit


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
        made: Recorded[Node | ThinNode],
        moved: dict[str, Tensor],
        clients: slice,
        x: Tensor,
    ) -> None:
        self._layers = whole._path.layers
        self._made, self._moved, self._x = made, moved, x
        zero = x.new_zeros(len(x), dtype=torch.float64)
        thin = _Sums(zero, zero)
        with torch.no_grad():
            for call, delta in zip(made.calls, made.deltas, strict=True):
                node = made.nodes[call.layer]
                if isinstance(node, ThinNode):
                    thin.add(*node.compared(delta))
                else:
                    node.collects = True
                    node.note(call.rows, call.a, delta.detach(), True)
                    node.collects = False
            self._gradients = self._collected()
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
        outputs: list[Tensor] = []
        cotangents: list[Tensor] = []

        def receive(into: Tensor, value: Tensor | None) -> None:
            if value is not None and into.requires_grad:
                outputs.append(into)
                cotangents.append(value)

        u = -1 / (self._length * self._other)
        v = (1 - self.distance) / self._length.square()
        u, v = u.to(self._x), v.to(self._x)
        with torch.no_grad():
            parts = self._cotangents(v)
            for call, delta in zip(self._made.calls, self._made.deltas, strict=True):
                node, wanted = self._made.nodes[call.layer], call.a.requires_grad
                if isinstance(node, ThinNode):
                    given, taken = node.receive(u, v, learns, wanted)
                    if wanted and taken is None:
                        # Calls its second pass in any case.
                        receive(call.out, torch.zeros_like(call.out))
                else:
                    pair = own(self._layers[call.layer].names, parts)
                    given, taken = received(node, call, delta, *pair)
                    if learns:
                        node.direction = self._direction(call.layer)
                receive(delta, given)
                receive(call.a, taken)
        batch = self._made.batch
        images = torch.zeros_like(batch)
        if outputs:
            (images,) = torch.autograd.grad(
                outputs,
                [batch],
                cotangents,
                allow_unused=True,
                materialize_grads=True,
            )
        slope = None
        if learns:
            slope = u.new_zeros(len(u))
            for node in self._made.nodes:
                slope = slope + node.slope
        return Match(self.distance.to(u), images.reshape(self._x.shape), slope)

    def _collected(self) -> dict[str, Tensor]:
        """Gradients of all layers that are not thin, ``(attacks, numbers)``."""
        found: dict[str, Tensor] = {}
        for layer, node in zip(self._layers, self._made.nodes, strict=True):
            if isinstance(node, ThinNode) or node.received is None:
                continue
            for name in layer.names:
                t = node.received[0 if name.endswith(".weight") else 1]
                if t is not None:
                    found[name] = t.flatten(1)
        return found

    def _apart(self) -> dict[str, Tensor]:
        """g/‖g‖ − D/‖D‖ of these."""
        ours, theirs = (
            (1 / t).to(self._x)[:, None] for t in (self._length, self._other)
        )
        return {
            name: (self._for_each(name).flatten(1) * -theirs).addcmul_(g, ours)
            for name, g in self._gradients.items()
        }

    def _cotangents(self, v: Tensor) -> dict[str, Tensor]:
        """(r − D g/‖g‖)/‖g‖ of these, r being what is apart and D the distance."""
        length = self._length.to(v)[:, None]
        share = (self.distance / self._length.square()).to(v)[:, None]
        return {
            name: r.div(length)
            .addcmul_(self._gradients[name], share, value=-1)
            .view(len(r), *self._moved[name].shape[1:])
            for name, r in self._residuals.items()
        }

    def _direction(self, layer: int) -> tuple[Tensor | None, Tensor | None]:
        names = self._layers[layer].names
        return own(names, {name: self._for_each(name) for name in names})

    def _for_each(self, name: str) -> Tensor:
        return for_each(self._moved[name], len(self._x))


def _norm(t: Tensor) -> Tensor:
    # In float32 the sum of squares would cost the small distances their digits.
    out: Tensor = torch.linalg.vector_norm(t, dim=1, dtype=torch.float64)
    return out
