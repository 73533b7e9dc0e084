"""Weights and directions in general position: what holds there rests on no zero."""

from __future__ import annotations

import torch
from torch import Tensor

from leakwatch.derivatives.runtime import Weights

__all__ = ["normal", "scale", "shaken_weights"]


def shaken_weights(at: Weights) -> Weights:
    """The weights moved by up to a tenth, and zeros to small numbers."""
    shared = {}
    generator = torch.Generator().manual_seed(0)
    for name, t in at.shared.items():
        noise = torch.rand(t.shape, generator=generator).to(t) - 0.5
        # Signs are kept: a weight may be under a root or a logarithm.
        shared[name] = torch.where(t == 0, 0.02 * noise, t * (1 + 0.2 * noise))
    return Weights(shared, at.fixed)


def scale(x: Tensor) -> float:
    """Root mean square of the entries, 1 where all are zero."""
    return float(x.double().square().mean().sqrt()) or 1.0


def normal(like: Tensor, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Standard normal numbers, the same for a seed in every type and on any device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(like)
