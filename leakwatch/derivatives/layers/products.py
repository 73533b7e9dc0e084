"""The products of layers with weights, one set of rules for all who need them.

A layer with weights W takes activations a to W·a + b, and what comes back to its output
is δ (its *backprops*). Gradient, Jacobian and attacks take four products of these:

===================  ===========  ============================================
``weight_grad``      Σ δ aᵀ       the gradient of W
``bias_grad``        Σ δ          the gradient of b
``input_adjoint``    Wᵀδ          what a receives
``output_adjoint``   W a + b      the layer itself; with a cotangent U of the weight's
                                  gradient in the place of W: what δ receives
===================  ===========  ============================================

All work on *rows*: attacks or samples with weights (or cotangents) of their own. A
:class:`LayerProducts` says how one type of layer does this, a :class:`Rule` what else a
network needs to run with it, and :func:`register` puts a rule into the one table.

Example:
    A layer that scales each of its features, in one file, and its line in the table:

    >>> import torch
    >>> from torch import Tensor, nn
    >>> class Gain(nn.Module):
    ...     def __init__(self, features: int) -> None:
    ...         super().__init__()
    ...         self.weight = nn.Parameter(torch.ones(features))
    ...     def forward(self, a: Tensor) -> Tensor:
    ...         return a * self.weight
    >>> class GainProducts(LayerProducts):
    ...     def weight_grad(self, a: Tensor, d: Tensor) -> Tensor:
    ...         return (a * d).sum(1)
    ...     def bias_grad(self, d: Tensor) -> Tensor:
    ...         return d.sum(1)
    ...     def input_adjoint(self, w: Tensor, d: Tensor, like: Tensor) -> Tensor:
    ...         return (d * w[:, None]).view(like.shape)
    ...     def output_adjoint(
    ...         self, w: Tensor, b: Tensor | None, a: Tensor, like: Tensor
    ...     ) -> Tensor:
    ...         return (a * w[:, None]).view(like.shape)
    >>> register(Gain, lambda layer: Rule(GainProducts()))

    From now on attacks on gradients and on updates go by layers through it:

    >>> from leakwatch.attacks import SharedGradient
    >>> from leakwatch.attacks.matching.objective import MatchingProblem
    >>> from leakwatch.derivatives import GradientMap
    >>> net = nn.Sequential(Gain(4), nn.Tanh(), nn.Linear(4, 3))
    >>> at, x, y = GradientMap(net), torch.rand(2, 4), torch.tensor([0, 2])
    >>> shared = SharedGradient.of(at, x, y)
    >>> problem = MatchingProblem(at, shared, path="layerwise")
    >>> with problem.opened() as matcher:
    ...     at_the_truth = matcher.evaluate(x[:, None], y[:, None], torch.arange(2))
    >>> bool((at_the_truth.distance < 1e-10).all()), matcher.path
    (True, 'layerwise, contiguous')
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = [
    "RULES",
    "ElementwiseProducts",
    "LayerInNetwork",
    "LayerProducts",
    "Layout",
    "MatrixProducts",
    "PositionsLast",
    "Rule",
    "ScaleProducts",
    "register",
]

Layout: TypeAlias = Literal["channels_last", "contiguous"]
"""Memory format of a batch of images."""


class LayerProducts(ABC):
    """The products of one layer, for rows with weights of their own.

    Samples of a row follow each other in activations and backprops. Each of these is
    brought into the form in which products take it once, by :meth:`inputs` and
    :meth:`backprops`; the first dimension of that form is the rows. Weights and their
    gradients are flat, ``(rows, numbers)``, in the order of :meth:`arrange`.
    """

    def inputs(self, a: Tensor, rows: int) -> Tensor:
        """Activations as products take them, ``(rows, samples, …)``.

        Args:
            a: input of the layer, ``(rows · samples, …)``.
            rows: how many share the batch evenly.
        """
        return a.view(rows, -1, *a.shape[1:])

    def tangents(self, a: Tensor, rows: int) -> Tensor:
        """The linear part of :meth:`inputs`, for a tangent of the activations."""
        return self.inputs(a, rows)

    def backprops(self, delta: Tensor, rows: int) -> Tensor:
        """Gradients at the output as products take them, ``(rows, samples, …)``."""
        return delta.view(rows, -1, *delta.shape[1:])

    def arrange(self, weight: Tensor) -> Tensor:
        """Flat weights ``(rows, numbers)`` in the order in which products have them."""
        return weight

    def restore(self, weight: Tensor) -> Tensor:
        """The inverse of :meth:`arrange`."""
        return weight

    @abstractmethod
    def weight_grad(self, a: Tensor, d: Tensor) -> Tensor:
        """Σ δ aᵀ of each row, ``(rows, numbers)``.

        Args:
            a: from :meth:`inputs`.
            d: from :meth:`backprops`.
        """

    @abstractmethod
    def bias_grad(self, d: Tensor) -> Tensor:
        """Σ δ of each row, ``(rows, numbers of the bias)``."""

    @abstractmethod
    def input_adjoint(self, w: Tensor, d: Tensor, like: Tensor) -> Tensor:
        """Wᵀδ, shaped like the layer's input.

        Args:
            w: W of each row.
            d: from :meth:`backprops`.
            like: the layer's input, of which only shape and memory format are read.
        """

    @abstractmethod
    def output_adjoint(
        self, w: Tensor, b: Tensor | None, a: Tensor, like: Tensor
    ) -> Tensor:
        """W a + b, shaped like the layer's output.

        Args:
            w: W of each row.
            b: b of each row, ``None`` for none.
            a: from :meth:`inputs`.
            like: the layer's input, of which only shape and memory format are read.
        """

    @final
    def along(
        self, w: Tensor, b: Tensor | None, a: Tensor, d: Tensor, like: Tensor
    ) -> Tensor:
        """⟨W, Σ δ aᵀ⟩ + ⟨b, Σ δ⟩ of each row, ``(rows,)``; forms no gradient."""
        out = self.backprops(self.output_adjoint(w, b, a, like), len(w))
        product: Tensor = torch.linalg.vecdot(out.flatten(1), d.flatten(1))
        return product


class MatrixProducts(LayerProducts):
    """A layer as a matrix that meets vectors: linear layers, and others unfolded.

    Its forms are ``(rows, T, P)`` for activations and ``(rows, T, C)`` for backprops,
    where T counts the vectors, of all samples of a row behind each other.

    Attributes:
        positions_last: whether T is what lies side by side in memory, also of results.
    """

    positions_last = False

    def inputs(self, a: Tensor, rows: int) -> Tensor:
        """See :class:`LayerProducts`."""
        return a.reshape(rows, -1, a.shape[-1])

    def backprops(self, delta: Tensor, rows: int) -> Tensor:
        """See :class:`LayerProducts`."""
        return delta.reshape(rows, -1, delta.shape[-1])

    def weight_grad(self, a: Tensor, d: Tensor) -> Tensor:
        """See :class:`LayerProducts`."""
        return (d.mT @ a).flatten(-2)

    def bias_grad(self, d: Tensor) -> Tensor:
        """See :class:`LayerProducts`."""
        return d.sum(-2)

    def input_adjoint(self, w: Tensor, d: Tensor, like: Tensor) -> Tensor:
        """See :class:`LayerProducts`."""
        return self.product(d, w.reshape(len(d), d.shape[2], -1)).view(like.shape)

    def output_adjoint(
        self, w: Tensor, b: Tensor | None, a: Tensor, like: Tensor
    ) -> Tensor:
        """See :class:`LayerProducts`."""
        return self.outputs(w, b, a).view(*like.shape[:-1], -1)

    def outputs(self, w: Tensor, b: Tensor | None, a: Tensor) -> Tensor:
        """W a + b of all vectors, ``(rows, T, C)``."""
        out = self.product(a, w.reshape(len(a), -1, a.shape[2]).mT)
        return out if b is None else out.add_(b[:, None])

    def product(self, vectors: Tensor, matrices: Tensor) -> Tensor:
        """``vectors @ matrices`` of each row."""
        if self.positions_last:
            return torch.bmm(matrices.mT, vectors.mT).mT
        return torch.bmm(vectors, matrices)


@final
class PositionsLast(MatrixProducts):
    """Of convolutions whose patches were unfolded with their places last."""

    positions_last = True


@final
class ElementwiseProducts(LayerProducts):
    """A weight for each element of the vectors that it meets.

    Its forms are ``(rows, T, P)`` for both activations and backprops.
    """

    def weight_grad(self, a: Tensor, d: Tensor) -> Tensor:
        """See :class:`LayerProducts`."""
        return (d * a).sum(-2)

    def bias_grad(self, d: Tensor) -> Tensor:
        """See :class:`LayerProducts`."""
        return d.sum(-2)

    def input_adjoint(self, w: Tensor, d: Tensor, like: Tensor) -> Tensor:
        """See :class:`LayerProducts`."""
        return (d * w[:, None]).view(like.shape)

    def output_adjoint(
        self, w: Tensor, b: Tensor | None, a: Tensor, like: Tensor
    ) -> Tensor:
        """See :class:`LayerProducts`."""
        out = a * w[:, None]
        return (out if b is None else out.add_(b[:, None])).view(like.shape)


@final
class ScaleProducts(LayerProducts):
    """Scale and shift after a normalisation.

    Args:
        shape: of the scale.
        trailing: whether it stretches over the last dimensions, as in a LayerNorm, and
            not over the channels.
        mean: of each channel, subtracted from the activations; ``None`` for
            activations that are normalised already.
        inverse_std: of each channel, multiplied afterwards.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        trailing: bool,
        mean: Tensor | None = None,
        inverse_std: Tensor | None = None,
    ) -> None:
        self._shape, self._trailing = shape, trailing
        self._mean, self._inverse_std = mean, inverse_std

    def inputs(self, a: Tensor, rows: int) -> Tensor:
        """See :class:`LayerProducts`."""
        if self._mean is not None:
            a = a - self._mean.view(-1, *[1] * (a.ndim - 2))
        return self.tangents(a, rows)

    def tangents(self, a: Tensor, rows: int) -> Tensor:
        """See :class:`LayerProducts`."""
        return a.view(rows, -1, *a.shape[1:])

    def weight_grad(self, a: Tensor, d: Tensor) -> Tensor:
        """See :class:`LayerProducts`."""
        scale = self.bias_grad(a * d)
        return scale if self._inverse_std is None else scale * self._inverse_std

    def bias_grad(self, d: Tensor) -> Tensor:
        """See :class:`LayerProducts`."""
        if self._trailing:
            return d.reshape(len(d), -1, math.prod(self._shape)).sum(1)
        return (d.flatten(3).sum(3) if d.ndim > 3 else d).sum(1)

    def input_adjoint(self, w: Tensor, d: Tensor, like: Tensor) -> Tensor:
        """See :class:`LayerProducts`."""
        return (d * self._scale(w, d)).flatten(0, 1)

    def output_adjoint(
        self, w: Tensor, b: Tensor | None, a: Tensor, like: Tensor
    ) -> Tensor:
        """See :class:`LayerProducts`."""
        out = a * self._scale(w, a)
        if b is not None:
            out += self._spread(b, a)
        return out.flatten(0, 1)

    def _scale(self, w: Tensor, like: Tensor) -> Tensor:
        flat = w if self._inverse_std is None else w * self._inverse_std
        return self._spread(flat, like)

    def _spread(self, w: Tensor, like: Tensor) -> Tensor:
        """Numbers of each row, ready to meet something in the form of products."""
        if self._trailing:
            middle = like.ndim - 1 - len(self._shape)
            return w.reshape(len(w), *[1] * middle, *self._shape)
        return w.reshape(len(w), 1, -1, *[1] * (like.ndim - 3))


@final
@dataclass(frozen=True)
class LayerInNetwork:
    """What a rule may look at.

    Attributes:
        module: the layer.
        tensors: its own parameters and buffers by their names, constant.
        layout: memory format of the images; ``None`` where each row has weights of its
            own, so that nothing is computed with these.
    """

    module: nn.Module
    tensors: Mapping[str, Tensor]
    layout: Layout | None


@final
@dataclass(frozen=True)
class Rule:
    """How a layer takes part in a network that is run for all rows at once.

    Attributes:
        products: its products.
        forward: the layer with its constant weights, twice differentiable in its
            input; ``None`` to make it of the products.
        prepare: what comes before the weights, such as a normalisation.
        weight: W where the layer's input may be the images themselves, and products
            offer ``both_adjoints``; ``None`` for others.
    """

    products: LayerProducts
    forward: Callable[[Tensor], Tensor] | None = None
    prepare: Callable[[Tensor], Tensor] | None = None
    weight: Tensor | None = None


RuleFor: TypeAlias = Callable[[LayerInNetwork], Rule | None]
"""Makes the rule of a layer; ``None`` if this one can't be taken apart."""

RULES: dict[type[nn.Module], RuleFor] = {}
"""Types of layers and their rules. Exact types: a subclass may do anything."""


def register(kind: type[nn.Module], rule: RuleFor) -> None:
    """Adds a type of layer.

    Args:
        kind: of layers whose parameters are called ``weight`` and ``bias``, or less.
        rule: makes the rule of a layer of this type.

    Raises:
        ValueError: if the type has a rule already.
    """
    if kind in RULES:
        raise ValueError(f"{kind.__name__} has a rule already.")
    RULES[kind] = rule


def _linear(layer: LayerInNetwork) -> Rule:
    weight, bias = layer.tensors["weight"], layer.tensors.get("bias")
    return Rule(MatrixProducts(), lambda a: F.linear(a, weight, bias))


def _layer_norm(layer: LayerInNetwork) -> Rule | None:
    module = layer.module
    if not isinstance(module, nn.LayerNorm) or "weight" not in layer.tensors:
        return None
    shape, eps = module.normalized_shape, module.eps
    weight, bias = layer.tensors["weight"], layer.tensors.get("bias")
    return Rule(
        ScaleProducts(shape, True),
        lambda a: a * weight if bias is None else torch.addcmul(bias, a, weight),
        lambda a: F.layer_norm(a, shape, eps=eps),
    )


def _group_norm(layer: LayerInNetwork) -> Rule | None:
    module = layer.module
    if not isinstance(module, nn.GroupNorm) or "weight" not in layer.tensors:
        return None
    groups, eps = module.num_groups, module.eps
    weight, bias = layer.tensors["weight"], layer.tensors.get("bias")
    return Rule(
        ScaleProducts(tuple(weight.shape), False),
        lambda a: _scaled(a, weight, bias),
        lambda a: F.group_norm(a, groups, eps=eps),
    )


def _batch_norm(layer: LayerInNetwork) -> Rule | None:
    module, t = layer.module, layer.tensors
    if "running_var" not in t:
        return None
    mean = t["running_mean"]
    inverse = (t["running_var"] + cast(float, module.eps)).rsqrt()
    scale = inverse * t["weight"] if "weight" in t else inverse
    shift = t["bias"] - mean * scale if "bias" in t else -mean * scale
    products = ScaleProducts(tuple(mean.shape), False, mean, inverse)
    return Rule(products, lambda a: _scaled(a, scale, shift))


def _scaled(a: Tensor, scale: Tensor, shift: Tensor | None) -> Tensor:
    shape = (-1, *[1] * (a.ndim - 2))
    if shift is None:
        return a * scale.view(shape)
    return torch.addcmul(shift.view(shape), a, scale.view(shape))


register(nn.Linear, _linear)
register(nn.LayerNorm, _layer_norm)
register(nn.GroupNorm, _group_norm)
register(nn.BatchNorm1d, _batch_norm)
register(nn.BatchNorm2d, _batch_norm)
register(nn.BatchNorm3d, _batch_norm)
