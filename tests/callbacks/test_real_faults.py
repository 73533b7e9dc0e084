"""Faults that are not played: a full disk, and a W&B process that is killed."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from monitor_cases import Tiny, Watcher, fit, flat, loader, moments_of, monitor

from leakwatch.reporting import RiskLedger

pytestmark = pytest.mark.long


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True)
    except OSError as error:
        pytest.skip(f"no mount: {error}")
    if done.returncode:
        pytest.skip(f"needs to mount a tmpfs: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_full_stops_no_training(small_disk: Path) -> None:
    def fill(trainer: Any, _: Any) -> None:
        if trainer.current_epoch == 2:
            filler = (small_disk / "filler").open("wb", buffering=0)
            with filler, contextlib.suppress(OSError):  # full, to the last byte
                while True:
                    filler.write(bytes(512))

    watched = monitor(
        directory=str(small_disk / "run"), every_n_epochs=1, report=True,
        scores=["norms"],
    )  # fmt: skip
    module = Tiny()
    alone = copy.deepcopy(module)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = fit(
            small_disk.parent, watched, Watcher(fill), module=module, data=loader(),
            max_epochs=5,
        )  # fmt: skip
    assert run.current_epoch == 5
    said = [str(w.message) for w in caught if "leakwatch" in str(w.message)]
    assert any("No space left" in text for text in said), said
    fit(small_disk.parent, module=alone, data=loader(), max_epochs=5)
    weights = [flat(list(m.parameters())) for m in (module, alone)]
    assert weights[0] == weights[1]
    (small_disk / "filler").unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # what is there is whole
        moments = [
            (r.epoch, r.step) for r in RiskLedger.open(small_disk / "run").rows()
        ]
    assert list(dict.fromkeys(moments))[:3] == [(0, 0), (1, 6), (2, 12)]
    assert moments_of(watched)[:3] == [(0, 0), (1, 6), (2, 12)]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds it in /proc")
@pytest.mark.parametrize("logs", ["logs", "quiet"])
def test_a_killed_process_of_wandb(tmp_path: Path, logs: str) -> None:
    here = Path(__file__).parent
    paths = [str(here), str(here.parents[1]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, str(here / "wandb_killed.py"), str(tmp_path), logs],
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "WANDB_SILENT": "true"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["killed"] > 0
    whole = [[0, 0], [1, 6], [2, 12], [3, 18], [4, 24]]
    if logs == "logs":  # the module's own metrics: Lightning ends, as without us
        assert found["error"]
        assert found["moments"][:3] == whole[:3]
    else:
        assert (found["error"], found["moments"]) == ("", whole)
        (said,) = found["said"]
        assert "a logger refused values: WandbLogger raised" in said
