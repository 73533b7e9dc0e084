"""Weight gradients of one layer for many attacks, and their adjoints.

With input a and gradient δ at the output, a layer's weight gradient is bilinear in
both: δ aᵀ summed over positions. Given a cotangent U of it, a weight for each attack,
the adjoints are Uᵀδ for a and U a for δ. The weights that the network itself uses are
shared by all attacks; only U is not, so these three are all that is done per attack.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TypeAlias, cast, final

import torch
from torch import Tensor

__all__ = ["Affine", "Kernel", "Linear", "Saved"]

Saved: TypeAlias = tuple[Tensor, ...]


class Kernel(ABC):
    """The weight gradient of one layer, attack by attack.

    Args:
        has_weight: whether the weight is shared by clients.
        has_bias: whether the bias is.
    """

    def __init__(self, has_weight: bool, has_bias: bool) -> None:
        self.has_weight = has_weight
        self.has_bias = has_bias

    @abstractmethod
    def form(
        self, a: Tensor, delta: Tensor, attacks: int
    ) -> tuple[list[Tensor], Saved]:
        """Gradients of weight and bias, ``(attacks, numbers)`` each, and what to keep.

        Args:
            a: input of the layer; the attacks' samples follow each other.
            delta: gradient at its output.
            attacks: how many share the batch evenly.
        """

    @abstractmethod
    def adjoint(
        self, saved: Saved, cotangents: list[Tensor], needs_input: bool
    ) -> tuple[Tensor | None, Tensor]:
        """What a and δ receive.

        Args:
            saved: from :meth:`form`.
            cotangents: of weight and bias, as :meth:`form` gave them.
            needs_input: whether a receives anything.
        """

    def arrange(self, weight: Tensor) -> Tensor:
        """A weight gradient ``(attacks, numbers)`` in the order of :meth:`form`."""
        return weight

    def restore(self, weight: Tensor) -> Tensor:
        """The inverse of :meth:`arrange`."""
        return weight

    def split(self, cotangents: list[Tensor]) -> tuple[Tensor | None, Tensor | None]:
        """Cotangents of weight and bias, ``None`` for what is not shared."""
        rest = list(cotangents)
        weight = rest.pop(0) if self.has_weight else None
        return weight, rest.pop(0) if self.has_bias else None


@final
class Linear(Kernel):
    """A linear layer that sees any number of vectors per sample."""

    def form(
        self, a: Tensor, delta: Tensor, attacks: int
    ) -> tuple[list[Tensor], Saved]:
        """See :class:`Kernel`."""
        rows = a.reshape(attacks, -1, a.shape[-1])
        d = delta.reshape(attacks, -1, delta.shape[-1])
        parts = []
        if self.has_weight:
            parts.append(torch.bmm(d.transpose(1, 2), rows).flatten(1))
        if self.has_bias:
            parts.append(d.sum(1))
        return parts, (a, delta, rows, d)

    def adjoint(
        self, saved: Saved, cotangents: list[Tensor], needs_input: bool
    ) -> tuple[Tensor | None, Tensor]:
        """See :class:`Kernel`."""
        a, delta, rows, d = saved
        u, b = self.split(cotangents)
        given, received = None, torch.zeros_like(d)
        if u is not None:
            u = u.reshape(len(d), d.shape[2], rows.shape[2])
            received = torch.bmm(rows, u.transpose(1, 2))
            if needs_input:
                given = torch.bmm(d, u).view(a.shape)
        if b is not None:
            received += b[:, None]
        return given, received.view(delta.shape)


@final
class Affine(Kernel):
    """Scale and shift per channel after a normalisation.

    Args:
        has_weight: as in :class:`Kernel`.
        has_bias: as in :class:`Kernel`.
        channel: the dimension of the channels; ``None`` when they are all trailing
            dimensions that the scale has.
        dims: how many dimensions the scale has.
        mean: of each channel, subtracted from a; ``None`` for an input that is
            normalised already.
        inverse_std: of each channel, multiplied afterwards.
    """

    def __init__(
        self,
        has_weight: bool,
        has_bias: bool,
        channel: int | None,
        dims: int,
        mean: Tensor | None,
        inverse_std: Tensor | None,
    ) -> None:
        super().__init__(has_weight, has_bias)
        self._channel = channel
        self._dims = dims
        self._mean = mean
        self._inverse_std = inverse_std

    def _broadcast(self, t: Tensor, like: Tensor) -> Tensor:
        """A tensor of ``(…, channels)`` against inputs of the layer."""
        if self._channel is None:
            middle = like.ndim - 1 - self._dims
            return t.reshape(t.shape[0], *[1] * middle, *like.shape[-self._dims :])
        return t.reshape(t.shape[0], -1, *[1] * (like.ndim - 2))

    def _reduced(self, t: Tensor, attacks: int) -> Tensor:
        if self._channel is None:
            return t.reshape(attacks, -1, math.prod(t.shape[-self._dims :])).sum(1)
        by_sample = t.flatten(2).sum(2) if t.ndim > 2 else t
        return by_sample.view(attacks, -1, t.shape[1]).sum(1)

    def form(
        self, a: Tensor, delta: Tensor, attacks: int
    ) -> tuple[list[Tensor], Saved]:
        """See :class:`Kernel`."""
        if self._mean is not None:
            a = a - self._broadcast(self._mean[None], a)
        parts = []
        if self.has_weight:
            scale = self._reduced(a * delta, attacks)
            parts.append(
                scale if self._inverse_std is None else scale * self._inverse_std
            )
        if self.has_bias:
            parts.append(self._reduced(delta, attacks))
        return parts, (a, delta)

    def adjoint(
        self, saved: Saved, cotangents: list[Tensor], needs_input: bool
    ) -> tuple[Tensor | None, Tensor]:
        """See :class:`Kernel`."""
        a, delta = saved
        u, b = self.split(cotangents)
        each = len(a) // len(cotangents[0])
        given: Tensor | None = None
        received: Tensor | None = None
        if b is not None:
            received = self._broadcast(b.repeat_interleave(each, 0), a)
        if u is not None:
            scale = u if self._inverse_std is None else u * self._inverse_std
            scale = self._broadcast(scale.repeat_interleave(each, 0), a)
            product = a * scale
            received = product if received is None else product.add_(received)
            if needs_input:
                given = delta * scale
        return given, cast(Tensor, received).expand_as(delta)
