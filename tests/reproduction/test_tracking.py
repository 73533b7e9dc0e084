"""W&B gets the numbers, in the group of the paper, and only what was asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import wandb

from leakwatch.reproduction import Result, read
from leakwatch.reproduction.result import Entry
from leakwatch.reproduction.tracking import log


class Run:
    def __init__(self) -> None:
        self.logged: dict[str, Any] = {}
        self.finished = False

    def log(self, values: dict[str, Any]) -> None:
        self.logged |= values

    def finish(self) -> None:
        self.finished = True


def test_a_result_is_logged_as_a_table(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, asked = Run(), dict[str, Any]()

    def init(**arguments: Any) -> Run:
        asked.update(arguments)
        return run

    monkeypatch.setattr(wandb, "init", init)
    entry = Entry("C-10+L2", "max", "mse", 0.5, 0.4, 0.6, 300)
    result = Result("tiny", "small", {}, {}, {}, {"seeds": 3}, (entry,), (), ())
    log(read(tiny), result, tmp_path, "offline")
    assert (asked["mode"], asked["group"], asked["name"]) == (
        "offline",
        "reproduce-lavp",
        "tiny-small",
    )
    assert asked["config"] == {"seeds": 3}
    assert run.logged.keys() == {"numbers"}
    assert run.logged["numbers"].data == [
        ["C-10+L2", "max", "mse", 0.5, 0.4, 0.6, 300, "ok"]
    ]
    assert run.finished
