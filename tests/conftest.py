"""One thread for all tests: their tensors are tiny, and two threads only wait."""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

# Before torch is imported, and inherited by the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")


class TemporaryDirectory(tempfile.TemporaryDirectory[str]):
    """Bears W&B's name where it is W&B's.

    W&B 0.23 leaves the folders of its artifacts to the garbage collector. Their names
    don't say whose they are, and the tests let pass no other's.
    """

    def __init__(self, suffix: str | None = None, *args: Any, **kwargs: Any) -> None:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if suffix is None and caller.startswith("wandb."):
            suffix = "wandb"
        super().__init__(suffix, *args, **kwargs)


tempfile.TemporaryDirectory = TemporaryDirectory  # type: ignore[misc]
