"""``leakwatch.score``, callbacks and commands measure the same from the same arguments.

Each test goes through a whole signature: an argument that is added to one way and
forgotten in another fails here.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from test_cli import toy, write
from torch import Tensor, nn
from torch.nn import functional as F

import leakwatch
from leakwatch.callbacks import InversionAudit, LeakageMonitor
from leakwatch.callbacks._probing.run import ProbeRun
from leakwatch.cli import main
from leakwatch.reporting import RiskLedger
from leakwatch.scores import Scoring

pytestmark = pytest.mark.filterwarnings(
    "ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"
)


def tempered(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(module(x) / 2, y, reduction="none")


def brightened(x: Tensor) -> Tensor:
    return 1.5 * x


def halved(gradients: Tensor) -> Tensor:
    return gradients / 2


COMMON: dict[str, Any] = {
    "probes": 4,
    "every_n_epochs": 2,
    "noise_std": 0.05,
    "epsilon": 1e-3,
    "prior": "white",
    "prior_std": 0.2,
    "data_range": 2.0,
    "mean": [0.4],
    "std": [0.3],
    "target_psnr": 17.0,
    "criterion": "test_one_path.tempered",
    "prepare": "test_one_path.brightened",
    "dtype": "float64",
    "max_memory": 512.0,
    "products": 40,
    "seed": 3,
    "report": False,
    "live": False,
    "log": "all",
    "log_images": True,
    "log_ledger": True,
    "verbose": False,
    "name": "watched",
}
MONITOR = {**COMMON, "scores": ["bayes", "lavp"], "at_start": False,
           "parameters": "*3*", "layers": True, "precision": "dashboard",
           "budget": 0.9}  # fmt: skip
AUDIT = {
    **COMMON,
    "scores": ["bayes"],
    "at_start": True,
    "attack": "lavp-l2",
    "worst_case": "idlg",
    "steps": 3,
    "restarts": 2,
    "radius": 0.05,
    "samples": 3,
    "metrics": ["mse", "psnr"],
    "perturb": "test_one_path.halved",
    "time_limit": 100.0,
    "precision": "dashboard",
}
#: Of the ledger and its metadata: what is the record's own, or a time, or was seen
#: while it trained.
OWN = {"created", "run", "position", "subject", "training"}
TIMES = ("seconds", "time_fraction")


def facts(folder: Path) -> dict[str, Any]:
    metadata = RiskLedger.open(folder).read_metadata()
    config = dict(metadata.pop("config"))
    config = {k: v for k, v in config.items() if k not in ("checkpoint", "split")}
    return {**{k: v for k, v in metadata.items() if k not in OWN}, "config": config}


def measured(folder: Path, epoch: int) -> dict[tuple[Any, ...], tuple[float, str]]:
    return {
        (row.step, row.sample, row.label, row.quantity): (row.value, row.status)
        for row in RiskLedger.open(folder).rows()
        if row.epoch == epoch and row.quantity not in TIMES
    }


@pytest.mark.parametrize(
    ("kind", "solver"),
    [
        (LeakageMonitor, "exact"),
        (LeakageMonitor, "lanczos"),
        (LeakageMonitor, "power"),
        (InversionAudit, "lanczos"),
    ],
)
def test_a_command_repeats_a_callback_whose_arguments_are_all_others(
    tmp_path: Path, kind: type[LeakageMonitor | InversionAudit], solver: str
) -> None:
    arguments = {
        **(MONITOR if kind is LeakageMonitor else AUDIT),
        "solver": solver,
        "directory": str(tmp_path / "run"),
    }
    defaults = {n: p.default for n, p in inspect.signature(kind).parameters.items()}
    assert arguments.keys() == defaults.keys()
    assert [name for name, value in arguments.items() if value == defaults[name]] == []

    checkpoints = {
        "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
        "init_args": {"filename": "{epoch}", "save_top_k": -1},
    }
    callback = {
        "class_path": f"leakwatch.callbacks.{kind.__name__}",
        "init_args": arguments,
    }
    config = write(tmp_path / "toy.yaml", toy(tmp_path, [checkpoints, callback]))
    assert main(["fit", "--config", config]) == 0
    (checkpoint,) = tmp_path.rglob("epoch=1.ckpt")
    command = "audit" if kind is LeakageMonitor else "attack"
    again = tmp_path / "again"
    told = [f"--config={config}", f"--ckpt={checkpoint}", f"--output={again}"]
    assert main([command, *told]) == 0

    assert facts(again) == facts(tmp_path / "run")
    found, expected = measured(again, 2), measured(tmp_path / "run", 2)
    assert found.keys() == expected.keys()
    for key, (value, status) in expected.items():
        assert found[key][1] == status, key
        assert found[key][0] == pytest.approx(value, rel=1e-9, nan_ok=True), key
    assert any(math.isfinite(value) for value, _ in expected.values())


def test_score_gives_what_the_monitor_records() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.Sigmoid(), nn.Linear(6, 3))
    x, y = 2 * torch.rand(4, 1, 4, 4) - 1, torch.tensor([0, 1, 2, 0])
    shared = {
        "noise_std": 0.05,
        "epsilon": 1e-3,
        "prior": "white",
        "prior_std": 0.2,
        "data_range": 2.0,
        "target_psnr": 17.0,
        "criterion": tempered,
        "prepare": brightened,
        "parameters": "*3*",
        "solver": "lanczos",
        "max_memory": 512.0,
        "products": 40,
        "precision": "dashboard",
    }
    normalisation = {"mean": [0.4], "std": [0.3]}
    # What only single samples or a given perturbation have.
    special = {"delta", "prior_mean", "influence_steps"}
    told = {"module", "x", "y", "scores", "dtype", *shared, *normalisation, *special}
    assert told == set(inspect.signature(leakwatch.score).parameters)
    assert {f.name for f in fields(Scoring)} == told - {
        "module", "x", "y", "delta", "prior_mean", *normalisation,
    }  # fmt: skip
    scores = ["bayes", "lavp", "norms"]
    result = leakwatch.score(
        net, x, y, scores, dtype=torch.float64, **shared, **normalisation
    )

    probes = leakwatch.ProbeSet.from_tensors(x, y, **normalisation)
    monitor = LeakageMonitor(probes, scores, dtype="float64", **shared)
    rows = ProbeRun(monitor, net, probes, warn=pytest.fail).measure(0, 0).rows
    assert len(rows) == 4 * len(result)
    for row in rows:
        i = probes.index.index(row.sample)
        assert row.value == pytest.approx(
            float(result[row.quantity][i]), rel=1e-12, nan_ok=True
        )
        assert row.status == str(result.status[row.quantity][i])
