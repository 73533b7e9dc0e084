"""The report while training goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from monitor_cases import Watcher, fit, monitor, record_of

from leakwatch.callbacks._recording import recorder

pytest.importorskip("plotly")

LIVE = "data-written="


def report_of(watched: Any) -> Path:
    return Path(str(watched.run_directory)) / "report.html"


def seen_during(root: Path, **changes: Any) -> tuple[list[bool], str]:
    """Whether there was a live report after each epoch; the report at the end."""
    watched = monitor(report=True, directory=str(root / "out"), **changes)

    def look(*_: Any) -> bool:
        page = report_of(watched)
        return page.is_file() and LIVE in page.read_text("utf-8")

    watcher = Watcher(look)
    fit(root, watched, watcher, max_epochs=2)
    return watcher.seen, report_of(watched).read_text("utf-8")


def test_it_is_written_after_probe_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "_EARLIEST", 0.0)
    said: list[str] = []
    monkeypatch.setattr(
        "leakwatch.callbacks._probing.session.say", lambda _, text: said.append(text)
    )
    seen, last = seen_during(tmp_path, verbose=True)
    assert seen == [True, True]
    assert sum(line.startswith("leakwatch report, new after") for line in said) == 1
    assert LIVE not in last
    assert "after epoch 2" in last


def test_neither_in_short_trainings_nor_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert seen_during(tmp_path / "short")[0] == [False, False]
    monkeypatch.setattr(recorder, "_EARLIEST", 0.0)
    assert seen_during(tmp_path / "unasked", live=False)[0] == [False, False]


def test_it_rests_after_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "_EARLIEST", 0.0)
    monkeypatch.setattr(recorder, "_REST", 1e9)
    written: list[Path] = []
    monkeypatch.setattr(
        recorder, "write_report", lambda path, **_: written.append(path)
    )
    fit(tmp_path, monitor(report=True), max_epochs=3)
    assert len(written) == 2  # once while it runs, once when it ends


def test_a_failure_is_said_once_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = monitor(directory=str(tmp_path / "plain"))
    fit(tmp_path, plain, max_epochs=2)
    monkeypatch.setattr(recorder, "_EARLIEST", 0.0)

    def refuse(*_: Any, live: bool = False) -> None:
        if live:
            raise OSError("the disk is full")

    monkeypatch.setattr(recorder, "write_report", refuse)
    watched = monitor(report=True, directory=str(tmp_path / "out"))
    with pytest.warns(UserWarning, match="during training: the disk is full") as said:
        fit(tmp_path, watched, max_epochs=2)
    assert len([w for w in said if "disk" in str(w.message)]) == 1
    assert record_of(watched) == record_of(plain)
