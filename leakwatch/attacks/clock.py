"""When an attack has to stop."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

__all__ = ["Clock", "TimeShares"]


@final
class Clock:
    """Says when to stop: before a step that would end too late.

    Args:
        deadline: of ``time.perf_counter()``, ``None`` for no limit.

    Attributes:
        after: seconds that what follows the last step takes.

    Example:
        >>> Clock(None).over(), Clock(time.perf_counter()).over()
        (False, True)
    """

    def __init__(self, deadline: float | None) -> None:
        self.deadline = deadline
        self.after = 0.0
        self._asked: float | None = None

    @property
    def last_end(self) -> float | None:
        """When the last step has to end, ``None`` for no limit."""
        return None if self.deadline is None else self.deadline - self.after

    def over(self) -> bool:
        """Whether the next step, if it takes as long as the last, ends too late.

        Ask once before each step.
        """
        end = self.last_end
        if end is None:
            return False
        now = time.perf_counter()
        took = 0.0 if self._asked is None else now - self._asked
        self._asked = now
        return now + took > end


@final
class TimeShares:
    """Divides a time limit among attacks that run one after another.

    Each gets an equal part of what is left, so that the next ones have what one leaves.

    Args:
        limit: seconds for all of them; ``None`` for no limit.
        attacks: how many there will be.

    Example:
        >>> shares = TimeShares(10.0, 2)
        >>> with shares.next() as first:
        ...     pass
        >>> with shares.next() as second:
        ...     pass
        >>> first, second > 9.9
        (5.0, True)
    """

    def __init__(self, limit: float | None, attacks: int) -> None:
        self._left, self._attacks = limit, max(attacks, 1)

    @contextmanager
    def next(self) -> Iterator[float | None]:
        """Gives the next attack its seconds, and takes the time until it has ended."""
        if self._left is None:
            yield None
            return
        began = time.perf_counter()
        try:
            # An attack without time still says that it had none.
            yield max(self._left / self._attacks, 1e-3)
        finally:
            self._left -= time.perf_counter() - began
            self._attacks = max(self._attacks - 1, 1)
