"""How far a probe step has come, in the bar of the Trainer or as lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from monitor_cases import fit, monitor, record_of

from leakwatch.callbacks._recording import bars
from leakwatch.callbacks._recording.bars import Lines
from leakwatch.progress import heard_by, tell, teller


def test_lines_are_seldom_and_say_the_time_left() -> None:
    now = [0.0]
    said: list[str] = []
    lines = Lines(said.append, "epoch 3", every=30, clock=lambda: now[0])
    for done in range(11):
        lines("scores", done, 10)
        now[0] += 10
    assert said == [
        "epoch 3: scores, 3 of 10, about 70 s left",
        "epoch 3: scores, 6 of 10, about 40 s left",
        "epoch 3: scores, 9 of 10, about 10 s left",
    ]
    now[0] += 100
    lines("attack", 1, 500)  # 110 s after the last that was told
    assert said[-1] == "epoch 3: attack, 1 of 500"
    now[0] += 50
    lines("attack", 6, 500)  # five in 50 s, whatever the first took
    assert said[-1] == "epoch 3: attack, 6 of 500, about 82 min left"


def test_no_more_time_is_left_than_the_limit_allows() -> None:
    now = [0.0]
    said: list[str] = []
    lines = Lines(said.append, "audit", every=5, limit=60, clock=lambda: now[0])
    for done in range(1, 4):
        now[0] += 40
        lines("scores", done, 10)  # takes its time on top
    assert said[-1] == "audit: scores, 3 of 10, about 5 min left"
    for what, seconds in (("one", 10), ("two", 20)):
        lines(what, 1, 500)
        now[0] += seconds
        lines(what, 2, 500)
    assert said[-2:] == [
        "audit: one, 2 of 500, about 50 s left",
        "audit: two, 2 of 500, about 30 s left",
    ]


def test_a_listener_that_fails_is_not_asked_again() -> None:
    asked: list[int] = []

    def listener(what: str, done: int, total: int) -> None:
        asked.append(done)
        raise OSError("closed")

    assert teller("scores") is None
    with heard_by(listener):
        assert teller("scores") is not None
        tell("scores", 1, 3)
        tell("scores", 2, 3)
    assert asked == [1]


@pytest.mark.parametrize("kind", [TQDMProgressBar, RichProgressBar])
def test_the_trainers_bar_shows_it_and_is_clean_afterwards(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kind: Any,
) -> None:
    seen: list[tuple[str, str, int, int]] = []
    for view in (bars.Terminal, bars._Rich):

        def told(self: Any, *step: Any, call: Any = view.__call__) -> None:
            seen.append((type(self).__name__, *step))
            call(self, *step)

        monkeypatch.setattr(view, "__call__", told)
    monkeypatch.setattr(bars, "_watched", lambda: True)
    bar = kind()
    watched = monitor(directory=str(tmp_path / "shown"), at_start=False)
    fit(tmp_path, watched, bar, max_epochs=2, enable_progress_bar=True)
    name = "_Rich" if kind is RichProgressBar else "Terminal"
    assert seen == [(name, "scores", i, 3) for i in (1, 2, 3)] * 2
    if kind is RichProgressBar:
        assert all("scores" not in task.description for task in bar.progress.tasks)
    else:
        assert "leakwatch, epoch 2: scores" in capsys.readouterr().out
    quiet = monitor(directory=str(tmp_path / "quiet"), at_start=False)
    fit(tmp_path, quiet, max_epochs=2)
    assert record_of(watched) == record_of(quiet)


def test_without_a_bar_lines_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(bars, "_SELDOM", 0.0)
    monkeypatch.setattr(
        "leakwatch.callbacks._probing.session.say", lambda _, text: said.append(text)
    )
    fit(tmp_path, monitor(verbose=True, at_start=False))
    lines = [line.partition(", about")[0] for line in said]
    assert "leakwatch, epoch 1: scores, 1 of 3" in lines
    assert "leakwatch, epoch 1: scores, 2 of 3" in lines
