"""Telling a user's mistake from a defect, and saying it in one sentence."""

from __future__ import annotations

import argparse
import linecache
import re
from pathlib import Path
from typing import Final

_PACKAGE: Final = str(Path(__file__).resolve().parents[1])
#: Errors whose text says what to do, whoever raised them.
_PLAIN: Final = (FileNotFoundError, PermissionError, ModuleNotFoundError)
_DELIBERATE: Final = (ValueError, TypeError, OSError, ImportError, RuntimeError)

# Scaffolding around the one line of a jsonargparse message that says what is wrong.
_NOISE: Final = re.compile(
    r"Does not validate against|Subtypes:|Errors:|Given value|Expected a path but|"
    r"Expected a <class 'NoneType'>|Not a valid subclass|Subclass types expect|"
    r"a class path \(str\)|a dict with"
)
_KEY: Final = re.compile(r'Parser key "([^"]*)":\s*(.*)')
_CLASS: Final = re.compile(r"Problem with given class_path '([^']*)':")
_GIVEN: Final = re.compile(r"Given value: (.*)")
_VAGUE: Final = "Expected a dot import path string"


def explain(error: BaseException) -> str | None:
    """Say in one sentence what the user can correct.

    Args:
        error: What a command raised.

    Returns:
        The sentence, or None if this is not known to be a mistake of the user: then
        the traceback is what helps.

    Example:
        >>> explain(FileNotFoundError("there is no file x.ckpt"))
        'there is no file x.ckpt'
        >>> explain(ZeroDivisionError("division by zero")) is None
        True
    """
    chain = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    # jsonargparse wraps what a constructor raised; the innermost says it best.
    for cause in reversed(chain):
        if isinstance(cause, _DELIBERATE) and _raised_by_us(cause):
            return _one_line(str(cause))
    if isinstance(error, argparse.ArgumentError) or "Union subtypes" in str(error):
        return shorten(str(error))
    named = type(error).__name__ == "MisconfigurationException"
    if named or isinstance(error, _PLAIN):
        return _one_line(str(error))
    return None


def shorten(message: str) -> str:
    """Reduce a parser's message about nested types to the line that matters.

    Args:
        message: As jsonargparse words it, over many lines.

    Example:
        >>> print(shorten('''Parser key "model":
        ...   Does not validate against any of the Union subtypes
        ...   Errors:
        ...     - Problem with given class_path 'leakwatch.models.LitClassifier':
        ...         Option 'lrr' is not accepted
        ...     - Expected a <class 'NoneType'>'''))
        model: leakwatch.models.LitClassifier: Option 'lrr' is not accepted
    """
    keys: list[str] = []
    owner, found, given = "", "", ""
    for raw in message.splitlines():
        line = raw.strip().removeprefix("- ")
        if match := _GIVEN.match(line):
            given = given or match[1]
        if found and not found.startswith(_VAGUE):
            continue
        if match := _KEY.match(line):
            keys.append(match[1])
            line = match[2]
        elif match := _CLASS.match(line):
            owner, line = match[1], ""
        if line and not _NOISE.match(line):
            found = found if line.startswith(_VAGUE) and found else line
    where = ".".join(keys)
    parts = [where, owner, found or _one_line(message)]
    simple = given and not given.startswith(("NestedArg(", "{", "[", "Namespace("))
    if simple and "Got value" not in found and not found.endswith(given):
        parts[-1] += f", got {given}"
    return ": ".join(part for part in parts if part)


def _raised_by_us(error: BaseException) -> bool:
    """Whether a raise statement of this package made the error: a check that failed."""
    trace = error.__traceback__
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    file = trace.tb_frame.f_code.co_filename
    line = linecache.getline(file, trace.tb_lineno).strip()
    return file.startswith(_PACKAGE) and line.startswith("raise ")


def _one_line(text: str) -> str:
    return " ".join(text.split())
