"""Data sets with every habit; workers that are spawned import little with them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

CLASSES, ITEMS, SIDE = 3, 24, 4


def label(i: int) -> int:
    return i % CLASSES


def image(i: int) -> Tensor:
    generator = torch.Generator().manual_seed(i)
    return torch.rand(1, SIDE, SIDE, generator=generator)


class Handle(Dataset[Any]):
    """Opens its file at the first access."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: Any = None
        images = torch.stack([image(i) for i in range(ITEMS)])
        path.write_bytes(images.numpy().tobytes())

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        if self.file is None:
            self.file = self.path.open("rb")
        self.file.seek(4 * SIDE**2 * i)
        raw = bytearray(self.file.read(4 * SIDE**2))
        return torch.frombuffer(raw, dtype=torch.float32).view(1, SIDE, SIDE), label(i)

    def __del__(self) -> None:
        if self.file is not None:
            self.file.close()


class Augmented(Dataset[Any]):
    """Draws from every stream."""

    def __init__(self) -> None:
        self.stream = np.random.default_rng(0)

    def __len__(self) -> int:
        return ITEMS

    def state(self) -> str:
        return repr(self.stream.bit_generator.state)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        noise = random.random() + np.random.rand() + self.stream.random()
        return (image(i) + torch.rand(1, SIDE, SIDE) + noise) / 5, label(i)


class Cached(Augmented):
    """Keeps what it read first, noise included."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[int, Any] = {}

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        if i not in self.kept:
            self.kept[i] = super().__getitem__(i)
        kept: tuple[Tensor, int] = self.kept[i]
        return kept


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        worker = torch.utils.data.get_worker_info()
        start, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for i in range(start, ITEMS, step):
            yield image(i) + 0.01 * torch.rand(1, SIDE, SIDE), label(i)
