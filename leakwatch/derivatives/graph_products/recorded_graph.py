"""x ↦ (a, δ) of a batch as one graph, and products with J, Jᵀ and H from it.

One forward of the whole batch is opened at the calls of its layers, and one backward
gives δ of every sample, because the loss that it starts from is the sum of theirs. No
weight ever has a gradient of its own, so nothing has to be transformed by ``vmap``, and
the graph, once made, serves any number of products: J v by differentiating Jᵀu, which
is linear in u, and Jᵀu by the graph itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from leakwatch.derivatives.gradient_map import GradientMap
from leakwatch.derivatives.layers.bilinear import (
    Bilinear,
    Pair,
    inputs_by_position,
    outputs_by_position,
)
from leakwatch.derivatives.layers.layout import Opening
from leakwatch.derivatives.layers.taps import ConstantConvolutions, Tapping
from leakwatch.derivatives.runtime import Weights

__all__ = ["Recorded"]


@final
class Recorded:
    """The graph of a batch's a and δ, and products from it.

    Made inside an evaluation; products need none.

    Args:
        gradients: the gradient map.
        at: its weights.
        where: where the network is opened; parameters outside of its layers only for
            a batch of one.
        x: samples, in the map's precision.
        y: their labels.
        weight: factors on their losses.

    Raises:
        RuntimeError: if something in the network has no second derivative, or part of
            its graph would be made again later (checkpoints).
    """

    def __init__(
        self,
        gradients: GradientMap,
        at: Weights,
        where: Opening,
        x: Tensor,
        y: Tensor,
        weight: Tensor,
    ) -> None:
        self._names = list(at.shared)
        self._samples = len(x)
        self._leaf = x.detach().clone().requires_grad_()
        self._outputs: list[Tensor] = []
        why = "leakwatch keeps this graph, and a checkpoint would run again later"
        with torch.autograd.graph.disable_saved_tensors_hooks(why):
            here, others = self._opened(gradients, at, where, y, weight)
            self._others = {k: (t.detach(), self._slot(t)) for k, t in others.items()}
            self._layers = [
                (
                    Bilinear(layer, (a.detach(), d.detach()), self._samples),
                    (self._slot(a), self._slot(d)),
                    (_nothing(a), _nothing(d)),
                )
                for layer, (a, d) in zip(where.layers.values(), here, strict=True)
            ]
            self._towards = [_nothing(t).requires_grad_() for t in self._outputs]
            self._back = self._pulled(self._towards, create_graph=True)

    def gradient(self) -> Tensor:
        """Gradients of the samples from their a and δ, ``(samples, d_θ)``."""
        parts = {k: t.reshape(1, -1) for k, (t, _) in self._others.items()}
        for form, _, _ in self._layers:
            parts |= zip(form.layer.names, form.gradient(), strict=True)
        return self._flat(parts)

    def push(self, v: Tensor) -> Tensor:
        """J v, ``(samples, d_θ)``.

        Args:
            v: ``(samples, d_x)``.
        """
        moved = self._tangents(v)
        parts = {
            name: (_nothing(t) if i is None else moved[i]).reshape(1, -1)
            for name, (t, i) in self._others.items()
        }
        for form, slots, zeros in self._layers:
            pair = _pick(moved, slots, zeros)
            parts |= zip(form.layer.names, form.push(pair), strict=True)
        return self._flat(parts)

    def pull(self, u: Tensor) -> Tensor:
        """Jᵀu, ``(samples, d_x)``.

        Args:
            u: ``(samples, d_θ)``.
        """
        sizes = [self._sizes[name] for name in self._names]
        parts = dict(zip(self._names, torch.split(u, sizes, 1), strict=True))
        back: list[Tensor | None] = [None] * len(self._outputs)
        for name, (t, i) in self._others.items():
            _put(back, (i,), (parts[name].reshape(t.shape),))
        for form, slots, _ in self._layers:
            _put(back, slots, form.pull([parts[name] for name in form.layer.names]))
        return self._pulled(back).reshape(self._samples, -1)

    def normal(self, v: Tensor) -> Tensor:
        """H v = JᵀJ v, ``(samples, d_x)``, with no gradient of a weight formed.

        Args:
            v: ``(samples, d_x)``.
        """
        moved = self._tangents(v)
        back: list[Tensor | None] = [None] * len(self._outputs)
        for _, i in self._others.values():
            if i is not None:
                back[i] = moved[i]
        for form, slots, zeros in self._layers:
            _put(back, slots, form.normal(_pick(moved, slots, zeros)))
        return self._pulled(back).reshape(self._samples, -1)

    # -- the graph -----------------------------------------------------------------

    def _opened(
        self,
        gradients: GradientMap,
        at: Weights,
        where: Opening,
        y: Tensor,
        weight: Tensor,
    ) -> tuple[list[Pair], dict[str, Tensor]]:
        """For each layer a and δ by position, and gradients of other parameters."""
        k, x = self._samples, self._leaf
        added = {
            key: x.new_zeros(
                where.layouts[key].size(call.output, k), requires_grad=True
            )
            for layer in where.layers.values()
            for key, call in zip(layer.keys, layer.calls, strict=True)
        }
        free = {name: at.shared[name].clone().requires_grad_() for name in where.others}
        taps = Tapping(
            {id(at.shared[name]): name for name in where.layers},
            added,
            frozenset(added),
        )
        with ConstantConvolutions(), taps:
            loss = gradients.batch_loss(at.shared | free, at.fixed, x, y, weight)
        received = torch.autograd.grad(
            loss,
            [*added.values(), *free.values()],
            create_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )
        deltas = dict(zip(added, received, strict=False))
        pairs = []
        for layer in where.layers.values():
            rows = []
            for key, call in zip(layer.keys, layer.calls, strict=True):
                to = where.layouts[key]
                a = to.by_sample(taps.inputs[key], call.input, k)
                d = to.by_sample(deltas[key], call.output, k)
                rows.append((inputs_by_position(call, a), outputs_by_position(call, d)))
            a, d = (
                torch.cat(t, 1) if len(t) > 1 else t[0] for t in zip(*rows, strict=True)
            )
            pairs.append((a, d))
        return pairs, dict(zip(free, received[len(added) :], strict=True))

    @property
    def _sizes(self) -> dict[str, int]:
        sizes = {k: t.numel() for k, (t, _) in self._others.items()}
        for form, _, _ in self._layers:
            sizes |= zip(form.layer.names, form.sizes, strict=True)
        return sizes

    def _slot(self, t: Tensor) -> int | None:
        """Its place among what depends on the input."""
        if not t.requires_grad:
            return None
        self._outputs.append(t)
        return len(self._outputs) - 1

    def _tangents(self, v: Tensor) -> Sequence[Tensor]:
        if not self._back.requires_grad:
            return [torch.zeros_like(t) for t in self._outputs]
        return torch.autograd.grad(
            self._back,
            self._towards,
            v.view_as(self._back),
            retain_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )

    def _pulled(
        self, cotangents: Sequence[Tensor | None], create_graph: bool = False
    ) -> Tensor:
        pairs = [
            (t, c)
            for t, c in zip(self._outputs, cotangents, strict=True)
            if c is not None
        ]
        if not pairs:
            return torch.zeros_like(self._leaf)
        outputs, received = zip(*pairs, strict=True)
        return torch.autograd.grad(
            outputs,
            self._leaf,
            received,
            retain_graph=True,
            create_graph=create_graph,
            allow_unused=True,
            materialize_grads=True,
        )[0]

    def _flat(self, parts: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([parts[name] for name in self._names], 1)


def _nothing(like: Tensor) -> Tensor:
    """Zeros that take no memory."""
    return like.new_zeros(()).expand_as(like)


def _pick(moved: Sequence[Tensor], slots: tuple[int | None, ...], zeros: Pair) -> Pair:
    a, d = (z if i is None else moved[i] for i, z in zip(slots, zeros, strict=True))
    return a, d


def _put(
    back: list[Tensor | None], slots: tuple[int | None, ...], values: Sequence[Tensor]
) -> None:
    for i, value in zip(slots, values, strict=True):
        if i is not None:
            back[i] = value
