"""Where to open a network for a whole batch, and where its samples are in a tensor.

A layer sees the samples of a batch one behind the other, or alternating, position by
position, or in a dimension of their own that is not the first: attention does all of
that. Which, is seen by comparing with one sample alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from leakwatch.derivatives.gradient_map import GradientMap
from leakwatch.derivatives.layers.bilinear import met_by
from leakwatch.derivatives.layers.taps import Layer, Tapping, listen
from leakwatch.derivatives.runtime import Weights
from leakwatch.derivatives.verification.agreement import agreement

__all__ = ["Layout", "Opening", "opening"]


@final
@dataclass(frozen=True)
class Layout:
    """Where the samples of a batch are in a tensor, compared with that of one sample.

    Attributes:
        dim: the dimension that is as many times larger.
        outer: whether the samples follow each other there; if not, they alternate.
    """

    dim: int
    outer: bool

    def size(self, one: torch.Size, samples: int) -> list[int]:
        """The shape for a batch."""
        shape = list(one)
        shape[self.dim] *= samples
        return shape

    def by_sample(self, t: Tensor, one: torch.Size, samples: int) -> Tensor:
        """``(samples, *one)``."""
        sizes = (samples, one[self.dim])
        shape = [*t.shape]
        shape[self.dim : self.dim + 1] = sizes if self.outer else sizes[::-1]
        return t.reshape(shape).movedim(self.dim + (not self.outer), 0)


@final
@dataclass(frozen=True)
class Opening:
    """Where a network is opened, the same for all samples of a batch.

    Attributes:
        layers: those that come apart, by the name of their weight.
        layouts: of each call, by its key.
        others: names of the shared parameters that belong to none of them.
    """

    layers: dict[str, Layer]
    layouts: dict[str, Layout]
    others: tuple[str, ...]

    @property
    def numbers(self) -> int:
        """About how many numbers of the layers' own a graph holds for each sample.

        Measured: with those of what lies between layers, 1.1 to 1.5 times as many.
        """
        calls = [call for layer in self.layers.values() for call in layer.calls]
        return sum(
            call.input.numel() + met_by(call) + 2 * call.output.numel()
            for call in calls
        )


def opening(
    gradients: GradientMap, at: Weights, x: Tensor, y: Tensor
) -> Opening | None:
    """Where to open a network.

    Args:
        gradients: the gradient map, inside its ``evaluation``.
        at: its weights.
        x: samples.
        y: their labels.

    Returns:
        The opening; ``None`` if some call has not one part for each sample.
    """
    heard, _ = listen(gradients, at, x[0], y[0])
    layers = {k: v for k, v in heard.items() if k not in gradients.formed}
    held = {name for layer in layers.values() for name in layer.names}
    others = tuple(name for name in at.shared if name not in held)
    keys = [key for layer in layers.values() for key in layer.keys]
    if len(x) == 1:
        return Opening(layers, dict.fromkeys(keys, Layout(0, True)), others)
    alone, both = (_inputs(gradients, at, layers, x[:k], y[:k]) for k in (1, 2))
    layouts = {}
    for key in keys:
        layout = _layout(alone[key], both[key]) if key in both else None
        if layout is None:
            return None
        layouts[key] = layout
    return Opening(layers, layouts, others)


def _inputs(
    gradients: GradientMap,
    at: Weights,
    layers: Mapping[str, Layer],
    x: Tensor,
    y: Tensor,
) -> dict[str, Tensor]:
    keys = frozenset(key for layer in layers.values() for key in layer.keys)
    taps = Tapping({id(at.shared[name]): name for name in layers}, {}, keys)
    with torch.no_grad(), taps:
        gradients.batch_loss(at.shared, at.fixed, x, y, x.new_ones(len(x)))
    return taps.inputs


def _layout(alone: Tensor, both: Tensor) -> Layout | None:
    """How two samples lie in a tensor, of which the first is known."""
    for dim, size in enumerate(alone.shape[: both.ndim]):
        for outer in (True, False):
            layout = Layout(dim, outer)
            if list(both.shape) != layout.size(alone.shape, 2) or size == 0:
                continue
            first = layout.by_sample(both, alone.shape, 2)[0]
            same = agreement(first[None], alone[None], "activation in a batch")
            if same.holds and same.conclusive:
                return layout
    return None
