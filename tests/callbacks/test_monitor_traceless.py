"""Training with the monitor is bit-identical to training without it."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from monitor_cases import (
    CLASSES,
    Tiny,
    TinyVal,
    Watcher,
    fit,
    loader,
    moments_of,
    monitor,
    rows_of,
    streams,
)
from torch import Tensor, nn
from torch.nn import functional as F

from leakwatch.callbacks import LeakageMonitor


class Noisy(TinyVal):
    """Draws from every stream, keeps state in buffers and attributes."""

    def __init__(self) -> None:
        super().__init__(
            nn.Sequential(
                nn.Conv2d(1, 3, 3, padding=1),
                nn.BatchNorm2d(3),
                nn.Sigmoid(),
                nn.Dropout(0.3),
                nn.Flatten(),
                nn.Linear(48, CLASSES),
            )
        )
        self.calls = 0
        self.outputs: list[Tensor] = []
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen += 1
        out: Tensor = self.net(x)
        self.outputs = [*self.outputs[-2:], out.detach()]
        return out

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = x + 0.01 * random.random() + 0.01 * float(np.random.rand())
        loss = F.cross_entropy(self(x), y)
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Manual(Noisy):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss / 2)
        if batch_idx % 2:
            self.clip_gradients(optimizer, gradient_clip_val=0.1)
            optimizer.step()
            optimizer.zero_grad()


def look(trainer: L.Trainer, module: L.LightningModule) -> dict[str, Any]:
    """Everything about a training run that a monitor could disturb."""
    optimizer = trainer.optimizers[0].state_dict()
    return {
        "weights": {k: v.clone() for k, v in module.state_dict().items()},
        "grads": [
            None if p.grad is None else p.grad.clone() for p in module.parameters()
        ],
        "optimizer": [
            {k: torch.as_tensor(v).clone() for k, v in state.items()}
            for state in optimizer["state"].values()
        ],
        "modes": [m.training for m in module.modules()],
        "requires_grad": [p.requires_grad for p in module.parameters()],
        "calls": module.calls,
        "outputs": [t.clone() for t in module.outputs],
        "streams": streams(),
        "metrics": {
            k: v.clone()
            for k, v in trainer.callback_metrics.items()
            if not k.startswith("leakwatch")
        },
        "logged": {k: v.clone() for k, v in trainer.logged_metrics.items()},
        "step": trainer.global_step,
    }


def run(
    root: Path, module: type[Noisy], *callbacks: LeakageMonitor, **changes: Any
) -> list[dict[str, Any]]:
    watchers = Watcher(look, "batch"), Watcher(look, "epoch")
    fit(
        root,
        *callbacks,
        *watchers,
        module=module,
        val=loader(9, shuffle=False, seed=1),
        seed=2,
        max_epochs=3,
        **changes,
    )
    return watchers[0].seen + watchers[1].seen


def assert_same(found: Any, expected: Any) -> None:
    """Bit by bit."""
    if isinstance(expected, Tensor):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            assert_same(a, b)
    else:
        assert found == expected


class EveryStep(LeakageMonitor):
    def should_probe(self, step: int, epoch: int | None) -> bool:
        return True


@pytest.mark.parametrize(
    ("module", "changes"),
    [
        (Noisy, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
        (Noisy, {"val_check_interval": 2, "precision": "bf16-mixed"}),
        (Manual, {}),
    ],
)
def test_training_is_bit_identical(
    tmp_path: Path, module: type[Noisy], changes: dict[str, Any]
) -> None:
    plain = run(tmp_path / "plain", module, **changes)
    watched = EveryStep(probes=3, verbose=False, report=False)
    seen = run(tmp_path / "watched", module, watched, **changes)
    assert len(moments_of(watched)) > 8
    # The prediction in the range of pixels is a mean over draws.
    words = {r.status.split(":")[0] for r in rows_of(watched)}
    assert words <= {"ok", "undefined", "estimated"}
    assert_same(seen, plain)


def test_logged_training_metrics_are_the_same_in_the_file(tmp_path: Path) -> None:
    tables = []
    for name, callbacks in [("plain", []), ("watched", [monitor()])]:
        logger = CSVLogger(tmp_path / name)
        fit(
            tmp_path, *callbacks, module=TinyVal, val=loader(), max_epochs=2,
            logger=logger,
        )  # fmt: skip
        lines = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
        header = lines[0].split(",")
        rows = [dict(zip(header, line.split(","), strict=True)) for line in lines[1:]]
        own = [
            {k: v for k, v in row.items() if v and not k.startswith("leakwatch")}
            for row in rows
            if not row.get("leakwatch/seconds")
        ]
        tables.append(own)
    assert tables[0] == tables[1]
    assert len(tables[0]) > 4


@contextmanager
def only_references() -> Iterator[None]:
    """The cycle collector is off: what disappears has no cycle."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def count_tensors() -> tuple[int, int]:
    found = [o for o in gc.get_objects() if type(o) in (Tensor, nn.Parameter)]
    return len(found), sum(t.grad_fn is not None for t in found)


def test_nothing_is_left_in_memory_after_a_probe(tmp_path: Path) -> None:
    counts = []

    class Counting(EveryStep):
        def on_train_batch_end(self, *args: Any) -> None:
            super().on_train_batch_end(*args)
            counts.append(count_tensors())

    watched = Counting(probes=3, verbose=False, report=False)
    module = Tiny()
    module.training_step = quiet_step.__get__(module)  # type: ignore[method-assign]
    with only_references():
        fit(tmp_path, watched, module=module, data=loader(32))
    assert len(moments_of(watched)) == 9
    # After the first steps: Lightning's own results and the optimiser's state.
    assert len(set(counts[2:-1])) == 1, counts


def quiet_step(self: Tiny, batch: Any, batch_idx: int) -> Tensor:
    x, y = batch
    return F.cross_entropy(self(x), y)


def test_no_session_is_kept_after_training(tmp_path: Path) -> None:
    watched = monitor()
    fit(tmp_path, watched)
    held = [v for v in vars(watched).values() if isinstance(v, nn.Module | Tensor)]
    assert held == []
    assert watched._session is None
