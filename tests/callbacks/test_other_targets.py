"""Callbacks watch samples whose targets are no class indices, given a criterion."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from monitor_cases import rows_of, trainer
from other_targets import TARGETS, network, samples
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import leakwatch
from leakwatch import ProbeSet
from leakwatch.callbacks import InversionAudit, LeakageMonitor


class Module(L.LightningModule):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.net, self.criterion = network(), TARGETS[name].criterion

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.criterion(self, *batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def watch(folder: Path, name: str, *callbacks: Any) -> Module:
    module = Module(name)
    data = DataLoader(TensorDataset(*samples(name, 12)), batch_size=6)
    trainer(folder, *callbacks).fit(module, data)
    return module


@pytest.mark.parametrize("name", TARGETS)
def test_a_monitor_records_what_score_says(name: str, tmp_path: Path) -> None:
    criterion = TARGETS[name].criterion
    watched = LeakageMonitor(
        4, criterion=criterion, verbose=False, scores=["lavp_l2_max", "i2f"]
    )
    module = watch(tmp_path, name, watched)
    probes = watched.probes
    assert probes is not None
    assert not probes.has_classes
    x, y = samples(name, 12)
    torch.testing.assert_close(probes.x, x[list(probes.index)])
    assert probes.y.equal(y[list(probes.index)])
    expected = leakwatch.score(
        module, probes.x, probes.y, ["lavp_l2_max"], noise_std=1e-4, criterion=criterion
    )["lavp_l2_max"]
    rows = [r for r in rows_of(watched) if (r.epoch, r.quantity) == (1, "lavp_l2_max")]
    assert [r.label for r in rows] == [None] * 4
    found = torch.tensor([r.value for r in rows], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert watched.run_directory is not None
    page = (Path(watched.run_directory) / "report.html").read_text()
    assert "class -1" not in page


def test_an_audit_attacks_them(tmp_path: Path) -> None:
    audited = InversionAudit(
        3, criterion=TARGETS["several"].criterion, attack="lavp-l2", steps=5,
        samples=2, verbose=False, every_n_epochs=1, scores=["i2f_bayes_psnr"],
    )  # fmt: skip
    watch(tmp_path, "several", audited)
    rows = [r for r in rows_of(audited) if r.quantity == "audit/near/psnr"]
    assert len(rows) == 2
    assert all(r.label is None and not math.isnan(r.value) for r in rows)
    assert audited.run_directory is not None
    page = (Path(audited.run_directory) / "report.html").read_text()
    assert "class -1" not in page


@pytest.mark.parametrize("name", TARGETS)
def test_without_a_criterion_they_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises((TypeError, ValueError), match="criterion"):
        watch(tmp_path, name, LeakageMonitor(4, verbose=False))


def test_probes_are_drawn_at_random_from_a_seed() -> None:
    x, y = samples("number", 40)
    items = list(zip(x, y, strict=True))
    one, two = (ProbeSet.from_dataset(items, n=8, seed=3) for _ in range(2))
    assert one.index == two.index
    assert one.index != ProbeSet.from_dataset(items, n=8, seed=4).index
    assert one.labels == (None,) * 8
    assert one.fingerprint() == two.fingerprint()
    assert "targets=() of torch.float32" in repr(one)
    with pytest.raises(ValueError, match="per_class=2 needs class indices"):
        ProbeSet.from_dataset(items, per_class=2)
    parts = [one.split(rank, 2) for rank in range(2)]
    assert torch.cat([part.y for part in parts]).sort()[0].equal(one.y.sort()[0])
