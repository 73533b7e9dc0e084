"""A schedule that never comes is said at the start, and not claimed at the end."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from monitor_cases import Tiny, fit, loader, monitor, rows_of

from leakwatch.callbacks import LeakageMonitor


def said(root: Path, watched: LeakageMonitor, **changes: Any) -> list[str]:
    """Our warnings of a training with 6 batches in an epoch."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(root, watched, **changes)
    texts = [str(w.message) for w in caught]
    return [text for text in texts if "will not run" in text]


@pytest.mark.parametrize(
    ("every", "changes", "epochs"),
    [
        (10, {"max_epochs": 3}, "3 epochs; set every_n_epochs to at most 3"),
        (2, {"max_epochs": 1}, "1 epoch; set every_n_epochs to at most 1"),
        (3, {"max_steps": 12, "max_epochs": -1}, "2 epochs"),
        (3, {"max_steps": 7, "max_epochs": 9}, "2 epochs"),
        (3, {"max_steps": 6, "accumulate_grad_batches": 3, "max_epochs": -1}, None),
        (4, {"max_steps": 6, "accumulate_grad_batches": 3, "max_epochs": -1}, "3 epo"),
        (3, {"max_epochs": 3}, None),
        (2, {"max_epochs": 3}, None),
        (9, {"fast_dev_run": True}, None),
    ],
)
def test_a_schedule_longer_than_the_training(
    tmp_path: Path, every: int, changes: dict[str, Any], epochs: str | None
) -> None:
    watched = monitor(every_n_epochs=every, at_start=False)
    found = said(tmp_path, watched, **changes)
    assert len(found) == (epochs is not None)
    if epochs is not None:
        assert found[0].startswith(
            "leakwatch: LeakageMonitor will not run in this training"
        )
        assert f"every_n_epochs={every}, but training ends after {epochs}" in found[0]
        assert not rows_of(watched)


def test_it_is_said_before_the_first_step(tmp_path: Path) -> None:
    class Stops(Tiny):
        def on_train_epoch_start(self) -> None:
            raise KeyboardInterrupt

    watched = monitor(every_n_epochs=2, at_start=False)
    with (
        pytest.warns(UserWarning, match="will not run"),
        pytest.raises(SystemExit),
    ):
        fit(tmp_path, watched, module=Stops)


def test_nothing_is_said_where_there_is_something_to_report(tmp_path: Path) -> None:
    assert not said(tmp_path, monitor(every_n_epochs=10))

    class Own(LeakageMonitor):
        def should_probe(self, step: int, epoch: int | None) -> bool:
            return step == 3

    own = Own(3, every_n_epochs=10, at_start=False, report=False, verbose=False)
    assert not said(tmp_path / "own", own, data=loader())


def test_one_that_comes_before_training_only_is_said(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="LeakageMonitor runs before training only"):
        fit(tmp_path, monitor(every_n_epochs=10), max_epochs=3)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="leakwatch")
        fit(tmp_path / "due", monitor(every_n_epochs=3), max_epochs=3)


def test_training_survives_where_warnings_are_errors(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message="leakwatch")
        run = fit(tmp_path, monitor(every_n_epochs=5, at_start=False))
    assert run.global_step == 6
