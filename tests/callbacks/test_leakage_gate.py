"""A gate acts on what the monitor beside it measures."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from monitor_cases import Tiny, loader, moments_of, monitor, trainer
from test_audit import audit

from leakwatch.callbacks import GateError, LeakageGate
from leakwatch.callbacks.probe_callback import RecordingCallback
from leakwatch.reporting import Row

LOW, HIGH = -100.0, 1000.0


def run(folder: Path, *callbacks: Callback, **changes: Any) -> tuple[Any, list[str]]:
    """The trainer after training, and what gates said."""
    made = trainer(folder, *callbacks, max_epochs=3, **changes)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made.fit(Tiny(), loader())
    said = [str(w.message) for w in caught if "the gate" in str(w.message)]
    return made, said


@pytest.mark.parametrize("first", [True, False])
def test_it_warns_at_each_step_whatever_comes_first(
    tmp_path: Path, first: bool
) -> None:
    watched, gate = monitor(), LeakageGate(max_psnr=LOW)
    made, said = run(tmp_path, *((gate, watched) if first else (watched, gate)))
    assert made.current_epoch == 3
    moments = ("before training", "after epoch 1", "after epoch 2", "after epoch 3")
    assert len(said) == len(moments)
    for moment, sentence in zip(moments, said, strict=True):
        assert f"'leakwatch' is broken: {moment}: 3 of 3 samples are above" in sentence


def test_it_lets_pass_what_holds(tmp_path: Path) -> None:
    gate = LeakageGate(
        max_psnr=HIGH, at_most={"leakwatch/time_fraction": 1.0}, unknown="pass"
    )
    made, said = run(tmp_path, monitor(), gate)
    assert (made.current_epoch, said) == (3, [])


def test_it_stops(tmp_path: Path) -> None:
    watched = monitor(at_start=False)
    made, said = run(tmp_path, watched, LeakageGate(max_psnr=LOW, action="stop"))
    assert made.current_epoch == 1
    assert len(said) == 1
    assert said[0].endswith("; training stops")


def test_it_fails_and_the_record_is_whole(tmp_path: Path) -> None:
    watched = monitor(at_start=False, report=True)
    gate = LeakageGate(max_class_psnr=LOW, action="fail")
    with pytest.raises(GateError, match="the mean of class 0 is"):
        run(tmp_path, watched, gate)
    assert moments_of(watched) == [(1, 6)]
    assert watched.run_directory is not None
    assert (Path(watched.run_directory) / "report.html").is_file()


@pytest.mark.parametrize("passes", [True, False])
def test_unknown_is_not_safe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passes: bool
) -> None:
    unknown = "pass" if passes else "fail"
    gate = LeakageGate(max_psnr=HIGH, unknown=unknown)
    # A monitor that is never due, and one that predicts nothing.
    for watched, why in (
        (monitor(at_start=False, every_n_epochs=9), "nothing was measured"),
        (monitor(scores=["grad_norm"], at_start=False), "no predicted PSNR"),
    ):
        _, said = run(tmp_path, watched, gate)
        assert all(why in sentence for sentence in said)
        assert bool(said) != passes


@pytest.mark.parametrize("passes", [True, False])
def test_the_mean_of_a_class_needs_all_its_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passes: bool
) -> None:
    rows: Any = RecordingCallback.latest_rows

    def one_lost(watched: RecordingCallback) -> list[Row]:
        found = rows.fget(watched)
        first = min((r.sample for r in found if r.label == 0), default=None)
        return [
            replace(row, value=math.nan, status="failed: x")
            if first is not None and row.sample == first
            else row
            for row in found
        ]

    monkeypatch.setattr(RecordingCallback, "latest_rows", property(one_lost))
    unknown = "pass" if passes else "fail"
    gate = LeakageGate(max_class_psnr=HIGH, unknown=unknown)
    _, said = run(tmp_path, monitor(probes=6, at_start=False), gate)
    assert bool(said) != passes
    why = "the mean of class 0 is not known: 1 of 2 samples is without a number"
    assert all(why in sentence for sentence in said)


def test_an_audit_is_judged_by_its_name(tmp_path: Path) -> None:
    gate = LeakageGate(max_psnr=LOW, monitor="leakwatch-audit", action="stop")
    _, said = run(tmp_path, monitor(), audit(), gate)
    assert len(said) == 1
    assert "'leakwatch-audit' is broken" in said[0]


def test_a_monitor_that_is_not_there(tmp_path: Path) -> None:
    gate = LeakageGate(max_psnr=25, monitor="leakwach")
    with pytest.raises(RuntimeError, match="did you mean 'leakwatch'"):
        trainer(tmp_path, monitor(), gate).fit(Tiny(), loader())


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({}, "a gate needs a limit"),
        ({"max_psnr": "25"}, "max_psnr must be a number"),
        ({"max_psnr": 25, "share": 1.0}, "share must lie in"),
        ({"max_psnr": 25, "action": "explode"}, "action must be one of"),
        ({"max_psnr": 25, "unknown": True}, "unknown must be one of"),
        ({"at_most": 3}, "at_most must map log keys"),
        ({"at_least": {"x": None}}, "at_least"),
    ],
)
def test_arguments(given: dict[str, Any], error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        LeakageGate(**given)
