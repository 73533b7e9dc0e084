"""``leakwatch dashboard``: its keys are logged, its panels exist."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest

from leakwatch.cli import main
from leakwatch.cli.dashboard import describe_dashboard
from leakwatch.reporting import Row, log_scalars

ASKED = ["dashboard", "--entity", "me", "--project", "mine"]


def panels() -> list[dict[str, Any]]:
    return [panel for section in describe_dashboard().values() for panel in section]


def test_a_dry_run_prints_the_view(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, "--dry-run", "--monitor", "watch"]) == 0
    view = json.loads(capsys.readouterr().out)
    assert (view["entity"], view["project"], view["name"]) == (
        "me",
        "mine",
        "leakwatch",
    )
    risk = view["sections"]["Risk over epochs"][0]
    assert risk["x"] == "watch/epoch"
    assert risk["y"] == ["watch/psnr/median", "watch/psnr/worst"]


def test_every_key_of_callbacks_is_logged() -> None:
    """By the keys of the rows of a monitor, and of an audit."""
    rows = [
        Row(1, 4, 0, 0, "i2f_psnr", 20.0),
        Row(1, 4, 0, 0, "lavp_l2_max", 1.0),
        Row(1, 4, None, None, "time_fraction", 0.1),
    ]
    rows += [Row(1, 4, 0, 0, f"audit/{kind}/psnr", 9.0) for kind in ("near", "random")]
    logged: set[str] = set()
    for prefix in ("leakwatch", "leakwatch-audit"):
        logged |= set(log_scalars(rows, prefix=prefix)) | {f"{prefix}/epoch"}
    drawn: list[str] = []
    for panel in panels():
        y = panel.get("y", [])
        drawn += [panel["x"]] if "x" in panel else []
        drawn += [y] if isinstance(y, str) else y
        drawn += [key.removesuffix(".max") for key in panel.get("metrics", [])]
        if "metric_regex" in panel:
            assert any(re.match(panel["metric_regex"], key) for key in logged)
    ours = {key for key in drawn if not key.startswith("trade_off/")}
    assert ours
    assert ours <= logged


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_wandb_has_every_panel() -> None:
    pytest.importorskip("wandb_workspaces")
    from leakwatch.cli.dashboard import _view

    model = _view("me", "mine", "leakwatch", describe_dashboard())._to_model()
    found = model.model_dump_json()
    assert "leakwatch/psnr/worst" in found
    assert len(model.spec.section.panel_bank_config.sections) == 6


def test_it_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb_workspaces.workspaces", None)
    assert main(ASKED) == 1
    assert "pip install wandb-workspaces" in capsys.readouterr().err


def test_a_reader_that_has_seen_enough_ends_no_command_in_a_traceback() -> None:
    command = [sys.executable, "-m", "leakwatch", "dashboard", "--entity", "me"]
    with subprocess.Popen(
        [*command, "--project", "p", "--dry-run"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as run:
        assert run.stdout is not None
        assert run.stderr is not None
        run.stdout.close()
        said = run.stderr.read()
    assert said == ""
    assert run.returncode == 0
