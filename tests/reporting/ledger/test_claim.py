from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest
from reporting.writers import writer_of

from leakwatch.reporting import RiskLedger
from leakwatch.reporting.ledger.claim import LOCK, claim, release

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no locks there")


def test_a_claim_is_for_one_process_and_ends_with_it(tmp_path: Path) -> None:
    directory = tmp_path / "deep" / "run"
    with writer_of(directory):
        assert not claim(directory)
        assert not claim(directory)
    assert claim(directory)  # the other one was killed
    assert claim(directory)
    assert stat.S_IMODE((directory / LOCK).stat().st_mode) == 0o600
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    release(directory)
    release(directory)
    with writer_of(directory):
        assert not claim(directory)


_RUN = """
import sys
from pathlib import Path
from leakwatch.reporting import RiskLedger, Row
from leakwatch.cli.checkpoint import free_directory
directory = free_directory(sys.argv[1], None, "attack")
ledger = RiskLedger(directory, run=sys.argv[2])
for step in range(3):
    ledger.append([Row(0, step, 1, 0, "i2f", 1.0)])
"""


def test_three_runs_in_one_folder_have_three_records(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen([sys.executable, "-c", _RUN, str(tmp_path / "run"), name])
        for name in "abc"
    ]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    names = ("run", "run-1", "run-2")
    ledgers = [RiskLedger.open(tmp_path / name) for name in names]
    assert {ledger.run for ledger in ledgers} == set("abc")
    assert [ledger.position for ledger in ledgers] == [3, 3, 3]
    assert not any(ledger.problems for ledger in ledgers if ledger.rows())
