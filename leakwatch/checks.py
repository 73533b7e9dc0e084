"""Checks of a callback's arguments: what was given, what is expected, an example."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

__all__ = [
    "check_channels",
    "check_flag",
    "check_integer",
    "check_name",
    "check_number",
    "check_path",
    "check_scores",
]


def check_integer(name: str, value: Any, *, example: int, smallest: int = 0) -> int:
    """An integer of at least ``smallest``.

    Raises:
        TypeError: for anything but an integer; ``True`` is none.
        ValueError: for a smaller one.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(
            f"{name} must be an integer of at least {smallest}, got {value!r}; for "
            f"instance {name}={example}."
        )
    if value < smallest:
        raise ValueError(
            f"{name} must be at least {smallest}, got {value}; for instance "
            f"{name}={example}."
        )
    return int(value)


def check_number(
    name: str, value: Any, *, example: float, zero: bool = False, sign: bool = False
) -> float:
    """A finite number, positive unless said otherwise.

    Args:
        name: of the argument.
        value: what was given.
        example: a value that is accepted.
        zero: whether 0 is accepted.
        sign: whether any finite number is accepted.

    Raises:
        TypeError: for anything but a number; ``True`` and ``"1e-4"`` are none.
        ValueError: for a number out of range.
    """
    want = "finite" if sign else f"{'at least 0' if zero else 'positive'} and finite"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(
            f"{name} must be a number, {want}, got {value!r} "
            f"({type(value).__name__}); for instance {name}={example}."
        )
    number = float(value)
    fits = sign or number > 0 or (zero and number == 0)
    if not (math.isfinite(number) and fits):
        raise ValueError(
            f"{name} must be {want}, got {value}; for instance {name}={example}."
        )
    return number


def check_flag(name: str, value: Any) -> bool:
    """``True`` or ``False``.

    Raises:
        TypeError: for anything else; ``"false"`` would count as true.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}.")
    return value


def check_name(name: str, value: Any) -> str:
    """A word that can be part of a log key and the name of a directory.

    Raises:
        TypeError: for anything but a string.
        ValueError: for characters other than letters, digits, ``_``, ``-`` and ``.``.
    """
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, got {value!r}.")
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", value):
        raise ValueError(
            f"{name} is part of log keys and names a directory: letters, digits, '_', "
            f"'-' and '.' only, got {value!r}; for instance {name}='leakwatch-test'."
        )
    return value


def check_path(name: str, value: Any) -> str | None:
    """A path as a string, or ``None``.

    Raises:
        TypeError: for anything else.
        ValueError: for an empty string.
    """
    if value is None:
        return None
    path = value.__fspath__() if hasattr(value, "__fspath__") else value
    if not isinstance(path, str):
        raise TypeError(f"{name} must be a path or None, got {value!r}.")
    if not path.strip():
        raise ValueError(f"{name} is empty; expected a path, or None for the default.")
    return path


def check_scores(value: Any) -> list[str]:
    """Names of scores as a list.

    Raises:
        TypeError: for anything but strings.
        ValueError: for none.
    """
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, Sequence) or not all(isinstance(n, str) for n in names):
        raise TypeError(
            f"scores must be names of scores or groups, got {value!r}; for instance "
            f"scores=['lavp', 'i2f']."
        )
    if not names:
        raise ValueError(
            "scores is empty; expected names of scores or groups, for instance "
            "scores=['lavp', 'i2f']."
        )
    return list(names)


def check_channels(
    mean: Any, std: Any
) -> tuple[tuple[float, ...], tuple[float, ...]] | tuple[None, None]:
    """The normalisation (pixel − mean) / std, per channel.

    Raises:
        TypeError: for anything but sequences of numbers.
        ValueError: for one without the other, different lengths, or a std that is not
            positive.
    """
    if mean is None and std is None:
        return None, None
    if mean is None or std is None:
        raise ValueError(
            f"mean={mean!r} and std={std!r} describe one normalisation; give both or "
            f"neither, for instance mean=[0.5], std=[0.25]."
        )
    means, stds = _numbers("mean", mean), _numbers("std", std)
    if len(means) != len(stds):
        raise ValueError(
            f"mean has {len(means)} entries and std {len(stds)}; expected one per "
            f"channel in both."
        )
    if min(stds) <= 0:
        raise ValueError(f"std must be positive, got {list(stds)}.")
    return means, stds


def _numbers(name: str, values: Any) -> tuple[float, ...]:
    good = isinstance(values, Sequence) and not isinstance(values, str) and values
    if not good or not all(
        not isinstance(v, bool) and isinstance(v, Real) and math.isfinite(v)
        for v in values
    ):
        raise TypeError(
            f"{name} must be one finite number per channel, got {values!r}; for "
            f"instance {name}=[0.5, 0.5, 0.5]."
        )
    return tuple(float(v) for v in values)
