"""One forward for all attacks, in which each layer has weights of each attack."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor

from leakwatch.attacks.matching.update_calls import (
    Call,
    NodeT,
    Placed,
    Recorded,
    own,
    received,
)
from leakwatch.attacks.matching.update_engines import Pulled, UpdateGraph, by_name
from leakwatch.attacks.matching.update_layers import Node
from leakwatch.derivatives.layers.modules import (
    NotLayerwiseError,
    check_every_layer_known,
    known_layers,
)
from leakwatch.derivatives.layers.update_operators import operator_of
from leakwatch.derivatives.runtime import SampleLoss, Weights
from leakwatch.derivatives.safe_ops.pointwise import Lean
from leakwatch.derivatives.safe_ops.substitutes import Substitutes, substituting
from leakwatch.derivatives.verification import refuse_reads_outside_layers

__all__ = ["LayeredPath"]


@final
class LayeredPath:
    """One forward for all attacks, in which each layer has weights of each attack.

    Args:
        loss: module and criterion, inside an evaluation.
        at: names and shapes of the weights.

    Raises:
        NotLayerwiseError: if a shared parameter belongs to no known layer.
    """

    name = "layers"

    def __init__(self, loss: SampleLoss, at: Weights) -> None:
        self._loss = loss
        self.at = at
        self.layers = known_layers(loss, at, "contiguous")
        self._operators = [operator_of(layer) for layer in self.layers]
        check_every_layer_known(self.layers, at)
        self._module_names = {id(m): name for name, m in loss.named_modules()}
        self._buffers = {name for name, _ in loss.named_buffers()}
        self._written: set[int] = set()
        self._settled = self._checked = False

    def graph(self, w: Tensor, x: Tensor, y: Tensor) -> UpdateGraph:
        """See :class:`UpdatePath`."""
        weights, attacks = by_name(self.at, w), len(x)
        every = range(len(self.layers))
        made = self.record(
            lambda: [self.node(i, weights, attacks) for i in every], x, y
        )
        names = [layer.names for layer in self.layers]
        return _LayeredGraph(self.at, x, names, made)

    def record(
        self, nodes: Callable[[], list[NodeT]], x: Tensor, y: Tensor
    ) -> Recorded[NodeT]:
        """One forward, and the way back to the outputs of all layers.

        Args:
            nodes: makes what takes the place of each layer, in their order.
            x: images, ``(attacks, images, *sample)``.
            y: labels, ``(attacks, images)``.
        """
        attacks, images = x.shape[:2]
        if not self._checked:
            self._check(nodes(), x.detach().flatten(0, 1).clone(), y.flatten(0, 1))
        while True:
            placed = nodes()
            batch = x.detach().flatten(0, 1)
            if batch.ndim == 4:
                batch = batch.contiguous(memory_format=torch.channels_last)
            batch = batch.requires_grad_()
            calls: list[Call] = []
            with self._recording(placed, calls), Lean(), Substitutes():
                losses = self._losses(batch, y.flatten(0, 1))
                total = losses.view(attacks, images).mean(1).sum()
            written = {c.layer for c in calls if c.out._version != c.version}
            if not written - self._written:
                break
            # Something wrote into what was recorded: from now on it gets a copy.
            self._written |= written
        deltas = torch.autograd.grad(
            total,
            [c.out for c in calls],
            create_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )
        return Recorded(batch, placed, calls, list(deltas))

    @substituting
    def _check(self, nodes: Sequence[Placed], batch: Tensor, y: Tensor) -> None:
        with self._recording(nodes, []):
            refuse_reads_outside_layers(
                self._loss,
                self.at,
                lambda shared: self._loss.batch(self._tensors() | shared, batch, y),
            )
        self._checked = True

    @substituting
    def settle(self, x: Tensor, y: Tensor) -> None:
        """Leaves buffers in the network, if its forward changes nothing in it.

        To be called while the loss is holding, see :meth:`SampleLoss.holding`.

        Args:
            x: images of one attack, ``(images, *sample)``.
            y: their labels.
        """
        if self._loss.is_quiet(self._tensors(), x, y):
            # Puts them in, to stay until ``holding`` ends.
            self._loss.batch(self._tensors(), x, y)
            self._settled = True

    def _losses(self, batch: Tensor, y: Tensor) -> Tensor:
        if self._settled:
            return self._loss.criterion(self._loss.module, batch, y)
        return self._loss.batch(self._tensors(), batch, y)

    def node(self, i: int, weights: dict[str, Tensor], attacks: int) -> Node:
        """A layer with these weights.

        Args:
            i: which.
            weights: by name, ``(attacks, …)``; fixed ones need not be there.
            attacks: how many.
        """
        w, b = self.tensors(i, weights, attacks)
        return Node(self._operators[i][0], w, b)

    def tensors(
        self, i: int, weights: dict[str, Tensor], attacks: int
    ) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of a layer, see :meth:`node`."""
        prefix = self._module_names[id(self.layers[i].module)]

        def of(kind: str) -> Tensor | None:
            name = f"{prefix}.{kind}"
            fixed = self.at.fixed.get(name)
            if fixed is not None:
                fixed = fixed.expand(attacks, *fixed.shape)
            return weights.get(name, fixed)

        w = of("weight")
        if w is None:  # pragma: no cover - every known layer has one
            raise NotLayerwiseError(f"{prefix} has no weight")
        return w, of("bias")

    def _tensors(self) -> dict[str, Tensor]:
        """All tensors; buffers are copied, as a forward may write into them."""
        fixed = self.at.fixed
        copies = {k: fixed[k].clone() for k in self._buffers if k in fixed}
        return self.at.shared | fixed | copies

    @contextmanager
    def _recording(self, nodes: Sequence[Placed], calls: list[Call]) -> Iterator[None]:
        def replacement(i: int) -> Callable[[Tensor], Tensor]:
            prepare = self._operators[i][1]

            def forward(a: Tensor) -> Tensor:
                if prepare is not None:
                    a = prepare(a)
                out, rows = nodes[i](a)
                calls.append(Call(i, a, rows, out))
                return out.clone() if i in self._written else out

            return forward

        try:
            for i, layer in enumerate(self.layers):
                layer.module.__dict__["forward"] = replacement(i)
            yield
        finally:
            for layer in self.layers:
                layer.module.__dict__.pop("forward", None)


@final
class _LayeredGraph:
    """See :class:`UpdateGraph`."""

    def __init__(
        self,
        at: Weights,
        x: Tensor,
        names: list[tuple[str, ...]],
        made: Recorded[Node],
    ) -> None:
        self._at, self._x, self._names = at, x, names
        self._batch, self._nodes, self._calls, self._deltas = made
        with torch.no_grad():
            for call, delta in zip(self._calls, self._deltas, strict=True):
                node = self._nodes[call.layer]
                node.collects = True
                node.note(call.rows, call.a, delta.detach(), True)
                node.collects = False
            self.flat = self._collected()

    def pull(
        self, cotangent: Tensor, *, along: Tensor | None = None, weights: bool = False
    ) -> Pulled:
        """See :class:`UpdateGraph`."""
        parts = by_name(self._at, cotangent)
        outputs: list[Tensor] = []
        cotangents: list[Tensor] = []

        def receive(into: Tensor, value: Tensor | None) -> None:
            if value is not None and into.requires_grad:
                outputs.append(into)
                cotangents.append(value)

        with torch.no_grad():
            for call, delta in zip(self._calls, self._deltas, strict=True):
                node = self._nodes[call.layer]
                pair = own(self._names[call.layer], parts)
                given, taken = received(node, call, delta, *pair)
                receive(delta, given)
                receive(call.a, taken)
        directions = {} if along is None else by_name(self._at, along)
        for node, names in zip(self._nodes, self._names, strict=True):
            node.collects = weights
            if along is not None:
                node.direction = own(names, directions)
        if not outputs:
            image = torch.zeros_like(self._batch)
        else:
            (image,) = torch.autograd.grad(
                outputs,
                [self._batch],
                cotangents,
                allow_unused=True,
                materialize_grads=True,
            )
        slope = None
        if along is not None:
            slope = image.new_zeros(len(self._x)) + sum(n.slope for n in self._nodes)
        found = self._collected() if weights else None
        return Pulled(image.reshape(self._x.shape), slope, found)

    def _collected(self) -> Tensor:
        """What the weights received, in the order of parameters; and forgets it."""
        parts: dict[str, Tensor] = {}
        for node, names in zip(self._nodes, self._names, strict=True):
            received, node.received = node.received, None
            if received is None:
                continue
            for name in names:
                t = received[0 if name.endswith(".weight") else 1]
                if t is not None:
                    parts[name] = t.flatten(1)
        rows = len(self._x)
        return torch.cat(
            [
                parts[name] if name in parts else p.new_zeros(rows, p.numel())
                for name, p in self._at.shared.items()
            ],
            1,
        )
