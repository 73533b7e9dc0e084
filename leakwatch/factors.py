"""Inner products of a layer's gradient tangents, from the tangents of its factors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from leakwatch.layers import Tap, margins, patches

# Numbers in one block of the map between the two factors of a convolution.
_BLOCK = 2**21
# Parts of H of which only those above the diagonal are formed.
_PARTS = 7


@final
class Workspace:
    """Memory and findings, used again for each sample of a batch.

    Asking the system for fresh pages takes as long as filling them.

    Attributes:
        trusted: whether layers of this network were found to come apart.
    """

    def __init__(self) -> None:
        self.trusted = False
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

    def __init__(self, n: int, like: Tensor, workspace: Workspace) -> None:
        self._upper = workspace.empty("upper", n, n, like, torch.float64).zero_()
        self._half = workspace.empty("half", n, n, like, torch.float64).zero_()
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

    def total(self) -> Tensor:
        """JᵀJ, exactly symmetric; ends the sum."""
        self._upper.triu_().diagonal().mul_(0.5)
        self._half.add_(self._upper)
        return self._half + self._half.T


@final
@dataclass(frozen=True)
class Factors:
    """δ, a of one layer and their tangents along every direction.

    Attributes:
        tap: the layer.
        delta: gradient at its output, as it comes.
        a: its input, as it comes.
        tangent_delta: ``(k, elements of delta)``.
        tangent_a: ``(k, elements of a)``.
    """

    tap: Tap
    delta: Tensor
    a: Tensor
    tangent_delta: Tensor
    tangent_a: Tensor

    def add_to(self, total: Sum, workspace: Workspace) -> None:
        """Adds this layer's part of JᵀJ, Jᵀg and ‖g‖²."""
        delta, a = self.delta.double(), self.a.double()
        td, ta = self.tangent_delta.double(), self.tangent_a.double()
        module = self.tap.module
        if isinstance(module, nn.Linear):
            _add_linear(module, delta.reshape(-1), a.reshape(-1), td, ta, total)
        else:
            _add_convolution(module, delta, a, td, ta, total, workspace)


def cheaper_by_factors(tap: Tap, n: int) -> bool:
    """Whether :class:`Factors` takes fewer operations for n directions than Ġ itself.

    Args:
        tap: the layer.
        n: number of directions.
    """
    if isinstance(tap.module, nn.Linear):
        return True
    saved = (_PARTS + 1) / (2 * _PARTS)
    made, given = tap.output.numel(), tap.input.numel()
    positions, pixels = math.prod(tap.output[2:]), math.prod(tap.input[2:])
    mixing = made * given + made * positions + given * pixels
    return saved * made + given + mixing / n < saved * tap.numbers


def _add_linear(
    module: nn.Linear, delta: Tensor, a: Tensor, td: Tensor, ta: Tensor, total: Sum
) -> None:
    a2 = a @ a + float(module.bias is not None)
    d2 = delta @ delta
    p, q = td @ delta, ta @ a
    total.add_square(td, float(a2))
    total.add_square(ta, float(d2))
    total.add_pair(p[:, None], q[:, None])
    total.along += p * a2 + q * d2
    total.squared += a2 * d2


def _add_convolution(
    module: nn.Conv2d,
    delta: Tensor,
    a: Tensor,
    td: Tensor,
    ta: Tensor,
    total: Sum,
    workspace: Workspace,
) -> None:
    """With unfolded patches a = (in · kernel) × T and δ, Δ = out × T.

    ⟨Ġ_i, Ġ_j⟩ = ⟨Δ_i aᵀa, Δ_j⟩ + ⟨A_i m, A_j⟩ + ⟨W_i, A_j⟩ + ⟨A_i, W_j⟩ with A as
    in × pixels: the map from A to δ Aᵀ works on each input channel alike, m is its
    normal matrix, and W = e Δ is its adjoint applied to Δ aᵀ.
    """
    n, rows, channels = len(td), module.out_channels, module.in_channels
    unfolded = patches(module, a)
    positions = unfolded.shape[1]
    seen = unfolded
    if module.bias is not None:
        seen = torch.cat((unfolded, unfolded.new_ones(1, positions)))
    root = torch.linalg.qr(seen, mode="r").R  # rootᵀ root = seenᵀ seen
    squares = workspace.product("squares", td.reshape(-1, positions), root.T)
    total.add_square(squares.view(n, -1))

    back = _adjoint(module, delta, a)  # (out, kernel, pixels)
    kernel, pixels = back.shape[1:]
    flat = back.reshape(-1, pixels)
    w = workspace.product("w", ta.reshape(-1, pixels), flat.T @ flat / 2)
    w = w.view(n, channels * pixels)
    moved = unfolded.view(channels, kernel, positions).permute(2, 0, 1)
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


def _adjoint(module: nn.Conv2d, delta: Tensor, a: Tensor) -> Tensor:
    """Gradient of δ aᵀ in one input channel, ``(out, kernel, pixels)``."""
    size, padding = module.kernel_size, margins(module)
    # The rows and columns at the end that no patch reaches.
    rest = [
        (a.shape[2 + i] + 2 * padding[i] - module.dilation[i] * (size[i] - 1) - 1)
        % module.stride[i]
        for i in range(2)
    ]
    ones = torch.eye(math.prod(size), dtype=delta.dtype, device=delta.device)
    found = torch.nn.functional.conv_transpose2d(
        delta.transpose(0, 1),
        ones.view(1, -1, *size),
        stride=module.stride,
        padding=padding,
        output_padding=rest,
        dilation=module.dilation,
    )
    return found.flatten(2)
