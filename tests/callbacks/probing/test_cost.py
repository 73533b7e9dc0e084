"""What watching costs is said, and a budget is kept."""

from __future__ import annotations

from pathlib import Path

import pytest
from monitor_cases import Tiny, fit, loader, moments_of, monitor, trainer

from leakwatch.callbacks import InversionAudit, LeakageMonitor
from leakwatch.callbacks._probing import session
from leakwatch.callbacks._probing.cost import advice, affordable, forecast
from leakwatch.reporting import RiskLedger
from leakwatch.reporting.run_facts import RunFacts


def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(session, "say", lambda trainer, text: lines.append(text))
    return lines


def test_a_budget_that_allows_nothing_leaves_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = said(monkeypatch)
    watched = monitor(budget=1e-9, verbose=True, report=True)
    fit(tmp_path, watched, max_epochs=3)
    assert moments_of(watched) == [(0, 0)]
    metadata = RiskLedger.open(str(watched.run_directory)).read_metadata()
    assert metadata["left_out"]["epochs"] == [1, 2, 3]
    (note,) = [n for n in RunFacts.of(metadata).notes if "not probed" in n]
    assert note == "not probed after epochs 1, 2, 3: budget=1e-09 allows no more"
    assert sum("not probed, watching has taken" in line for line in lines) == 3
    page = Path(str(watched.run_directory)) / "report.html"
    assert "not probed after epochs 1, 2, 3" in page.read_text(encoding="utf-8")


def test_a_budget_is_kept_where_there_is_time(tmp_path: Path) -> None:
    watched = monitor(budget=0.999)
    fit(tmp_path, watched, max_epochs=2)
    assert moments_of(watched) == [(0, 0), (1, 6), (2, 12)]
    metadata = RiskLedger.open(str(watched.run_directory)).read_metadata()
    assert "left_out" not in metadata
    assert metadata["config"]["budget"] == 0.999


def test_what_was_left_out_survives_a_restart(tmp_path: Path) -> None:
    watched = monitor(budget=1e-9)
    first = fit(tmp_path, watched, max_epochs=2)
    checkpoint = tmp_path / "last.ckpt"
    first.save_checkpoint(checkpoint)
    again = monitor(budget=1e-9)
    trainer(tmp_path, again, max_epochs=3).fit(
        Tiny(), loader(), ckpt_path=checkpoint, weights_only=False
    )
    metadata = RiskLedger.open(str(again.run_directory)).read_metadata()
    assert metadata["left_out"]["epochs"] == [1, 2, 3]


def test_shares_of_training_and_the_schedule_that_would_do() -> None:
    # 3 s of 30 and 1 more of 41: within a tenth, not within a twentieth.
    assert affordable(0.1, 3.0, 40.0, 1.0)
    assert not affordable(0.05, 3.0, 40.0, 1.0)
    assert affordable(0.01, 0.0, 0.1, 0.0)
    # Epochs of 10 s, steps of 5 s: every 9.5 epochs is a twentieth.
    line = advice(5.0, 10.0, 30.0, 2, 1, 32)
    assert line == (
        "watching takes 33 % of the time from one probe step to the next; "
        "every_n_epochs=10 or probes=3 would bring it under 5 %"
    )
    assert 5.0 / (10 * 10.0 + 5.0) <= 0.05 < 5.0 / (9 * 10.0 + 5.0)
    assert 5.0 * 3 / 32 / (10.0 + 5.0 * 3 / 32) <= 0.05
    assert advice(5.0, 10.0, 30.0, 2, 1, 32, last=10) == line
    assert "every_n_epochs" not in advice(5.0, 10.0, 30.0, 2, 1, 32, last=9)
    none = advice(5.0, 10.0, 30.0, 2, 1, 2, last=9)
    assert none.endswith("precision='dashboard' takes less")
    small = advice(5.0, 10.0, 30.0, 2, 1, 2, last=9, cheaper=False)
    assert small.endswith("since epochs are short")
    assert advice(5.0, 10.0, 1000.0, 2, 1, 32) == ""
    assert advice(5.0, 10.0, 10.0, 2, 1, 32) == ""
    assert "one more" in forecast(1.0, 1, 5, 5)
    assert forecast(1.0, 1, 5, 4) == ""
    assert "each further one" in forecast(1.0, 8, 5, None)


def test_the_first_step_says_what_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = said(monkeypatch)
    monkeypatch.setattr(session, "_LONG", 0.0)
    monkeypatch.setattr("leakwatch.callbacks._probing.cost._SHORT", 0.0)
    fit(tmp_path, monitor(verbose=True), max_epochs=3)
    (before,) = [line for line in lines if "will take about" in line]
    (first,) = [line for line in lines if "expect about that" in line]
    (advised,) = [line for line in lines if "watching takes" in line]
    assert lines.index(before) < lines.index(first) < lines.index(advised)
    assert "for each of 3 more" in first


def test_an_audit_says_how_long_it_may_attack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = said(monkeypatch)
    for limit in (40.0, 20.0, None):
        audit = InversionAudit(
            4,
            attack=None,
            samples=1,
            scores=["grad_norm"],
            time_limit=limit,
            every_n_epochs=5,
            directory=str(tmp_path / str(limit)),
            report=False,
        )
        fit(tmp_path, audit, max_epochs=1)
    assert [line for line in lines if "may attack" in line] == [
        "leakwatch-audit: each audit may attack for 40 s (time_limit), after it has "
        "scored its samples"
    ]


@pytest.mark.parametrize("budget", [0.0, 1.0, -0.1, 2])
def test_a_budget_is_a_share(budget: float) -> None:
    with pytest.raises(ValueError, match=r"budget must lie in \(0, 1\)"):
        LeakageMonitor(budget=budget)
