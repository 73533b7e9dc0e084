"""What to say of a name that nothing has: the one that was probably meant, and all.

Knows no torch: the command line and reports use it before anything heavy is imported.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["meant", "unknown"]


def meant(name: object, known: Iterable[str]) -> str:
    """``"did you mean 'fit'? "``, or nothing where no name is close.

    Args:
        name: What was given.
        known: Names that there are.

    Example:
        >>> meant("LAVP", ["i2f", "lavp"])
        "did you mean 'lavp'? "
        >>> meant("xyzzy", ["i2f", "lavp"])
        ''
    """
    names = list(known)
    folded = {other.casefold(): other for other in reversed(names)}
    close = difflib.get_close_matches(str(name).casefold(), folded, n=1)
    return f"did you mean {folded[close[0]]!r}? " if close else ""


def unknown(kind: str, name: object, known: Iterable[str]) -> str:
    """A sentence about a name that is not known.

    Args:
        kind: What it should name, such as ``"score"``.
        name: What was given.
        known: Names that there are, in the order in which to list them.

    Example:
        >>> print(unknown("score", "i2ff", ["i2f", "lavp"]))
        unknown score 'i2ff'; did you mean 'i2f'? choose from i2f, lavp.
    """
    names = list(known)
    listed = ", ".join(names)
    return f"unknown {kind} {name!r}; {meant(name, names)}choose from {listed}."
