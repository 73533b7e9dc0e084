"""When an attack has to stop."""

from __future__ import annotations

import time
from typing import final

__all__ = ["Clock"]


@final
class Clock:
    """Says when to stop: before a step that would end too late.

    Args:
        deadline: of ``time.perf_counter()``, ``None`` for no limit.

    Example:
        >>> Clock(None).over(), Clock(time.perf_counter()).over()
        (False, True)
    """

    def __init__(self, deadline: float | None) -> None:
        self.deadline = deadline
        self._asked: float | None = None

    def over(self) -> bool:
        """Whether the next step, if it takes as long as the last, ends too late.

        Ask once before each step.
        """
        if self.deadline is None:
            return False
        now = time.perf_counter()
        took = 0.0 if self._asked is None else now - self._asked
        self._asked = now
        return now + took > self.deadline
