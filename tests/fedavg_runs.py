"""Small federations under a Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn

from leakwatch.datamodules import ArrayDataModule, ClientsDataModule
from leakwatch.models import FedAvgModule

LOCAL: dict[str, Any] = {"epochs": 2, "batch_size": 4, "lr": 0.1, "momentum": 0.5}
ROUNDS = 3


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, bias=False),
        nn.BatchNorm2d(3),
        nn.Sigmoid(),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(48, 3),
    )


def write_arrays(folder: Path) -> str:
    """60 images of 6×6 pixels in 3 classes that a small network tells apart."""
    generator = np.random.default_rng(0)
    images = generator.integers(0, 128, (60, 6, 6), np.uint8)
    labels = np.arange(60) % 3
    for image, label in zip(images, labels, strict=True):
        image[2 * label : 2 * label + 2] += 127
    path = folder / "images.npz"
    np.savez(path, train_images=images, train_labels=labels)
    return str(path)


def clients(
    path: str, augment: bool = False, workers: int = 0, **kwargs: Any
) -> ClientsDataModule:
    source = ArrayDataModule(path, batch_size=8, augment=augment, num_workers=workers)
    split = {"clients": 5, "alpha": 0.5, "share": 0.6, "seed": 1, **kwargs}
    return ClientsDataModule(source, "dirichlet", **split)


def module(**kwargs: Any) -> FedAvgModule:
    changes = {"freeze_batchnorm": False, "num_classes": 3, "seed": 1, **kwargs}
    return FedAvgModule(network(), **LOCAL, **changes)


def trainer(
    root: Path, rounds: int = ROUNDS, *callbacks: Callback, **kwargs: Any
) -> L.Trainer:
    settings = {"accelerator": "cpu", "logger": False, **kwargs}
    return L.Trainer(
        default_root_dir=root,
        max_epochs=rounds,
        callbacks=list(callbacks),
        enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **settings,
    )


class Look(Callback):
    """Weights and metrics after every round."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_train_epoch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule
    ) -> None:
        metrics = {
            k: v.clone()
            for k, v in trainer.callback_metrics.items()
            if k.startswith(("train/", "val/"))
        }
        state = {k: v.clone() for k, v in pl_module.state_dict().items()}
        self.seen.append(
            {
                "state": state,
                "metrics": metrics,
                "step": trainer.global_step,
                "stream": torch.get_rng_state(),
                "modes": [m.training for m in pl_module.modules()],
            }
        )


def assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def run(
    root: Path,
    path: str,
    *callbacks: Callback,
    settings: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Look:
    look = Look()
    net = module(**kwargs)
    torch.manual_seed(5)
    fit = trainer(root, ROUNDS, *callbacks, look, **(settings or {}))
    fit.fit(net, datamodule=clients(path))
    return look
