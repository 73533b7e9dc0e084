"""Gradients of many attacks by a batched forward and one kernel per layer.

The network runs once on the images of all attacks, with its weights as constants, and
autograd takes the loss back to the outputs of its layers. What each layer's weight
gradient is follows from its input and that, so weights of every attack never meet the
network itself. The first layer's input is the image, where nothing follows: it
receives everything in one go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from leakwatch.attacks.matching.engines import Graph, watched_norms
from leakwatch.derivatives.layers.convolutions import Convolution
from leakwatch.derivatives.layers.modules import (
    Layer,
    Layout,
    NotLayerwiseError,
    check_every_layer_known,
    known_layers,
    layouts,
)
from leakwatch.derivatives.runtime import SampleLoss, Weights
from leakwatch.derivatives.safe_ops.substitutes import Substitutes, substituting
from leakwatch.derivatives.verification import refuse_reads_outside_layers

__all__ = ["LayerwisePath", "Layout", "NotLayerwiseError", "layouts"]


@dataclass(frozen=True)
class _Call:
    layer: Layer
    a: Tensor
    out: Tensor
    # When its input is the images themselves; its output is a leaf then.
    first: Convolution | None
    version: int

    @property
    def written(self) -> bool:
        """Whether the output was changed in place after the layer."""
        return self.out._version != self.version


@final
class LayerwisePath:
    """One forward for all attacks, one kernel per layer. See the module's text.

    Args:
        loss: module and criterion, inside an evaluation.
        at: its weights.
        layout: memory format of the images.

    Raises:
        NotLayerwiseError: if a shared parameter belongs to no known layer.
    """

    most: int | None = None

    def __init__(self, loss: SampleLoss, at: Weights, layout: Layout) -> None:
        self.name = self.name_of(layout)
        self._loss = loss
        self._at = at
        self._layout = layout
        self._layers = known_layers(loss, at, layout)
        self._written: set[int] = set()
        self._settled = self._checked = False
        self._names = [name for layer in self._layers for name in layer.names]
        self._buffers = [name for name, _ in loss.named_buffers()]
        check_every_layer_known(self._layers, at)
        sizes = {name: p.numel() for name, p in at.shared.items()}
        self.sizes = [sizes[name] for name in self._names]

    @staticmethod
    def name_of(layout: Layout) -> str:
        """The name of the path with this layout."""
        return f"layerwise, {layout.replace('_', ' ')}"

    def graph(self, x: Tensor, y: Tensor, weight: Tensor, features: bool) -> Graph:
        """See :class:`leakwatch.attacks.matching.engines.Path`."""
        attacks, images = x.shape[:2]
        if not self._checked:
            self._check(x.detach().flatten(0, 1).clone(), y.flatten(0, 1))
        while True:
            batch = x.detach().flatten(0, 1)
            if batch.ndim == 4 and self._layout == "channels_last":
                batch = batch.contiguous(memory_format=torch.channels_last)
            batch = batch.requires_grad_()
            calls: list[_Call] = []
            with (
                watched_norms(self._loss if features else None) as seen,
                self._recording(batch, calls),
                Substitutes(),
            ):
                losses = self._losses(batch, y.flatten(0, 1))
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
        kept = tuple(f.view(attacks, images, *f.shape[1:]) for f in seen)
        return _LayerGraph(self, x, y, batch, calls, deltas, kept)

    @substituting
    def _check(self, batch: Tensor, y: Tensor) -> None:
        with self._recording(batch, []):
            refuse_reads_outside_layers(
                self._loss,
                self._at,
                lambda shared: self._loss.batch(self._tensors() | shared, batch, y),
            )
        self._checked = True

    @substituting
    def settle(self, x: Tensor, y: Tensor) -> None:
        """Leaves the weights in the network, if its forward changes nothing in it.

        Taking them out and looking for changes costs as much as a small network's
        forward.

        Args:
            x: images of one attack, ``(images, *sample)``.
            y: their labels.
        """
        if self._loss.is_quiet(self._tensors(), x, y):
            # Puts them in, to stay until ``holding`` ends.
            self._loss.batch(self._at.shared | self._at.fixed, x, y)
            self._settled = True

    def _losses(self, batch: Tensor, y: Tensor) -> Tensor:
        if self._settled:
            return self._loss.criterion(self._loss.module, batch, y)
        return self._loss.batch(self._tensors(), batch, y)

    def _tensors(self) -> dict[str, Tensor]:
        """All weights; buffers are copied, as a forward may write into them."""
        fixed = self._at.fixed
        copies = {k: fixed[k].clone() for k in self._buffers if k in fixed}
        return self._at.shared | fixed | copies

    def arrange(self, flat: Tensor) -> Tensor:
        """See :class:`leakwatch.attacks.matching.engines.Path`."""
        sizes = [p.numel() for p in self._at.shared.values()]
        parts = dict(zip(self._at.shared, torch.split(flat, sizes, 1), strict=True))
        return torch.cat([k.arrange(parts[n]) for n, k in self._weights()], 1)

    def restore(self, flat: Tensor) -> Tensor:
        """See :class:`leakwatch.attacks.matching.engines.Path`."""
        pieces = zip(self._weights(), torch.split(flat, self.sizes, 1), strict=True)
        parts = {name: kernel.restore(piece) for (name, kernel), piece in pieces}
        return torch.cat([parts[name] for name in self._at.shared], 1)

    def _weights(self) -> Iterator[tuple[str, Any]]:
        for layer in self._layers:
            for i, name in enumerate(layer.names):
                first = i == 0 and layer.made.kernel.has_weight
                yield name, layer.made.kernel if first else _AS_IS

    @contextmanager
    def _recording(self, batch: Tensor, calls: list[_Call]) -> Iterator[None]:
        def replacement(layer: Layer) -> Callable[[Tensor], Tensor]:
            def forward(a: Tensor) -> Tensor:
                made = layer.made
                first = None
                if a is batch and isinstance(made.kernel, Convolution):
                    first = made.kernel
                    a = a.detach()
                    out = made.forward(a).detach().requires_grad_()
                else:
                    a = a if made.prepare is None else made.prepare(a)
                    out = made.forward(a)
                # A leaf must not be written into at all.
                copied = first is not None or id(layer) in self._written
                calls.append(_Call(layer, a, out, first, out._version))
                return out.clone() if copied else out

            return forward

        try:
            for layer in self._layers:
                layer.module.__dict__["forward"] = replacement(layer)
            yield
        finally:
            for layer in self._layers:
                layer.module.__dict__.pop("forward", None)


@final
class _LayerGraph:
    """See :class:`leakwatch.attacks.matching.engines.Graph`."""

    def __init__(
        self,
        path: LayerwisePath,
        x: Tensor,
        y: Tensor,
        batch: Tensor,
        calls: list[_Call],
        deltas: tuple[Tensor, ...],
        features: tuple[Tensor, ...],
    ) -> None:
        self._x, self._y, self._batch = x, y, batch
        self._calls = calls
        self._deltas = deltas
        self.features = features
        attacks = len(x)
        total: dict[int, list[Tensor]] = {}
        self._saved = []
        with torch.no_grad():
            for call, delta in zip(calls, deltas, strict=True):
                parts, saved = call.layer.made.kernel.form(
                    call.a.detach(), delta.detach(), attacks
                )
                self._saved.append(saved)
                before = total.get(id(call.layer))
                if before is not None:
                    parts = [p + q for p, q in zip(before, parts, strict=True)]
                total[id(call.layer)] = parts
            pieces: list[Tensor] = []
            self._slices: dict[int, list[int]] = {}
            for layer in path._layers:
                self._slices[id(layer)] = list(
                    range(len(pieces), len(pieces) + len(layer.names))
                )
                found = total.get(id(layer))
                if found is None:  # not used in this forward
                    found = [
                        x.new_zeros(attacks, path._at.shared[name].numel())
                        for name in layer.names
                    ]
                pieces += found
            self.flat = torch.cat(pieces, 1)
        self._sizes = path.sizes

    def pull(
        self, cotangent: Tensor, extra: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """See :class:`leakwatch.attacks.matching.engines.Graph`."""
        pieces = torch.split(cotangent, self._sizes, 1)
        outputs: list[Tensor] = []
        cotangents: list[Tensor] = []

        def receive(into: Tensor, value: Tensor | None) -> None:
            if value is not None and into.requires_grad:
                outputs.append(into)
                cotangents.append(value)

        own: list[list[Tensor]] = []
        with torch.no_grad():
            for call, delta, saved in zip(
                self._calls, self._deltas, self._saved, strict=True
            ):
                u = [pieces[i] for i in self._slices[id(call.layer)]]
                own.append(u)
                needs_input = call.a.requires_grad
                given, back = call.layer.made.kernel.adjoint(saved, u, needs_input)
                receive(call.a, given)
                receive(delta, back)
        if extra is not None:
            receive(*extra)
        soft = self._y.requires_grad
        firsts = [call for call in self._calls if call.first is not None]
        inputs = [c.out for c in firsts] + [self._batch] + ([self._y] if soft else [])
        with Substitutes():
            found = list(
                torch.autograd.grad(
                    outputs,
                    inputs,
                    cotangents,
                    allow_unused=True,
                    materialize_grads=True,
                )
                if outputs
                else map(torch.zeros_like, inputs)
            )
        image = found[len(firsts)]
        with torch.no_grad():
            for call, saved, u in zip(self._calls, self._saved, own, strict=True):
                constant = call.layer.made.constant
                if call.first is not None and constant is not None:
                    image = image + call.first.pull(
                        saved,
                        u[0] if call.first.has_weight else None,
                        constant.weight,
                        found[firsts.index(call)],
                    )
        return image.reshape(self._x.shape), found[-1] if soft else None


class _AsIs:
    @staticmethod
    def arrange(t: Tensor) -> Tensor:
        return t

    restore = arrange


_AS_IS = _AsIs()
