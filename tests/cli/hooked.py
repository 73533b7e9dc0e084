"""Modules that prepare batches in hooks, for configs of commands."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F

MEAN, STD = 0.4, 0.25


class Plain(L.LightningModule):
    """A small network of 3 classes on pictures of some side."""

    def __init__(self, side: int = 5) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Flatten(), nn.Linear(side**2, 6), nn.Sigmoid(), nn.Linear(6, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Normalizing(Plain):
    """Batches are normalised once they are on the device."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return (x - MEAN) / STD, y


class Shrinking(Plain):
    """Pictures lose their border."""

    def __init__(self) -> None:
        super().__init__(side=3)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0][..., 1:-1, 1:-1], batch[1]


class Brightening(Plain):
    """At random."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0] * (1 + 0.1 * torch.rand(len(batch[0]), 1, 1, 1)), batch[1]


class Learning(Plain):
    """What batches are divided by is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0] / self.scale, batch[1]


def normalized(x: Tensor) -> Tensor:
    return (x - MEAN) / STD
