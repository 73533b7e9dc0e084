"""Gradients of many attacks by one forward for all, taken apart at its layers.

The network runs once on the images of all attacks, and autograd takes the loss back to
the outputs of its layers. What each layer's weight gradient is follows from its input
and from that, by the layer's products (:mod:`leakwatch.derivatives.layers.products`),
and so does the way back.

Attacks on gradients share the network's weights, which are constants then: no weight of
an attack ever meets the network. The first layer's input is the image, where nothing
follows: it receives everything in one go. Attacks on updates have weights of their own,
and each layer is a :class:`Node` with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, cast, final

import torch
from torch import Tensor
from torch.autograd import Function

from leakwatch.attacks.matching.engines import Graph, Pulled, watched_norms
from leakwatch.derivatives.layers.convolutions import Patches
from leakwatch.derivatives.layers.modules import (
    KnownLayer,
    check_every_layer_known,
    known_layers,
)
from leakwatch.derivatives.layers.products import LayerProducts, Layout
from leakwatch.derivatives.runtime import SampleLoss, Weights
from leakwatch.derivatives.safe_ops.pointwise import Lean
from leakwatch.derivatives.safe_ops.substitutes import Substitutes, substituting
from leakwatch.derivatives.verification import refuse_reads_outside_layers

__all__ = ["LayerCall", "LayerwisePath", "Node", "Placed", "Received", "Recording"]


class Placed(Protocol):
    """What takes the place of a layer."""

    def __call__(self, a: Tensor) -> tuple[Tensor, Tensor | None]:
        """The layer's output, twice differentiable in this input.

        Also the input in the form of products, if that had to be formed.
        """


NodeT = TypeVar("NodeT", bound=Placed)


@final
@dataclass(eq=False)
class LayerCall:
    """One call of a layer.

    Attributes:
        layer: that was called.
        node: what took its place.
        a: its input.
        out: its output.
        inputs: a in the form of products; ``None`` until somebody needs it.
        first: whether a is the images; the output is a leaf then.
        version: of the output, as the layer made it.
        delta: δ, what the output received, with a graph; after the backward pass.
        backprops: δ in the form of products; ``None`` until somebody needs it.
    """

    layer: KnownLayer
    node: Placed
    a: Tensor
    out: Tensor
    inputs: Tensor | None
    first: bool
    version: int = field(init=False)
    delta: Tensor = field(init=False)
    backprops: Tensor | None = None

    def __post_init__(self) -> None:
        self.version = self.out._version

    @property
    def written(self) -> bool:
        """Whether the output was changed in place after the layer."""
        return self.out._version != self.version

    def forms(self, rows: int) -> tuple[Tensor, Tensor]:
        """A and δ in the form of products."""
        products = self.layer.rule.products
        if self.inputs is None or len(self.inputs) != rows:
            self.inputs = products.inputs(self.a.detach(), rows)
        if self.backprops is None:
            self.backprops = products.backprops(self.delta.detach(), rows)
        return self.inputs, self.backprops

    def add_gradient(self, parts: dict[str, Tensor], rows: int) -> None:
        """Adds the gradients of weight and bias, as far as they are shared, by name."""
        products, (inputs, d) = self.layer.rule.products, self.forms(rows)
        for name in self.layer.shared:
            t = (
                products.weight_grad(inputs, d)
                if name == self.layer.weight
                else products.bias_grad(d)
            )
            parts[name] = parts[name] + t if name in parts else t


class Recording(NamedTuple, Generic[NodeT]):
    """A forward of all attacks and what the outputs of its layers received.

    Attributes:
        batch: all images, a leaf.
        nodes: that took the place of the layers.
        calls: of them, in order, with what each output received.
        features: inputs of BatchNorm layers, if asked for.
    """

    batch: Tensor
    nodes: list[NodeT]
    calls: list[LayerCall]
    features: tuple[Tensor, ...]


@final
class LayerwisePath:
    """One forward for all attacks, taken apart at its layers. See the module's text.

    Args:
        loss: module and criterion, inside an evaluation.
        at: its weights.
        layout: memory format of the images; ``None`` for attacks with weights of their
            own, of which names and shapes are as in ``at``.

    Raises:
        NotLayerwiseError: if a shared parameter belongs to no known layer.

    Attributes:
        at: as given.
        layers: of the network.
        by_parameter: the order of parameters, see :class:`Order`.
    """

    most: int | None = None

    def __init__(self, loss: SampleLoss, at: Weights, layout: Layout | None) -> None:
        self.name = "layers" if layout is None else self.name_of(layout)
        self.at = at
        self.layers = known_layers(loss, at, layout)
        check_every_layer_known(self.layers, at)
        self._loss = loss
        self._own_weights = layout is None
        self._layout: Layout = "channels_last" if layout is None else layout
        self._buffers = [name for name, _ in loss.named_buffers()]
        self._written: set[int] = set()
        self._settled = self._checked = False
        self._own = Order(
            {name: at.shared[name].numel() for k in self.layers for name in k.shared}
        )
        self.by_parameter = Order(
            {name: p.numel() for name, p in at.shared.items()},
            {k.weight: k.rule.products for k in self.layers},
        )

    @staticmethod
    def name_of(layout: Layout) -> str:
        """The name of the path with this layout."""
        return f"layerwise, {layout.replace('_', ' ')}"

    def graph(self, x: Tensor, y: Tensor, weight: Tensor, features: bool) -> Graph:
        """See :class:`leakwatch.attacks.matching.engines.Path`."""
        recording = self.record(
            lambda batch: [self._constant(layer, batch) for layer in self.layers],
            x,
            y,
            weight,
            features,
        )
        return _LayerwiseGraph(self.layers, x, y, recording, self._own)

    def graph_at(self, w: Tensor, x: Tensor, y: Tensor) -> Graph:
        """See :class:`leakwatch.attacks.matching.engines.UpdatePath`."""
        parts, attacks = self.by_parameter.split(w), len(x)
        recording = self.record(
            lambda _: [self.node(k, parts, attacks) for k in self.layers],
            x,
            y,
            x.new_ones(attacks),
        )
        return _LayerwiseGraph(self.layers, x, y, recording, self.by_parameter)

    def record(
        self,
        nodes: Callable[[Tensor], list[NodeT]],
        x: Tensor,
        y: Tensor,
        weight: Tensor,
        features: bool = False,
    ) -> Recording[NodeT]:
        """One forward, and the way back to the outputs of all layers.

        Args:
            nodes: makes what takes the place of each layer, in their order, for a batch
                of all images.
            x: images, ``(attacks, images, *sample)``.
            y: labels or soft targets of each.
            weight: factor on each attack's loss.
            features: whether the inputs of BatchNorm layers are kept.
        """
        attacks, images = x.shape[:2]
        labels = y.flatten(0, 1)
        if not self._checked:
            batch = x.detach().flatten(0, 1).clone()
            self._check(nodes(batch), batch, labels)
        while True:
            batch = x.detach().flatten(0, 1)
            if batch.ndim == 4 and self._layout == "channels_last":
                batch = batch.contiguous(memory_format=torch.channels_last)
            batch = batch.requires_grad_()
            placed = nodes(batch)
            calls: list[LayerCall] = []
            with (
                watched_norms(self._loss if features else None) as seen,
                self._recording(placed, calls),
                # With weights of their own, layers leave most of the time to others.
                Lean() if self._own_weights else nullcontext(),
                Substitutes(),
            ):
                losses = self._losses(batch, labels)
                total = losses.view(attacks, images).sum(1) @ (weight / images)
            written = {id(call.layer) for call in calls if call.written}
            if not written - self._written:
                break
            # Something wrote into what was recorded: from now on it gets a copy.
            self._written |= written
        # Also where a checkpointed part of the forward runs again.
        with Substitutes():
            deltas = torch.autograd.grad(
                total,
                [call.out for call in calls],
                create_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
        for call, delta in zip(calls, deltas, strict=True):
            call.delta = delta
        kept = tuple(f.view(attacks, images, *f.shape[1:]) for f in seen)
        return Recording(batch, placed, calls, kept)

    @substituting
    def settle(self, x: Tensor, y: Tensor) -> None:
        """Leaves the weights in the network, if its forward changes nothing in it.

        Taking them out and looking for changes costs as much as a small network's
        forward. To be called while the loss is holding, see
        :meth:`SampleLoss.holding`.

        Args:
            x: images of one attack, ``(images, *sample)``.
            y: their labels.
        """
        if self._loss.is_quiet(self._tensors(), x, y):
            # Puts them in, to stay until ``holding`` ends.
            self._loss.batch(self._tensors(), x, y)
            self._settled = True

    def arrange(self, flat: Tensor) -> Tensor:
        """See :class:`leakwatch.attacks.matching.engines.Path`."""
        return self._own.join(self.by_parameter.split(flat), flat)

    def restore(self, flat: Tensor) -> Tensor:
        """See :class:`leakwatch.attacks.matching.engines.Path`."""
        return self.by_parameter.join(self._own.split(flat), flat)

    def node(self, layer: KnownLayer, parts: Mapping[str, Tensor], rows: int) -> Node:
        """A layer with these weights, see :meth:`tensors`."""
        return Node(layer.rule.products, *self.tensors(layer, parts, rows))

    def tensors(
        self, layer: KnownLayer, parts: Mapping[str, Tensor], rows: int
    ) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of a layer, ``(rows, numbers)``, as products have them.

        Args:
            layer: which.
            parts: by name; the network's own for what is missing.
            rows: how many attacks.
        """
        every = self.at.shared | self.at.fixed

        def of(name: str) -> Tensor:
            if name in parts:
                return parts[name]
            own = every[name].detach().reshape(1, -1)
            if name == layer.weight:
                own = layer.rule.products.arrange(own)
            return own.expand(rows, -1)

        return of(layer.weight), None if layer.bias is None else of(layer.bias)

    def _constant(self, layer: KnownLayer, batch: Tensor) -> Placed:
        """A layer with the network's own weights, which are constants."""
        rule = layer.rule
        forward = rule.forward
        if forward is None:
            return self.node(layer, {}, 1)
        # Nothing comes before the first layer, so that its output is where the graph
        # begins.
        may_be_first = isinstance(rule.products, Patches)

        def constant(a: Tensor) -> tuple[Tensor, None]:
            if may_be_first and a is batch:
                return forward(a.detach()).detach().requires_grad_(), None
            return forward(a), None

        return constant

    @substituting
    def _check(self, nodes: Sequence[Placed], batch: Tensor, y: Tensor) -> None:
        with self._recording(nodes, []):
            refuse_reads_outside_layers(
                self._loss,
                self.at,
                lambda shared: self._loss.batch(self._tensors() | shared, batch, y),
            )
        self._checked = True

    def _losses(self, batch: Tensor, y: Tensor) -> Tensor:
        if self._settled:
            return self._loss.losses(batch, y)
        return self._loss.batch(self._tensors(), batch, y)

    def _tensors(self) -> dict[str, Tensor]:
        """All weights; buffers are copied, as a forward may write into them."""
        fixed = self.at.fixed
        copies = {k: fixed[k].clone() for k in self._buffers if k in fixed}
        return self.at.shared | fixed | copies

    @contextmanager
    def _recording(
        self, nodes: Sequence[Placed], calls: list[LayerCall]
    ) -> Iterator[None]:
        def replacement(layer: KnownLayer, node: Placed) -> Callable[[Tensor], Tensor]:
            prepare = layer.rule.prepare

            def forward(a: Tensor) -> Tensor:
                a = a if prepare is None else prepare(a)
                out, inputs = node(a)
                first = out.is_leaf and out.requires_grad
                a = a.detach() if first else a
                calls.append(LayerCall(layer, node, a, out, inputs, first))
                # A leaf must not be written into at all.
                return out.clone() if first or id(layer) in self._written else out

            return forward

        try:
            for layer, node in zip(self.layers, nodes, strict=True):
                layer.module.__dict__["forward"] = replacement(layer, node)
            yield
        finally:
            for layer in self.layers:
                layer.module.__dict__.pop("forward", None)


@final
class Order:
    """How parameters stand in a flat tensor.

    Args:
        sizes: numbers of each, by name, in order.
        products: of the weights that stand in the order of parameters; all others are
            as products take them.
    """

    def __init__(
        self, sizes: dict[str, int], products: Mapping[str, LayerProducts] | None = None
    ) -> None:
        self._sizes, self._products = sizes, products or {}

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """By name, ``(rows, numbers)``, as products take them."""
        pieces = torch.split(flat, list(self._sizes.values()), 1)
        return {
            name: self._products[name].arrange(t) if name in self._products else t
            for name, t in zip(self._sizes, pieces, strict=True)
        }

    def join(self, parts: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """The inverse of :meth:`split`; zeros for what is missing.

        Args:
            parts: by name.
            like: gives rows, type and device.
        """
        pieces = []
        for name, size in self._sizes.items():
            t = parts.get(name)
            if t is None:
                t = like.new_zeros(len(like), size)
            elif name in self._products:
                t = self._products[name].restore(t)
            pieces.append(t)
        return torch.cat(pieces, 1)


@final
class Node:
    """A layer of which every attack has weights of its own.

    In a backward pass through a derivative it can note what its weights receive, as a
    whole or along a direction.

    Args:
        products: of the layer.
        w: weights, ``(attacks, numbers)``, as products have them.
        b: biases, ``None`` for none.

    Attributes:
        products: as given.
        rows: how many attacks.
        collects: whether what the weights receive is added up.
        direction: of weights and biases, along which it is added up instead.
        received: the sum for weights and biases, as products have them.
        slope: the sum along the direction.
    """

    def __init__(self, products: LayerProducts, w: Tensor, b: Tensor | None) -> None:
        self.products = products
        self.rows = len(w)
        self._w, self._b = w, b
        self.collects = False
        self.direction: tuple[Tensor | None, Tensor | None] | None = None
        self.received: tuple[Tensor, Tensor | None] | None = None
        self.slope: Tensor | float = 0.0

    def __call__(self, a: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`Placed`."""
        inputs = self.products.inputs(a.detach(), self.rows)
        return _node_output(a, self, inputs), inputs

    def output(self, inputs: Tensor, like: Tensor) -> Tensor:
        """W a + b, without derivatives."""
        return self.products.output_adjoint(self._w, self._b, inputs, like)

    def output_of_tangent(self, inputs: Tensor, like: Tensor) -> Tensor:
        """W a for a tangent of the input."""
        return self.products.output_adjoint(self._w, None, inputs, like)

    def adjoint(self, delta: Tensor, like: Tensor) -> Tensor:
        """Wᵀδ."""
        d = self.products.backprops(delta, self.rows)
        return self.products.input_adjoint(self._w, d, like)

    def note(
        self, inputs: Tensor, delta: Tensor, like: Tensor, with_bias: bool
    ) -> None:
        """What the weights receive through W a when the output receives δ.

        Args:
            inputs: a in the form of products.
            delta: δ.
            like: a, of which only shape and format are read.
            with_bias: whether the biases receive δ too.
        """
        if self.direction is None and not self.collects:
            return
        d = self.products.backprops(delta, self.rows)
        if self.direction is not None:
            w, b = self.direction
            w = torch.zeros_like(self._w) if w is None else w
            b = b if with_bias else None
            self.slope = self.slope + self.products.along(w, b, inputs, d, like)
        if not self.collects:
            return
        weight, bias = self.products.weight_grad(inputs, d), None
        if with_bias and self._b is not None:
            bias = self.products.bias_grad(d)
        if self.received is not None:
            before, shift = self.received
            weight = weight.add_(before)
            bias = shift if bias is None else bias if shift is None else bias + shift
        self.received = weight, bias


class _NodeOutput(Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, node: Node, inputs: Tensor) -> Tensor:
        ctx.node, ctx.like, ctx.inputs = node, a.detach(), inputs
        return _owned(node.output(inputs, a))

    @staticmethod
    def backward(ctx: Any, back: Tensor) -> tuple[Tensor, None, None]:
        ctx.node.note(ctx.inputs, back.detach(), ctx.like, True)
        return _node_adjoint(back, ctx.node, ctx.like), None, None


class _NodeAdjoint(Function):
    @staticmethod
    def forward(ctx: Any, delta: Tensor, node: Node, like: Tensor) -> Tensor:
        ctx.node, ctx.like, ctx.delta = node, like, delta.detach()
        return node.adjoint(delta, like)

    @staticmethod
    def backward(ctx: Any, back: Tensor) -> tuple[Tensor, None, None]:
        # ⟨back, Wᵀδ⟩ = ⟨W back, δ⟩: the same map, from the other side.
        inputs = ctx.node.products.tangents(back.detach(), ctx.node.rows)
        ctx.node.note(inputs, ctx.delta, ctx.like, False)
        return ctx.node.output_of_tangent(inputs, ctx.like), None, None


_node_output: Callable[[Tensor, Node, Tensor], Tensor] = _NodeOutput.apply
_node_adjoint: Callable[[Tensor, Node, Tensor], Tensor] = _NodeAdjoint.apply


def _owned(t: Tensor) -> Tensor:
    """The same memory as no view of anything, so that a network may write into it."""
    if not t._is_view():
        return t
    own = t.new_empty(0)
    own.set_(t.untyped_storage(), t.storage_offset(), t.shape, t.stride())
    return own


@final
class Received:
    """Collects what differentiable tensors receive, and takes it back to inputs."""

    def __init__(self) -> None:
        self._outputs: list[Tensor] = []
        self._cotangents: list[Tensor] = []

    def add(self, into: Tensor, value: Tensor | None) -> None:
        """Notes that a tensor receives a value, if anything depends on that."""
        if value is not None and into.requires_grad:
            self._outputs.append(into)
            self._cotangents.append(value)

    def through(
        self, call: LayerCall, u: Tensor | None, b: Tensor | None, rows: int
    ) -> None:
        """What δ and a receive from ⟨U, δ aᵀ⟩ + ⟨b, δ⟩: U a + b and Uᵀδ.

        Args:
            call: of a layer.
            u: U of each attack, ``None`` for none.
            b: of the bias, ``None`` for none.
            rows: how many attacks.
        """
        products, (inputs, d) = call.layer.rule.products, call.forms(rows)
        if u is not None and call.a.requires_grad:
            self.add(call.a, products.input_adjoint(u, d, call.a))
        if u is None and b is not None:
            u = b.new_zeros(rows, cast(Tensor, call.layer.module.weight).numel())
        if u is not None and call.delta.requires_grad:
            out = products.output_adjoint(u, b, inputs, call.a)
            # What follows should meet one memory format only.
            self.add(
                call.delta, out.contiguous() if call.delta.is_contiguous() else out
            )

    def back(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """What the inputs receive."""
        if not self._outputs:
            return list(map(torch.zeros_like, inputs))
        with Substitutes():
            return list(
                torch.autograd.grad(
                    self._outputs,
                    inputs,
                    self._cotangents,
                    allow_unused=True,
                    materialize_grads=True,
                )
            )


@final
class _LayerwiseGraph:
    """See :class:`leakwatch.attacks.matching.engines.Graph`."""

    def __init__(
        self,
        layers: Sequence[KnownLayer],
        x: Tensor,
        y: Tensor,
        recording: Recording[Any],
        order: Order,
    ) -> None:
        self._layers, self._x, self._y = layers, x, y
        self._recording, self._order = recording, order
        self.features = recording.features
        parts: dict[str, Tensor] = {}
        with torch.no_grad():
            for call in recording.calls:
                call.add_gradient(parts, len(x))
            self.flat = order.join(parts, x.flatten(1))

    def pull(
        self,
        cotangent: Tensor,
        extra: tuple[Tensor, Tensor] | None = None,
        *,
        along: Tensor | None = None,
        weights: bool = False,
    ) -> Pulled:
        """See :class:`leakwatch.attacks.matching.engines.Graph`."""
        made, received = self._recording, Received()
        parts = self._order.split(cotangent)
        with torch.no_grad():
            for call in made.calls:
                u, b = parts.get(call.layer.weight), parts.get(call.layer.bias or "")
                received.through(call, u, b, len(self._x))
        if extra is not None:
            received.add(*extra)
        self._ask(along, weights)
        soft = [self._y] if self._y.requires_grad else []
        firsts = [call for call in made.calls if call.first]
        inputs = [*(call.out for call in firsts), made.batch, *soft]
        back = received.back(inputs)
        image = back[len(firsts)]
        with torch.no_grad():
            for call, z in zip(firsts, back, strict=False):
                products, w = call.layer.rule.products, call.layer.rule.weight
                if isinstance(products, Patches) and w is not None:
                    u, d = parts.get(call.layer.weight), call.forms(len(self._x))[1]
                    image = image + products.both_adjoints(u, d, w, z, call.a)
        slope = None
        if along is not None:
            slope = image.new_zeros(len(self._x))
            slope = slope + sum(node.slope for node in made.nodes)
        return Pulled(
            image.reshape(self._x.shape),
            back[-1] if soft else None,
            slope,
            self._collected() if weights else None,
        )

    def _ask(self, along: Tensor | None, weights: bool) -> None:
        """Asks the nodes for what their weights receive."""
        if along is None and not weights:
            return
        directions = {} if along is None else self._order.split(along)
        for layer, node in zip(self._layers, self._recording.nodes, strict=True):
            node.collects = weights
            if along is not None:
                w, b = directions.get(layer.weight), directions.get(layer.bias or "")
                node.direction = w, b

    def _collected(self) -> Tensor:
        """What the weights received."""
        parts: dict[str, Tensor] = {}
        for layer, node in zip(self._layers, self._recording.nodes, strict=True):
            for name, t in zip(
                (layer.weight, layer.bias), node.received or (), strict=False
            ):
                if name in layer.shared and t is not None:
                    parts[name] = t
        return self._order.join(parts, self._x.flatten(1))
