"""Sums of inner products of gradient tangents, and how a convolution adds to them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from leakwatch.derivatives.layers.taps import Layer
from leakwatch.derivatives.layers.unfolding import spread, vectors

# Numbers in one block of the map between the two factors of a convolution.
_BLOCK = 2**21
# Beyond this many output positions Ġ itself is as fast.
_MOST_POSITIONS = 256
# Parts of H of which only those above the diagonal are formed.
_PARTS = 7


@final
class Workspace:
    """Memory and findings, used again for each sample of a batch.

    Asking the system for fresh pages takes as long as filling them.

    Attributes:
        trusted: whether layers of this network were found to come apart.
        batch: the samples, their labels and weights, if known before.
        straight: of each of them what ``sources.all_straight`` says.
    """

    def __init__(self, batch: tuple[Tensor, Tensor, Tensor] | None = None) -> None:
        self.trusted = False
        self.batch = batch
        self.straight: Sequence[bool | None] | None = None
        self._held: dict[str, Tensor] = {}

    def empty(
        self, name: str, rows: int, columns: int, like: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """Uninitialised ``(rows, columns)``, until the same name is asked for again."""
        size, held = rows * columns, self._held.get(name)
        fits = held is not None and held.dtype == dtype and held.device == like.device
        if held is None or not fits or held.numel() < size:
            self._held.pop(name, None)
            held = self._held[name] = like.new_empty(size, dtype=dtype)
        return held[:size].view(rows, columns)

    def elsewhere(self, straight: bool | None) -> Workspace:
        """For one sample of the same network at another image: memory and trust.

        Args:
            straight: what is known of it.
        """
        other = Workspace()
        other.trusted, other._held = self.trusted, self._held
        other.straight = [straight]
        return other

    def clear(self) -> None:
        """Gives all memory back."""
        self._held.clear()

    def product(self, name: str, a: Tensor, b: Tensor) -> Tensor:
        """``a @ b`` of two matrices, in memory of that name."""
        out = self.empty(name, len(a), b.shape[1], a, a.dtype)
        return torch.mm(a, b, out=out)


@final
class Sum:
    """JᵀJ, Jᵀg and ‖g‖² of one sample, summed over parts of the parameters.

    Attributes:
        along: Jᵀg, ``(d_x,)``, float64.
        squared: ‖g‖², float64.
    """

    def __init__(
        self, n: int, like: Tensor, workspace: Workspace, name: str = ""
    ) -> None:
        kind = torch.float64
        self._upper = workspace.empty(f"{name}upper", n, n, like, kind).zero_()
        self._half = workspace.empty(f"{name}half", n, n, like, kind).zero_()
        self.along = like.new_zeros(n, dtype=torch.float64)
        self.squared = like.new_zeros((), dtype=torch.float64)

    def add_square(self, m: Tensor, factor: float = 1.0) -> None:
        """Adds factor · m mᵀ, at 4/7 of the cost of the whole."""
        step = -(-len(m) // _PARTS)
        for start in range(0, len(m), step):
            part = self._upper[start : start + step, start:]
            part.addmm_(m[start : start + step], m[start:].T, alpha=factor)

    def add_pair(self, u: Tensor, v: Tensor) -> None:
        """Adds u vᵀ + v uᵀ."""
        self._half.addmm_(u, v.T)

    @property
    def trace(self) -> Tensor:
        """The trace so far."""
        return self._upper.diagonal().sum() + 2 * self._half.diagonal().sum()

    def total(self) -> Tensor:
        """JᵀJ, exactly symmetric; ends the sum."""
        self._upper.triu_().diagonal().mul_(0.5)
        self._half.add_(self._upper)
        return self._half + self._half.T


@final
@dataclass(frozen=True)
class ConvFactors:
    """A convolution's part of JᵀJ from the tangents of its factors.

    With unfolded patches a = (in · kernel) × T and δ, Δ = out × T,
    ⟨Ġ_i, Ġ_j⟩ = ⟨Δ_i aᵀa, Δ_j⟩ + ⟨A_i m, A_j⟩ + ⟨W_i, A_j⟩ + ⟨A_i, W_j⟩ with A as
    in × pixels: the map from A to δ Aᵀ works on each input channel alike, m is its
    normal matrix, and W = e Δ is its adjoint applied to Δ aᵀ.

    Attributes:
        layer: a convolution without groups that is called once.
        delta: δ.
        a: its input.
    """

    layer: Layer
    delta: Tensor
    a: Tensor

    def add_to(
        self, total: Sum, moved_delta: Tensor, moved_a: Tensor, workspace: Workspace
    ) -> None:
        """Adds this layer's part of JᵀJ, Jᵀg and ‖g‖².

        Args:
            total: where to.
            moved_delta: Δ, ``(n, elements of δ)``.
            moved_a: A, ``(n, elements of a)``.
            workspace: memory.
        """
        call = self.layer.calls[0]
        delta, a = self.delta.double(), self.a.double()
        td, ta = moved_delta.double(), moved_a.double()
        n, rows, channels = len(td), call.weight[0], call.weight[1]
        unfolded = vectors(call, a)[0].T
        positions = call.positions
        seen = unfolded
        if self.layer.bias is not None:
            seen = torch.cat((unfolded, unfolded.new_ones(1, positions)))
        root = torch.linalg.qr(seen, mode="r").R  # rootᵀ root = seenᵀ seen
        squares = workspace.product("squares", td.reshape(-1, positions), root.T)
        total.add_square(squares.view(n, -1))

        back = spread(call, delta)[0]  # (out, kernel, pixels)
        kernel, pixels = back.shape[1:]
        flat = back.reshape(-1, pixels)
        w = workspace.product("w", ta.reshape(-1, pixels), flat.T @ flat / 2)
        w = w.view(n, channels * pixels)
        moved = unfolded.reshape(channels, kernel, positions).permute(2, 0, 1)
        moved = moved.reshape(-1, kernel)
        at_delta = w.new_zeros(channels * pixels)
        step = max(1, _BLOCK // (positions * w.shape[1]))
        d = delta.reshape(rows, positions)
        for start in range(0, rows, step):
            some = back[start : start + step]
            first, size = start * positions, len(some) * positions
            e = workspace.empty("e", size, w.shape[1], w, w.dtype)
            torch.bmm(
                moved.expand(len(some), -1, -1),
                some,
                out=e.view(len(some), -1, pixels),
            )
            w.addmm_(td[:, first : first + size], e)
            at_delta += d[start : start + step].reshape(-1) @ e
        total.add_pair(w, ta)
        through = (d @ seen.T @ seen).reshape(-1)
        total.along += td @ through + ta @ at_delta
        total.squared += through @ d.reshape(-1)


def fewer_operations(layer: Layer, n: int) -> bool:
    """Whether :class:`ConvFactors` takes fewer operations than Ġ itself.

    Args:
        layer: a convolution without groups that is called once.
        n: number of directions.
    """
    call = layer.calls[0]
    saved = (_PARTS + 1) / (2 * _PARTS)
    outputs, inputs = call.output.numel(), call.input.numel()
    positions, pixels = call.positions, math.prod(call.input[2:])
    mixing = outputs * inputs + outputs * positions + inputs * pixels
    # Beyond many positions the map between the factors is not worth its memory.
    few = positions <= _MOST_POSITIONS
    return few and saved * outputs + inputs + mixing / n < saved * layer.numbers
