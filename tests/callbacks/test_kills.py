"""Killed at any moment and resumed: one folder, the record of an uninterrupted run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("kills.py")


@pytest.mark.skipif(sys.platform == "win32", reason="no fork there")
@pytest.mark.parametrize(
    ("kills", "seed"), [(3, 1), pytest.param(50, 0, marks=pytest.mark.long)]
)
def test_killed_at_random_moments_and_resumed(
    tmp_path: Path, kills: int, seed: int
) -> None:
    places = [str(path) for path in map(Path, sys.path) if path.is_dir()]
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(tmp_path), str(kills), str(seed)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(places)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    # Every kind of moment can be hit: steps, probes, files, checkpoints, the report.
    assert len(set(found["events"])) == 9
    assert [kill for kill in found["kills"] if kill["wrong"]] == []
    assert len(found["kills"]) == kills
    assert all(kill["killed"] for kill in found["kills"])
