"""Trainers of `pytorch_lightning` are refused before anything works by halves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from monitor_cases import loader
from torch import Tensor, nn

from leakwatch.callbacks import GradientDefense, InversionAudit, LeakageMonitor
from leakwatch.defenses import Budget, GaussianNoise

pytest.importorskip("pytorch_lightning")


@pytest.mark.parametrize(
    "make",
    [
        LeakageMonitor,
        InversionAudit,
        lambda: GradientDefense(GaussianNoise(Budget(0.1, "std"))),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_the_other_package_is_refused(make: Any, tmp_path: Path) -> None:
    import pytorch_lightning as pl

    class Module(pl.LightningModule):  # type: ignore[misc]
        steps = 0

        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.net(x)
            return out

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.steps += 1
            return nn.functional.cross_entropy(self(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    module = Module()
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, default_root_dir=tmp_path, callbacks=[make()],
    )  # fmt: skip
    with pytest.raises(TypeError, match=r"import lightning\.pytorch instead of"):
        trainer.fit(module, loader())
    assert module.steps == 0
