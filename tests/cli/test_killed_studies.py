"""Studies by command that are killed in the middle, and started again."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import hooked
import pytest
from test_prepared_data import COMPARE, TRADE, config

_PATIENCE = 240.0  # seconds; a study takes about 15


def started(command: str, stated: str, out: Path, cells: Path) -> Any:
    here = Path(__file__).parent
    paths = [str(here), str(here.parents[1]), os.environ.get("PYTHONPATH", "")]
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "leakwatch", command, "--config", stated),
            *("--output", str(out), "--cells", str(cells)),
        ],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finished(process: Any) -> str:
    said, _ = process.communicate(timeout=_PATIENCE)
    assert process.returncode == 0, said[-4000:]
    return str(said)


def values(path: Path) -> list[dict[str, str]]:
    """A table without what it took."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [{k: v for k, v in row.items() if "seconds" not in k} for row in rows]


def times(cells: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in cells.glob("*.json")}


@pytest.mark.long
@pytest.mark.skipif(sys.platform == "win32", reason="no signals there")
@pytest.mark.parametrize(
    ("command", "asked", "table", "after"),
    [
        ("compare-inits", {"compare": COMPARE | {"seeds": 4}}, "values.csv", 1),
        ("trade-off", {"trade_off": TRADE | {"seeds": 2}}, "trade_off.csv", 2),
    ],
)
def test_a_killed_command_goes_on(
    command: str, asked: dict[str, Any], table: str, after: int, tmp_path: Path
) -> None:
    stated = config(tmp_path, hooked.Normalizing, raw=True, **asked)
    cells = tmp_path / "cells"
    process = started(command, stated, tmp_path / "killed", cells)
    until = time.monotonic() + _PATIENCE
    while len(times(cells)) < after and process.poll() is None:
        assert time.monotonic() < until
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "killed" / table).exists()
    kept = times(cells)
    assert len(kept) >= after

    said = finished(started(command, stated, tmp_path / "again", cells))
    assert "no cell is kept" not in said
    both = times(cells)
    assert len(both) > len(kept)
    assert {name: both[name] for name in kept} == kept

    finished(started(command, stated, tmp_path / "whole", tmp_path / "others"))
    assert times(tmp_path / "others").keys() == both.keys()
    found, whole = (values(tmp_path / name / table) for name in ("again", "whole"))
    assert len(found) > 1
    assert found == whole
