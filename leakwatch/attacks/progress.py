"""How far an attack has come, for somebody who waits for it."""

from __future__ import annotations

import math
import sys
from typing import final

__all__ = ["ProgressLine"]

_WIDTH = 78


@final
class ProgressLine:
    """One line on stderr that is written over; see the ``progress`` of an attack.

    Args:
        title: what the line begins with.
    """

    def __init__(self, title: str = "attack") -> None:
        self._title = title
        self._written = False

    def __call__(self, done: int, total: int, best: float) -> None:
        """Writes the line.

        Args:
            done: steps done.
            total: steps planned.
            best: median over targets of the best matching distance so far.
        """
        known = f"{best:.3g}" if math.isfinite(best) else "none yet"
        text = f"{self._title}: step {done}/{total}, best distance {known} (median)"
        print(f"\r{text:<{_WIDTH}}", end="", file=sys.stderr, flush=True)
        self._written = True

    def end(self) -> None:
        """Leaves the line."""
        if self._written:
            print(file=sys.stderr)
            self._written = False
