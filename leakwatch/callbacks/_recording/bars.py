"""Probes and audits in the progress bar of the Trainer, or as lines without one."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol, final

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from leakwatch.progress import SCORES, heard_by

__all__ = ["Lines", "Terminal", "shown"]

# Seconds between two looks at a bar, and between two lines.
_OFTEN: Final = 0.1
_SELDOM: Final = 30.0


class View(Protocol):
    """Shows progress: called with what is done, how much, and of how much."""

    def __call__(self, what: str, done: int, total: int) -> None:
        """Shows it."""

    def close(self) -> None:
        """Leaves nothing behind."""


@final
class Lines:
    """Plain lines with the time left, seldom: for logs and for no terminal.

    Args:
        say: prints a line.
        title: what a line begins with.
        every: seconds between two lines, and before the first.
        limit: seconds after which attacks are stopped; 0: never.
        clock: seconds from anywhere.
    """

    def __init__(
        self,
        say: Callable[[str], object],
        title: str,
        *,
        every: float | None = None,
        limit: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say, self._title = say, title
        self._every = _SELDOM if every is None else every
        self._clock, self._limit = clock, limit
        self._attacking: float | None = None
        self._what = ""
        self._first: tuple[int, float] | None = None
        self._said = clock()

    def __call__(self, what: str, done: int, total: int) -> None:
        """Prints a line if it is time."""
        now = self._clock()
        if what != self._what:
            self._what, self._first = what, None
        if self._attacking is None and what != SCORES:
            self._attacking = now
        if self._first is None and done > 0:
            self._first = done, now
        if now - self._said < self._every or not 0 < done < total:
            return
        self._said = now
        left = self._left(done, total, now)
        self._say(f"{self._title}: {what}, {done} of {total}{left}")

    def _left(self, done: int, total: int, now: float) -> str:
        """The time left at the pace after the first item, with its work for all."""
        first, since = self._first or (done, now)
        if done <= first or now <= since:
            return ""
        left = (now - since) / (done - first) * (total - done)
        if self._limit and self._attacking is not None:
            left = min(left, max(self._limit - (now - self._attacking), 0.0))
        return f", about {_duration(left)} left"

    def close(self) -> None:
        """Nothing stays open."""


@final
class Terminal:
    """A tqdm bar of its own, that is gone afterwards.

    Args:
        title: before what is done.
        settings: of the bar.
    """

    def __init__(self, title: str, **settings: Any) -> None:
        self._title, self._settings = title, settings
        self._what, self._total = "", 0
        self._bar: Any = None

    def __call__(self, what: str, done: int, total: int) -> None:
        """Moves the bar; another one for something else."""
        if self._bar is None or (what, total) != (self._what, self._total):
            self.close()
            self._what, self._total = what, total
            self._bar = Tqdm(
                total=total,
                desc=f"{self._title}: {what}",
                leave=False,
                dynamic_ncols=True,
                mininterval=_OFTEN,
                **self._settings,
            )
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """Takes the bar away."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


@final
class _Rich:
    """A task in the display of Lightning's Rich bar, whose columns show the time left.

    Args:
        bar: the callback; its display has started.
        title: before what is done.
    """

    def __init__(self, bar: RichProgressBar, title: str) -> None:
        self._display: Any = bar.progress
        self._title = title
        self._what, self._total, self._task = "", 0, None

    def __call__(self, what: str, done: int, total: int) -> None:
        """Moves the task; another one for something else."""
        if self._task is None or (what, total) != (self._what, self._total):
            self.close()
            self._what, self._total = what, total
            self._task = self._display.add_task(f"{self._title}: {what}", total=total)
        self._display.update(self._task, completed=done)
        self._display.refresh()

    def close(self) -> None:
        """Takes the task away."""
        if self._task is not None:
            self._display.remove_task(self._task)
            self._display.refresh()
            self._task = None


@contextmanager
def shown(
    trainer: Trainer,
    title: str,
    say: Callable[[str], object],
    *,
    lines: bool,
    limit: float = 0.0,
) -> Iterator[None]:
    """Show what is told within, in the main process.

    Args:
        trainer: whose bar it is.
        title: before what is done.
        say: prints a line.
        lines: whether to print some where there is no bar.
        limit: seconds after which attacks are stopped; 0: never.
    """
    plain = Lines(say, title, limit=limit) if lines else None
    view = _view(trainer, title) or plain if trainer.is_global_zero else None
    if view is None:
        yield
        return
    try:
        with heard_by(view):
            yield
    finally:
        # A bar that can't be removed must not end training.
        with contextlib.suppress(Exception):
            view.close()


def _view(trainer: Trainer, title: str) -> View | None:
    bar = trainer.progress_bar_callback
    if getattr(bar, "is_enabled", False) and _watched():
        if isinstance(bar, RichProgressBar) and bar.progress is not None:
            return _Rich(bar, title)
        if isinstance(bar, TQDMProgressBar):
            # Where the bar of validation is at other times.
            below = 2 * bar.process_position + 1
            return Terminal(title, position=below, file=sys.stdout)
    return None


def _watched() -> bool:
    """Whether somebody sees a bar move: at a terminal, or in a notebook."""
    return sys.stdout.isatty() or "ipykernel" in sys.modules


def _duration(seconds: float) -> str:
    """Write a time in words.

    Example:
        >>> _duration(42.4), _duration(200), _duration(9000)
        ('42 s', '3 min', '2.5 h')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
