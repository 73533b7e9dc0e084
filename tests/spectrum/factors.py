"""Factors J of the matrices in `cases`, and a factor that counts and poisons."""

from __future__ import annotations

import torch
from torch import Tensor

from .cases import CASES, Case, Recorder, blocks, geometric, network_like, rotated


def factor(matrix: Tensor, more_rows: int = 7) -> Tensor:
    """A J with JᵀJ = matrix and a few rows more than columns."""
    values, vectors = torch.linalg.eigh(matrix)
    n = len(matrix)
    generator = torch.Generator().manual_seed(9)
    gaussian = torch.randn(n + more_rows, n, generator=generator, dtype=torch.float64)
    left, _ = torch.linalg.qr(gaussian)
    return (left * values.clamp_min(0).sqrt()) @ vectors.mT


FACTORS = [
    *CASES,
    Case("wide-spread", lambda: rotated(geometric(50, 1e12))),
    Case(
        "one-tiny", lambda: rotated(torch.cat([geometric(40, 10.0), blocks((1e-9, 1))]))
    ),
    Case("tiny-cluster", lambda: rotated(blocks((1.0, 20), (1e-7, 3)))),
    Case("larger", lambda: rotated(network_like(150, 6e4))),
]


class RecordingFactor(Recorder):
    """A factor J that records its products with J and Jᵀ."""

    def __init__(self, matrices: Tensor, fail: tuple[int, int] | None = None) -> None:
        super().__init__(matrices, fail)
        self.forwards, self.backwards = self.none_yet(), self.none_yet()

    @property
    def rows(self) -> int:
        return self._matrices.shape[1]

    def forward(self, v: Tensor, active: Tensor | None = None) -> Tensor:
        return self.product(self._matrices, v, active, self.forwards)

    def backward(self, u: Tensor, active: Tensor | None = None) -> Tensor:
        return self.product(self._matrices.mT, u, active, self.backwards)
