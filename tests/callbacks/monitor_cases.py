"""Tiny modules and trainers that the monitor's tests share."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from leakwatch.callbacks import LeakageMonitor
from leakwatch.callbacks.probe_callback import ProbeCallback
from leakwatch.reporting import RiskLedger, Row

CLASSES = 3
TIMES = ("seconds", "time_fraction")


def dataset(n: int = 24, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 1, 4, 4, generator=generator)
    return TensorDataset(x, torch.arange(n) % CLASSES)


def loader(
    n: int = 24, batch_size: int = 4, shuffle: bool = True, seed: int = 0
) -> DataLoader[Any]:
    return DataLoader(dataset(n, seed), batch_size=batch_size, shuffle=shuffle)


class Tiny(L.LightningModule):
    """Every entry of its gradient depends on the input: i2f is finite."""

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        self.net = net or nn.Sequential(
            nn.Flatten(), nn.Linear(16, 6), nn.Sigmoid(), nn.Linear(6, CLASSES)
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class TinyVal(Tiny):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val/loss", F.cross_entropy(self(x), y))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)


class Watcher(Callback):
    """Notes something after every batch, or every epoch."""

    def __init__(
        self, look: Callable[[L.Trainer, L.LightningModule], Any], on: str = "epoch"
    ) -> None:
        self.look, self.on = look, on
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if self.on == "batch":
            self.seen.append(self.look(trainer, pl_module))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self.on == "epoch":
            self.seen.append(self.look(trainer, pl_module))


def monitor(**changes: Any) -> LeakageMonitor:
    """A monitor that takes milliseconds and prints nothing."""
    arguments: dict[str, Any] = {"probes": 3, "report": False, "verbose": False}
    return LeakageMonitor(**(arguments | changes))


def trainer(root: Path, *callbacks: Callback, **changes: Any) -> L.Trainer:
    arguments: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
        "default_root_dir": root,
        "callbacks": list(callbacks),
    }
    return L.Trainer(**(arguments | changes))


def fit(
    root: Path,
    *callbacks: Callback,
    module: L.LightningModule | type[L.LightningModule] = Tiny,
    data: Any = None,
    val: Any = None,
    ckpt_path: Any = None,
    seed: int = 0,
    **changes: Any,
) -> L.Trainer:
    """Train from a seed, a module's weights included, and return the trainer."""
    L.seed_everything(seed, verbose=False)
    run = trainer(root, *callbacks, **changes)
    if isinstance(module, type):
        module = module()
    run.fit(module, data if data is not None else loader(), val, ckpt_path=ckpt_path)
    return run


def rows_of(watched: ProbeCallback) -> list[Row]:
    assert watched.run_directory is not None
    return RiskLedger.open(watched.run_directory).rows()


def moments_of(watched: ProbeCallback) -> list[tuple[int, int]]:
    return list(dict.fromkeys((row.epoch, row.step) for row in rows_of(watched)))


def record_of(watched: ProbeCallback) -> list[tuple[Any, ...]]:
    """The ledger without times, in a form that compares NaN as equal."""
    return [
        (r.epoch, r.step, r.sample, r.label, r.quantity, repr(r.value), r.status)
        for r in rows_of(watched)
        if r.quantity not in TIMES
    ]


def streams() -> tuple[Any, ...]:
    """All global random states on a CPU, in a form that compares."""
    numpy = np.random.get_state()
    return (
        random.getstate(),
        numpy[1].tolist(),  # type: ignore[union-attr, index]
        numpy[2:],
        torch.get_rng_state().tolist(),
    )


def flat(tensors: Sequence[Tensor]) -> list[list[float]]:
    return [t.detach().flatten().tolist() for t in tensors]
