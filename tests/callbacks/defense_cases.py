"""Modules whose gradients are known in closed form, and what their optimisers take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

SIZE = 60


def inputs(n: int, size: int = SIZE) -> Tensor:
    return torch.randn(n, size, generator=torch.Generator().manual_seed(3))


def batches(x: Tensor, batch_size: int) -> DataLoader[Any]:
    labels = torch.zeros(len(x), dtype=torch.long)
    return DataLoader(TensorDataset(x, labels), batch_size=batch_size)


class Recording(torch.optim.SGD):
    """Keeps every gradient that a step consumed."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.consumed: list[Tensor] = []

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        out = super().step(closure)
        grads = [p.grad for g in self.param_groups for p in g["params"]]
        self.consumed.append(
            torch.cat([g.flatten().clone() for g in grads if g is not None])
        )
        return out


def criterion(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """w·x of each sample: its gradient is x."""
    out: Tensor = module(x)[:, 0]
    return out


class Known(L.LightningModule):
    """Never moves; the gradient of a batch is the mean or the sum of its inputs."""

    def __init__(self, reduction: str = "mean", size: int = SIZE) -> None:
        super().__init__()
        self.reduction = reduction
        self.layer = nn.Linear(size, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = criterion(self, *batch)
        return loss.mean() if self.reduction == "mean" else loss.sum()

    def configure_optimizers(self) -> Any:
        self.recording = Recording(self.parameters(), lr=0.0)
        return self.recording


class Two(L.LightningModule):
    """Manual optimisation with two optimisers; the second clips."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.first = nn.Linear(SIZE, 1, bias=False)
        self.second = nn.Linear(SIZE, 1, bias=False)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x = batch[0]
        one, two = self.optimizers()  # type: ignore[misc, attr-defined]
        one.zero_grad()
        self.manual_backward(self.first(x).mean())
        one.step()
        two.zero_grad()
        self.manual_backward(self.second(x).mean())
        self.clip_gradients(two, 0.5, "norm")
        two.step()

    def configure_optimizers(self) -> Any:
        self.recordings = [
            Recording(part.parameters(), lr=0.0) for part in (self.first, self.second)
        ]
        return self.recordings
