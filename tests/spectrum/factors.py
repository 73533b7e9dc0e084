"""Factors J of the matrices in `cases`, and a factor that counts and poisons."""

from __future__ import annotations

import torch
from torch import Tensor

from .cases import CASES, Case, blocks, geometric, network_like, rotated


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


class RecordingFactor:
    """A dense factor that counts products and poisons every row not asked for.

    ``fail`` names a sample and the call from which on its product is not finite.
    """

    def __init__(self, matrices: Tensor, fail: tuple[int, int] | None = None) -> None:
        self._matrices, self._fail = matrices, fail
        self.forwards = torch.zeros(len(matrices), dtype=torch.int64)
        self.backwards = torch.zeros(len(matrices), dtype=torch.int64)
        self.calls = 0

    @property
    def batch_size(self) -> int:
        return self._matrices.shape[0]

    @property
    def rows(self) -> int:
        return self._matrices.shape[1]

    @property
    def size(self) -> int:
        return self._matrices.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        return self._matrices.dtype

    @property
    def device(self) -> torch.device:
        return self._matrices.device

    def forward(self, v: Tensor, active: Tensor | None = None) -> Tensor:
        return self._product(self._matrices, v, active, self.forwards)

    def backward(self, u: Tensor, active: Tensor | None = None) -> Tensor:
        return self._product(self._matrices.mT, u, active, self.backwards)

    def _product(
        self, matrices: Tensor, v: Tensor, active: Tensor | None, counts: Tensor
    ) -> Tensor:
        assert v.dtype == self.dtype
        self.calls += 1
        if active is None:
            active = torch.ones(self.batch_size, dtype=torch.bool)
        counts += active
        out = torch.bmm(matrices, v[:, :, None])[:, :, 0]
        out[~active] = torch.nan
        if self._fail is not None and self.calls > self._fail[1]:
            out[self._fail[0], 0] = torch.inf
        return out
