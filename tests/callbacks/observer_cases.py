"""Trainings of every kind, tiny: what a callback that watches must not change."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging
from observer_data import CLASSES, SIDE, Augmented, Cached, Handle, Stream
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

BATCH, EPOCHS = 4, 2

OPTIMIZERS = ("SGD", "Adam", "LBFGS", "two, by hand")
PRECISIONS = ("32-true", "bf16-mixed", "64-true")
FEATURES = (
    "accumulation",
    "clipping",
    "SWA",
    "EMA",
    "compile",
    "checkpointing",
    "spectral norm",
    "dropout",
    "BatchNorm",
    "tied",
    "frozen",
    "LoRA",
)
DATA = ("handle", "cached", "augmented", "iterable")
WORKERS = ("0", "2", "spawn")


@dataclass(frozen=True)
class Cell:
    """One training."""

    optimizer: str
    precision: str
    feature: str
    data: str
    workers: str

    def __str__(self) -> str:
        return "-".join(vars(self).values())


def loader(cell: Cell, root: Path) -> DataLoader[Any]:
    data: Dataset[Any]
    if cell.data == "handle":
        data = Handle(root / "images.bin")
    else:
        kinds = {"cached": Cached, "augmented": Augmented, "iterable": Stream}
        data = kinds[cell.data]()
    workers = {"0": 0, "2": 2, "spawn": 1}[cell.workers]
    return DataLoader(
        data,
        BATCH,
        shuffle=cell.data != "iterable",
        num_workers=workers,
        persistent_workers=workers > 0,
        multiprocessing_context="spawn" if cell.workers == "spawn" else None,
    )


# -- networks --------------------------------------------------------------------------


class LoRA(nn.Module):
    """A frozen layer, and a product of two thin matrices that is trained."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.frozen = nn.Linear(inputs, outputs).requires_grad_(False)
        self.a = nn.Linear(inputs, 2, bias=False)
        self.b = nn.Linear(2, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.frozen(x) + self.b(self.a(x))
        return out


class Checkpointed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return out


def network(feature: str) -> nn.Module:
    pixels, width = SIDE**2, 6
    first: nn.Module = nn.Linear(pixels, width)
    middle: list[nn.Module] = [nn.Sigmoid()]
    if feature == "BatchNorm":
        layers = [nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2), nn.Sigmoid()]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2 * pixels, CLASSES))
    if feature == "tied":
        width = pixels
        first, again = nn.Linear(pixels, width), nn.Linear(width, width)
        again.weight = first.weight
        middle = [nn.Sigmoid(), again, nn.Sigmoid()]
    if feature == "spectral norm":
        first = parametrizations.spectral_norm(first)
    if feature == "dropout":
        middle.append(nn.Dropout(0.3))
    if feature == "frozen":
        first.requires_grad_(False)
    if feature == "LoRA":
        first = LoRA(pixels, width)
    layers = [nn.Flatten(), first, *middle, nn.Linear(width, CLASSES)]
    return (Checkpointed if feature == "checkpointing" else nn.Sequential)(*layers)


class Module(L.LightningModule):
    def __init__(self, cell: Cell) -> None:
        super().__init__()
        self.cell = cell
        self.net = network(cell.feature)
        if cell.feature == "compile":
            self.net = torch.compile(self.net, backend="eager")  # type: ignore[assignment]
        self.automatic_optimization = cell.optimizer != "two, by hand"
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.losses.append(loss.item())
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        if self.automatic_optimization:
            return loss
        self.manual_backward(loss)
        if self.cell.feature == "accumulation" and batch_idx % 2 == 0:
            return None
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            if self.cell.feature == "clipping":
                self.clip_gradients(optimizer, 0.1, "norm")
            optimizer.step()
            optimizer.zero_grad()
        return None

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        match self.cell.optimizer:
            case "SGD":
                return torch.optim.SGD(trained, 0.1, momentum=0.9)
            case "Adam":
                return torch.optim.Adam(trained, 0.01)
            case "LBFGS":
                return torch.optim.LBFGS(trained, 0.1, max_iter=3)
            case _:
                ends = torch.optim.SGD(trained[:1], 0.1), torch.optim.Adam(trained[1:])
                return list(ends)


class EMA(Callback):
    """Averages weights over steps."""

    def __init__(self) -> None:
        self.average: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        now = [p.detach().clone() for p in pl_module.parameters()]
        before = self.average or now
        self.average = [0.9 * a + 0.1 * b for a, b in zip(before, now, strict=True)]


def allowed(cell: Cell) -> bool:
    """Whether Lightning and torch can train it without us."""
    if cell.feature == "SWA" and cell.optimizer == "two, by hand":
        return False
    return not (cell.data == "iterable" and cell.workers == "spawn")


def train(cell: Cell, root: Path, callbacks: list[Callback]) -> dict[str, Any]:
    """Everything about a training that somebody who watches could change."""
    root.mkdir(parents=True, exist_ok=True)
    L.seed_everything(1, verbose=False)
    data = loader(cell, root)
    module = Module(cell)
    averaged = EMA()
    own: list[Callback] = [averaged] if cell.feature == "EMA" else []
    if cell.feature == "SWA":
        own = [StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)]
    by_hand = not module.automatic_optimization
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=EPOCHS,
        precision=cell.precision,
        accumulate_grad_batches=1 if by_hand or cell.feature != "accumulation" else 2,
        gradient_clip_val=None if by_hand or cell.feature != "clipping" else 0.1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root,
        callbacks=[*own, *callbacks],
    )
    trainer.fit(module, data)
    dataset = data.dataset
    return {
        "losses": module.losses,
        "weights": module.state_dict(),
        "average": averaged.average,
        "gradients": [p.grad for p in module.parameters()],
        "optimizers": [o.state_dict() for o in trainer.optimizers],
        "modes": [m.training for m in module.modules()],
        "trained": [p.requires_grad for p in module.parameters()],
        "metrics": {
            k: v for k, v in trainer.callback_metrics.items() if "leakwatch" not in k
        },
        "streams": (
            random.getstate(),
            np.random.get_state()[1].tolist(),  # type: ignore[union-attr, index]
            torch.get_rng_state(),
        ),
        "opened": getattr(dataset, "file", None) is not None,
        "kept": getattr(dataset, "kept", None),
        "stream": getattr(dataset, "state", lambda: None)(),
        "step": trainer.global_step,
    }
