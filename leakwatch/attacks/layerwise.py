"""Gradients of many attacks by a batched forward and one kernel per layer.

The network runs once on the images of all attacks, with its weights as constants, and
autograd takes the loss back to the outputs of its layers. What each layer's weight
gradient is follows from its input and that, so weights of every attack never meet the
network itself. The first layer's input is the image, where nothing follows: it
receives everything in one go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leakwatch.attacks.kernels import (
    Affine,
    Convolution,
    GroupedConvolution,
    Kernel,
    Linear,
)
from leakwatch.attacks.paths import Graph, watched_norms
from leakwatch.attacks.quiet import is_quiet
from leakwatch.evaluation import SampleLoss, Weights

__all__ = ["LayerwisePath", "Layout", "NotLayerwiseError", "layouts"]

_BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
Layout = Literal["channels_last", "contiguous"]


class NotLayerwiseError(RuntimeError):
    """The network's shared parameters don't all belong to layers that are known."""


@dataclass(frozen=True)
class _Made:
    """How a layer is computed with constant weights."""

    kernel: Kernel
    forward: Callable[[Tensor], Tensor]
    weight: Tensor | None = None
    prepare: Callable[[Tensor], Tensor] | None = None  # what comes before the kernel


@dataclass(frozen=True)
class _Layer:
    module: nn.Module
    names: tuple[str, ...]
    made: _Made


@dataclass(frozen=True)
class _Call:
    layer: _Layer
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
        self._layers = _layers(loss, at, layout)
        self._written: set[int] = set()
        self._settled = False
        self._names = [name for layer in self._layers for name in layer.names]
        self._buffers = [name for name, _ in loss.named_buffers()]
        missing = at.shared.keys() - set(self._names)
        if missing:
            raise NotLayerwiseError(
                f"{', '.join(sorted(missing))} belong to no linear, convolution or "
                f"normalisation layer of their own"
            )
        sizes = {name: p.numel() for name, p in at.shared.items()}
        self.sizes = [sizes[name] for name in self._names]

    @staticmethod
    def name_of(layout: Layout) -> str:
        """The name of the path with this layout."""
        return f"layerwise, {layout.replace('_', ' ')}"

    def graph(self, x: Tensor, y: Tensor, weight: Tensor, features: bool) -> Graph:
        """See :class:`leakwatch.attacks.paths.Path`."""
        attacks, images = x.shape[:2]
        while True:
            batch = x.detach().flatten(0, 1)
            if batch.ndim == 4 and self._layout == "channels_last":
                batch = batch.contiguous(memory_format=torch.channels_last)
            batch = batch.requires_grad_()
            calls: list[_Call] = []
            with (
                watched_norms(self._loss if features else None) as seen,
                self._recording(batch, calls),
            ):
                losses = self._losses(batch, y.flatten(0, 1))
                total = losses.view(attacks, images).sum(1) @ (weight / images)
            written = {id(call.layer) for call in calls if call.written}
            if not written - self._written:
                break
            # Something wrote into what was recorded: from now on it gets a copy.
            self._written |= written
        deltas = torch.autograd.grad(
            total,
            [call.out for call in calls],
            create_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )
        kept = tuple(f.view(attacks, images, *f.shape[1:]) for f in seen)
        return _LayerGraph(self, x, y, batch, calls, deltas, kept)

    def settle(self, x: Tensor, y: Tensor) -> None:
        """Leaves the weights in the network, if its forward changes nothing in it.

        Taking them out and looking for changes costs as much as a small network's
        forward.

        Args:
            x: images of one attack, ``(images, *sample)``.
            y: their labels.
        """
        if is_quiet(self._loss, self._tensors(), x, y):
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
        """See :class:`leakwatch.attacks.paths.Path`."""
        sizes = [p.numel() for p in self._at.shared.values()]
        parts = dict(zip(self._at.shared, torch.split(flat, sizes, 1), strict=True))
        return torch.cat([k.arrange(parts[n]) for n, k in self._weights()], 1)

    def restore(self, flat: Tensor) -> Tensor:
        """See :class:`leakwatch.attacks.paths.Path`."""
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
        def replacement(layer: _Layer) -> Callable[[Tensor], Tensor]:
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
    """See :class:`leakwatch.attacks.paths.Graph`."""

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
        """See :class:`leakwatch.attacks.paths.Graph`."""
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
        found = list(
            torch.autograd.grad(
                outputs, inputs, cotangents, allow_unused=True, materialize_grads=True
            )
            if outputs
            else map(torch.zeros_like, inputs)
        )
        image = found[len(firsts)]
        with torch.no_grad():
            for call, saved, u in zip(self._calls, self._saved, own, strict=True):
                if call.first is not None and call.layer.made.weight is not None:
                    image = image + call.first.pull(
                        saved,
                        u[0] if call.first.has_weight else None,
                        call.layer.made.weight,
                        found[firsts.index(call)],
                    )
        return image.reshape(self._x.shape), found[-1] if soft else None


class _AsIs:
    @staticmethod
    def arrange(t: Tensor) -> Tensor:
        return t

    restore = arrange


_AS_IS = _AsIs()


def layouts(loss: SampleLoss) -> tuple[Layout, ...]:
    """Memory formats for this network's images, the one that is likely faster first.

    Args:
        loss: module and criterion.
    """
    convolutions = [m for m in loss.modules() if isinstance(m, nn.Conv2d)]
    if any(_fits_registers(m) for m in convolutions):
        return "contiguous", "channels_last"
    return "channels_last", "contiguous"


def _fits_registers(module: nn.Conv2d) -> bool:
    # They hold 8 numbers; with other channel counts, or strides, the library's grouped
    # kernels are several times slower than patches.
    fits = module.in_channels % 8 == module.out_channels % 8 == 0
    return fits and module.stride == (1, 1)


def _layers(loss: SampleLoss, at: Weights, layout: Layout) -> list[_Layer]:
    owners: Counter[int] = Counter()
    for module in loss.modules():
        owners.update(id(p) for p in module._parameters.values() if p is not None)
    found = []
    for name, module in loss.named_modules():
        # A forward replaced on the instance, or a weight computed from others (the
        # hooks of weight_norm and pruning) may do anything.
        if {"forward", "weight", "bias", "_conv_forward"} & vars(module).keys():
            continue
        own = {k: p for k, p in module._parameters.items() if p is not None}
        shared = {k: f"{name}.{k}" for k in own if f"{name}.{k}" in at.shared}
        known = own.keys() <= {"weight", "bias"}
        if not shared or not known or any(owners[id(p)] > 1 for p in own.values()):
            continue
        tensors = {
            k: (at.shared | at.fixed)[f"{name}.{k}"].detach()
            for k in (*own, *module._buffers)
            if f"{name}.{k}" in at.shared or f"{name}.{k}" in at.fixed
        }
        made = _made(module, tensors, ("weight" in shared, "bias" in shared), layout)
        if made is not None:
            names = tuple(shared[k] for k in ("weight", "bias") if k in shared)
            found.append(_Layer(module, names, made))
    return found


def _made(
    module: nn.Module, t: dict[str, Tensor], has: tuple[bool, bool], layout: Layout
) -> _Made | None:
    """How a known layer is computed, ``None`` for others."""
    kind = type(module)  # exact types: a subclass may do anything
    weight, bias = t.get("weight"), t.get("bias")
    if isinstance(module, nn.modules.batchnorm._BatchNorm) and kind in _BATCH_NORM:
        return _batch_norm(module, t, has) if "running_var" in t else None
    if weight is None:
        return None
    if isinstance(module, nn.Linear) and kind is nn.Linear:
        return _Made(Linear(*has), lambda a: F.linear(a, weight, bias))
    if isinstance(module, nn.Conv2d) and kind is nn.Conv2d:
        sized = module.padding_mode == "zeros" and not isinstance(module.padding, str)
        return _convolution(module, weight, bias, has, layout) if sized else None
    if isinstance(module, nn.LayerNorm) and kind is nn.LayerNorm:
        shape, eps = module.normalized_shape, module.eps
        return _Made(
            Affine(*has, None, len(shape), None, None),
            lambda a: a * weight if bias is None else torch.addcmul(bias, a, weight),
            prepare=lambda a: F.layer_norm(a, shape, eps=eps),
        )
    if isinstance(module, nn.GroupNorm) and kind is nn.GroupNorm:
        groups, small = module.num_groups, module.eps
        return _Made(
            Affine(*has, 1, 1, None, None),
            lambda a: _scaled(a, weight, bias),
            prepare=lambda a: F.group_norm(a, groups, eps=small),
        )
    return None


def _convolution(
    module: nn.Conv2d,
    weight: Tensor,
    bias: Tensor | None,
    has: tuple[bool, bool],
    layout: Layout,
) -> _Made:
    large = layout == "contiguous" and _fits_registers(module)
    grouped = module.groups > 1 or large
    kernel = (GroupedConvolution if grouped else Convolution)(*has, module)
    if layout == "channels_last":
        weight = weight.contiguous(memory_format=torch.channels_last)
    stride, padding, dilation = module.stride, module.padding, module.dilation

    def forward(a: Tensor) -> Tensor:
        if a.ndim != 4:
            raise NotLayerwiseError("a convolution met an input without a batch")
        return F.conv2d(a, weight, bias, stride, padding, dilation, module.groups)

    return _Made(kernel, forward, weight)


def _batch_norm(
    module: nn.modules.batchnorm._BatchNorm,
    t: dict[str, Tensor],
    has: tuple[bool, bool],
) -> _Made:
    mean, inverse = t["running_mean"], (t["running_var"] + module.eps).rsqrt()
    scale = inverse * t["weight"] if "weight" in t else inverse
    shift = t["bias"] - mean * scale if "bias" in t else -mean * scale
    kernel = Affine(*has, 1, 1, mean, inverse)
    return _Made(kernel, lambda a: _scaled(a, scale, shift))


def _scaled(a: Tensor, scale: Tensor, shift: Tensor | None) -> Tensor:
    shape = (-1, *[1] * (a.ndim - 2))
    if shift is None:
        return a * scale.view(shape)
    return torch.addcmul(shift.view(shape), a, scale.view(shape))
