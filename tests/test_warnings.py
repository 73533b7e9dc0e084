"""Of folders that nobody cleans up, the tests let pass those of W&B alone."""

from __future__ import annotations

import contextlib
import os
import tempfile
from typing import Any

import pytest


@pytest.mark.parametrize(
    ("whose", "passes"),
    [("wandb.sdk.artifacts.artifact", True), ("leakwatch.cli.record", False)],
)
def test_only_wandb_may_leave_a_folder(whose: str, passes: bool) -> None:
    place: dict[str, Any] = {"__name__": whose, "tempfile": tempfile}
    left = eval("tempfile.TemporaryDirectory()", place)
    with contextlib.nullcontext() if passes else pytest.raises(ResourceWarning):
        left._finalizer()  # what the garbage collector would call
    assert not os.path.exists(left.name)
