"""``leakwatch check`` lets nothing pass that nobody knows."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from leakwatch.cli.check import BROKEN
from leakwatch.cli.main import main
from leakwatch.reporting import RiskLedger, Row


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two probe steps, the first of which exposes a sample."""
    ledger = RiskLedger(tmp_path / "run", run="demo")
    for epoch, psnr in ((0, 40.0), (1, 20.0)):
        ledger.append([Row(epoch, epoch, 7, 0, "i2f_psnr", psnr)])
    return ledger.directory


def ends_with(status: int, *options: object) -> None:
    assert main(["check", *map(str, options)]) == status


def test_a_limit_that_is_no_number_is_refused(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for option in ("--max-psnr", "--max-class-psnr", "--at-most=leakwatch/psnr/max"):
        for value in ("nan", "inf"):
            ends_with(2, run, f"{option}={value}")
            assert value in capsys.readouterr().err


@pytest.mark.parametrize(
    "limit",
    ["--max-class-psnr=25", "--at-most=leakwatch/psnr/worst=25"],
)
def test_a_class_and_a_key_are_not_known_by_a_part_of_their_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], limit: str
) -> None:
    ledger = RiskLedger(tmp_path / "run", run="demo")
    lost = Row(0, 0, 8, 0, "i2f_psnr", math.nan, "failed: out of memory")
    ledger.append([Row(0, 0, 7, 0, "i2f_psnr", 20.0), lost])
    ends_with(BROKEN, ledger.directory, limit)
    assert "without a number" in capsys.readouterr().err
    ends_with(0, ledger.directory, limit, "--unknown-passes")


@pytest.mark.filterwarnings("ignore::leakwatch.reporting.LedgerWarning")
def test_a_damaged_record_is_not_safe(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ends_with(BROKEN, run, "--max-psnr=25")
    part = run / "ledger/part-000000.csv"
    whole = part.read_bytes()
    for damage in (whole.replace(b"40", b"10"), whole[:20], None):
        part.unlink() if damage is None else part.write_bytes(damage)
        capsys.readouterr()
        ends_with(BROKEN, run, "--max-psnr=25")
        assert part.name in capsys.readouterr().err
        ends_with(0, run, "--max-psnr=25", "--unknown-passes")
        assert "all limits hold" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore::leakwatch.reporting.LedgerWarning")
def test_nor_is_one_without_its_hashes(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "ledger/part-000001.csv").unlink()
    about = run / "run.json"
    content = json.loads(about.read_text())
    del content["files"]["ledger/part-000001.csv"]
    about.write_text(json.dumps(content))
    ends_with(BROKEN, run, "--max-psnr=45")
    assert "run.json" in capsys.readouterr().err


def audit_beside(run: Path, *values: float) -> Path:
    """A record of an attack beside a monitor's, as one training leaves them."""
    ledger = RiskLedger(run.with_name("leakwatch-audit"), run="demo")
    for epoch, value in enumerate(values):
        ledger.append([Row(epoch, epoch, 7, 0, "i2f_psnr", value)])
    ledger.write_metadata({"config": {"name": "leakwatch-audit", "noise_std": 0.01}})
    return ledger.directory


def test_no_record_hides_another(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run.rename(run.with_name("leakwatch-run"))
    ends_with(0, run.parent, "--max-psnr=45")
    audit = audit_beside(run, 50.0)
    capsys.readouterr()
    ends_with(BROKEN, run.parent, "--max-psnr=45")
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert line.startswith(f"{audit}: before training: 1 of 1 sample is above 45 dB")
    assert f"judged: {run}\n" in said.out
    assert f"judged: {audit}\n  Predictions hold for noise_std=0.01, " in said.out
    assert "all limits hold" not in said.out
    ends_with(0, run.parent, "--max-psnr=55")
    # Not even one without its description, or one that is reached by a link.
    (audit / "run.json").unlink()
    elsewhere = run.parent.parent / f"{run.parent.name}-elsewhere"
    audit.rename(elsewhere)
    audit.symlink_to(elsewhere)
    ends_with(BROKEN, run.parent, "--max-psnr=45")
    ends_with(0, run, "--max-psnr=45")


def test_a_key_is_that_of_the_callback_it_names(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    audit = audit_beside(run, 50.0)
    ends_with(0, run.parent, "--at-most=leakwatch/psnr/worst=45")
    said = capsys.readouterr().out
    assert f"no limit concerns: {audit}\n" in said
    assert f"judged: {run}\n" in said
    ends_with(BROKEN, run.parent, "--at-most=leakwatch-audit/psnr/worst=45")
    assert capsys.readouterr().err.startswith(f"{audit}: ")


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("psnr", "did you mean 'leakwatch/psnr/worst'?"),
        ("leakwatch/psnr/wrst", "did you mean 'leakwatch/psnr/worst'?"),
        ("leakwatch-audit/psnr/worst", "did you mean 'leakwatch/psnr/worst'?"),
        ("xyzzy", "there are leakwatch/psnr/median, leakwatch/psnr/worst, "),
    ],
)
def test_a_key_that_no_record_has_is_a_slip(
    run: Path, capsys: pytest.CaptureFixture[str], key: str, hint: str
) -> None:
    ends_with(2, run, f"--at-most={key}=3", "--unknown-passes")
    said = capsys.readouterr().err
    start = f"leakwatch check: error: no key {key!r} in this record; {hint}"
    assert said.startswith(start)
    assert said.count("\n") == 1


def test_a_key_without_a_number_is_no_slip(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = RiskLedger(tmp_path / "run", run="demo")
    failed = Row(0, 0, 7, 0, "i2f_psnr", math.nan, "failed: out of memory")
    ledger.append([failed])
    ledger.write_metadata({"quantities": {"audit/near/psnr": {"unit": "dB"}}})
    for key in ("leakwatch/psnr/worst", "leakwatch/audit/near/psnr/median"):
        ends_with(BROKEN, ledger.directory, f"--at-most={key}=3")
        assert f"{key} has no number" in capsys.readouterr().err
    # What was measured again is no record of its own.
    ledger.append([Row(1, 1, 7, 0, "i2f_psnr", 90.0)])
    ledger.truncate(1)
    ends_with(0, tmp_path, "--max-psnr=45", "--unknown-passes")


def test_what_is_no_part_is_no_damage(run: Path) -> None:
    (run / "ledger/notes.txt").write_text("")
    with pytest.warns(match=r"notes\.txt is ignored"):
        ends_with(0, run, "--max-psnr=45")


@pytest.mark.parametrize("command", [["check", "--max-psnr=45"], ["show"]])
def test_what_training_shares_otherwise_is_said_beside_a_judgement(
    run: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    RiskLedger.open(run).write_metadata({"training": ["another loss is trained"]})
    assert main([*command, str(run)]) == 0
    assert "read with care: another loss is trained" in capsys.readouterr().out
