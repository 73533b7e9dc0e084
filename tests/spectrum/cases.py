"""Operators that every solver is tested on; a new one joins with one line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


def rotated(eigenvalues: Tensor, seed: int = 0) -> Tensor:
    """A symmetric matrix with the given eigenvalues and random eigenvectors."""
    n = len(eigenvalues)
    generator = torch.Generator().manual_seed(seed)
    gaussian = torch.randn(n, n, generator=generator, dtype=torch.float64)
    q, _ = torch.linalg.qr(gaussian)
    matrix = (q * eigenvalues.to(torch.float64)) @ q.mT
    return (matrix + matrix.mT) / 2


def geometric(n: int, condition: float) -> Tensor:
    return condition ** -torch.linspace(0, 1, n, dtype=torch.float64)


def network_like(n: int, condition: float) -> Tensor:
    """A few outliers above a smooth decay, as H of a small network has."""
    values = 0.2 * geometric(n, condition / 5)
    values[:3] = torch.tensor([1.0, 0.55, 0.4])
    return values


def blocks(*pairs: tuple[float, int]) -> Tensor:
    return torch.cat(
        [torch.full((m,), value, dtype=torch.float64) for value, m in pairs]
    )


@dataclass(frozen=True)
class Case:
    name: str
    build: Callable[[], Tensor]
    multiplicity: int = 1

    def matrix(self) -> Tensor:
        return self.build()


def _wishart() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    j = torch.randn(120, 30, generator=generator, dtype=torch.float64)
    return j.mT @ j


CASES = [
    Case("wishart", _wishart),
    Case("network-like", lambda: rotated(network_like(60, 6e4))),
    Case("geometric", lambda: rotated(geometric(40, 6e4))),
    Case("tight-cluster", lambda: rotated(1 + 1e-3 * geometric(30, 10.0))),
    Case("two-clusters", lambda: rotated(blocks((1.0, 4), (1e-2, 20))), 4),
    Case(
        "double-top",
        lambda: rotated(torch.cat([blocks((2, 2)), geometric(30, 1e3)])),
        2,
    ),
    Case("identity", lambda: torch.eye(12, dtype=torch.float64), 12),
    Case("scaled-identity", lambda: 7e-9 * torch.eye(9, dtype=torch.float64), 9),
    Case("zero", lambda: torch.zeros(11, 11, dtype=torch.float64), 11),
    Case("rank-one", lambda: rotated(blocks((3.0, 1), (0.0, 19)))),
    Case("rank-one-axis", lambda: torch.diag(blocks((3.0, 1), (0.0, 19)))),
    Case(
        "rank-deficient",
        lambda: rotated(torch.cat([geometric(10, 50.0), blocks((0, 15))])),
    ),
    Case("diagonal", lambda: torch.diag(torch.arange(1.0, 16.0, dtype=torch.float64))),
    Case("one-by-one", lambda: torch.tensor([[2.5]], dtype=torch.float64)),
    Case("one-by-one-zero", lambda: torch.zeros(1, 1, dtype=torch.float64)),
    Case(
        "two-by-two",
        lambda: torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64),
    ),
    Case("tiny", lambda: 1e-30 * rotated(geometric(25, 1e2))),
    Case("huge", lambda: 1e20 * rotated(geometric(25, 1e2))),
]


class Recorder:
    """Dense products that are counted, with every row not asked for poisoned.

    ``fail`` names a sample and the call from which on its product is not finite.
    """

    def __init__(self, matrices: Tensor, fail: tuple[int, int] | None = None) -> None:
        self._matrices, self._fail = matrices, fail
        self.calls = 0

    @property
    def batch_size(self) -> int:
        return self._matrices.shape[0]

    @property
    def size(self) -> int:
        return self._matrices.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        return self._matrices.dtype

    @property
    def device(self) -> torch.device:
        return self._matrices.device

    def none_yet(self) -> Tensor:
        return torch.zeros(self.batch_size, dtype=torch.int64)

    def product(
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


class Recording(Recorder):
    """A symmetric operator that records its products."""

    def __init__(self, matrices: Tensor, fail: tuple[int, int] | None = None) -> None:
        super().__init__(matrices, fail)
        self.counts = self.none_yet()

    def matvec(self, v: Tensor, active: Tensor | None = None) -> Tensor:
        return self.product(self._matrices, v, active, self.counts)


def eigenvalues_of(matrix: Tensor) -> Tensor:
    """The oracle: float64 eigenvalues, descending."""
    return torch.linalg.eigvalsh(matrix.to(torch.float64)).flip(-1)


def mixed_batch(n: int = 40) -> Tensor:
    """Samples of one size that converge after very different numbers of products."""
    return torch.stack(
        [
            torch.eye(n, dtype=torch.float64),
            rotated(network_like(n, 6e4)),
            rotated(1 + 1e-2 * geometric(n, 2.0), seed=1),
            torch.zeros(n, n, dtype=torch.float64),
            rotated(geometric(n, 1e8), seed=2),
        ]
    )
