"""How far something that takes long has come, for whoever listens.

What computes calls `tell` and knows nothing of bars and terminals; what shows it wraps
the call into `heard_by`. Knows no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final, TypeAlias

__all__ = ["SCORES", "Listener", "heard_by", "tell", "teller"]

Listener: TypeAlias = Callable[[str, int, int], object]
"""``listener(what, done, total)``: what is done, and how much of it."""

#: What scoring is called.
SCORES: Final = "scores"

_listener: Final[ContextVar[Listener | None]] = ContextVar("listener", default=None)


def tell(what: str, done: int, total: int) -> None:
    """Say how far something has come; costs nothing where nobody listens.

    A listener that fails is not asked again: a bar must not end what it shows.

    Args:
        what: Is being done, such as ``"scores"``.
        done: Parts of it.
        total: Parts in all.

    Example:
        >>> with heard_by(print):
        ...     tell("scores", 3, 10)
        scores 3 10
    """
    listener = _listener.get()
    if listener is None:
        return
    try:
        listener(what, done, total)
    except Exception:
        _listener.set(None)


def teller(what: str) -> Callable[[int, int, float], None] | None:
    """Return what an attack takes as its ``progress``; None where nobody listens.

    Args:
        what: Is being done.
    """
    if _listener.get() is None:
        return None
    return lambda done, total, best: tell(what, done, total)


@contextmanager
def heard_by(listener: Listener) -> Iterator[None]:
    """Let a function hear what is told within.

    Args:
        listener: A :data:`Listener`.
    """
    before = _listener.get()
    _listener.set(listener)
    try:
        yield
    finally:
        _listener.set(before)
