"""``leakwatch attack`` on a checkpoint and on initial weights."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from test_cli import CHECKPOINTS, MONITOR, toy, write

from leakwatch.cli import main
from leakwatch.reporting import RiskLedger, Row

pytestmark = pytest.mark.filterwarnings(
    "ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"
)

AUDIT: dict[str, Any] = {
    "class_path": "leakwatch.callbacks.InversionAudit",
    "init_args": {
        "probes": 4,
        "attack": "lavp-l2",
        "worst_case": "gauss-newton",
        "steps": 40,
        "restarts": 2,
        "scores": ["lavp"],
        "verbose": False,
    },
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with a trained checkpoint, and the config of its training."""
    folder = tmp_path_factory.mktemp("attacked")
    config = write(folder / "toy.yaml", toy(folder, [CHECKPOINTS, MONITOR, AUDIT]))
    assert main(["fit", "--config", config]) == 0
    return folder, config


def values(ledger: RiskLedger, quantity: str) -> dict[int | None, Row]:
    return {row.sample: row for row in ledger.rows() if row.quantity == quantity}


def test_a_checkpoint_as_during_training(
    run: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, config = run
    checkpoint = folder / "logs/version_0/checkpoints/best.ckpt"
    out = str(tmp_path / "out")
    arguments = ["--config", config, "--ckpt", str(checkpoint), "--output", out]
    assert main(["attack", *arguments]) == 0
    printed = capsys.readouterr().out
    assert "audit/random/psnr" in printed
    found = RiskLedger.open(out)
    during = RiskLedger.open(folder / "logs/version_0/leakwatch-audit")
    epoch = found.rows()[0].epoch
    for quantity in ("audit/near/psnr", "audit/random/psnr", "lavp_l2_max"):
        before = {
            r.sample: r
            for r in during.rows()
            if r.quantity == quantity and r.epoch == epoch
        }
        after = values(found, quantity)
        assert after.keys() == before.keys()
        assert len(after) == 4
        for sample, row in after.items():
            assert row.value == pytest.approx(before[sample].value, rel=1e-6), quantity
            assert row.status == before[sample].status
    assert "audit/spearman/lavp_l2_min/near/psnr" in {
        r.quantity for r in found.rows() if r.sample is None
    }
    assert found.attacks()[0]["original"].shape == (4, 5, 5, 1)
    assert "What attacks achieved" in (Path(out) / "report.html").read_text()


def test_a_network_that_was_not_trained(
    run: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _, config = run
    assert main(["attack", "--config", config, "--probes", "2"]) == 0
    found = RiskLedger.open(tmp_path / "leakwatch-attack")
    assert {row.epoch for row in found.rows()} == {0}
    assert len(values(found, "audit/random/psnr")) == 2
    assert all(
        math.isfinite(r.value) for r in values(found, "audit/near/match").values()
    )
    assert main(["attack", "--config", config, "--probes", "2"]) == 0
    assert (tmp_path / "leakwatch-attack-1").is_dir()


def test_mistakes(
    run: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, config = run
    assert main(["attack", "--config", config, "--ckpt", "no.ckpt"]) == 1
    assert "there is no checkpoint no.ckpt" in capsys.readouterr().err
    wrong = {**AUDIT, "init_args": {**AUDIT["init_args"], "attack": "inverting"}}
    other = write(tmp_path / "wrong.yaml", toy(tmp_path, [wrong]))
    assert main(["attack", "--config", other]) != 0
    assert "inverting-gradients" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--config=", "--config", "--from"])
def test_a_run_of_a_user_s_own_script_has_no_config(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = RiskLedger(tmp_path / "leakwatch-run")
    ledger.write_metadata({})
    given = str(tmp_path) if option == "--from" else str(tmp_path / "config.yaml")
    options = [option + given] if option.endswith("=") else [option, given]
    assert main(["attack", *options]) == (1 if option == "--from" else 2)
    said = capsys.readouterr().err
    assert "; only runs of `leakwatch fit` can be scored or attacked from the" in said
    assert "leakwatch.attack(module, x, y)" in said
    # A logger may have put it elsewhere.
    if option != "--from":
        saved = ledger.directory / "config.yaml"
        saved.touch()
        assert main(["attack", *options]) == 2
        assert f"there is no {given}, but {saved}." in capsys.readouterr().err


@pytest.mark.parametrize("terminal", [True, False])
def test_somebody_who_waits_sees_how_far_it_is(
    run: tuple[Path, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    terminal: bool,
) -> None:
    _, config = run
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    assert main(["attack", "--config", config, "--output", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().err
    for start in ("lavp-l2, random", "gauss-newton, near"):
        assert (f"leakwatch attack: {start} start" in shown) == terminal
