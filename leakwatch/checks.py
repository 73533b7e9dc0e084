"""Argument checks: each says what was given, what is expected, and an example.

What only one subject knows (the shapes of probes, the data of clients) is checked in
its own package, with these.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor, nn

from leakwatch.names import meant

__all__ = [
    "check_choice",
    "check_classes",
    "check_criterion",
    "check_dtype",
    "check_flag",
    "check_function",
    "check_inputs",
    "check_integer",
    "check_name",
    "check_number",
    "check_path",
    "check_samples",
    "check_scores",
    "check_shape",
    "check_tensor",
    "first_not_finite",
]

_RANGES = {
    "(0, inf)": "be positive and finite",
    "[0, inf)": "be at least 0 and finite",
    "(-inf, inf)": "be finite",
}


def check_integer(
    name: str, value: Any, *, smallest: int = 1, example: int | None = None
) -> int:
    """An integer, NumPy's included, of at least ``smallest``.

    Args:
        name: of the argument.
        value: what was given.
        smallest: that is accepted.
        example: a good value, for the error text; the smallest if there is no better.

    Raises:
        TypeError: for anything but an integer; ``True`` is none.
        ValueError: for a smaller one.
    """
    good = f"; for instance {name}={smallest if example is None else example}."
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(
            f"{name} must be an integer of at least {smallest}, got {value!r} "
            f"({type(value).__name__}){good}"
        )
    if value < smallest:
        raise ValueError(f"{name} must be at least {smallest}, got {value}{good}")
    return int(value)


def check_number(
    name: str, value: Any, interval: str = "(0, inf)", *, example: float
) -> float:
    """A finite number in an interval.

    Args:
        name: of the argument.
        value: what was given.
        interval: as mathematics writes it, such as ``[0, 1)``.
        example: a good value, for the error text.

    Raises:
        TypeError: for anything but a number; ``True`` and ``"1e-4"`` are none.
        ValueError: for a number outside of the interval.

    Example:
        >>> check_number("momentum", 0.9, "[0, 1)", example=0.5)
        0.9
        >>> check_number("momentum", 1, "[0, 1)", example=0.5)
        Traceback (most recent call last):
        ValueError: momentum must lie in [0, 1), got 1; for instance momentum=0.5.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(
            f"{name} must be a number in {interval}, got {value!r} "
            f"({type(value).__name__}); for instance {name}={example}."
        )
    try:
        number = float(value)
    except OverflowError:  # an integer of hundreds of digits
        number = math.inf
    low, high = (float(end) for end in interval[1:-1].split(","))
    above = low < number or (interval[0] == "[" and number == low)
    below = number < high or (interval[-1] == "]" and number == high)
    if not (above and below):
        raise ValueError(
            f"{name} must {_RANGES.get(interval, f'lie in {interval}')}, got {value}; "
            f"for instance {name}={example}."
        )
    return number


def check_choice(name: str, value: Any, choices: Iterable[str]) -> None:
    """Raise ValueError unless ``value`` is one of ``choices``."""
    choices = tuple(choices)
    # Of an array "in" has no answer.
    if not isinstance(value, str) or value not in choices:
        near = meant(value, choices) if isinstance(value, str) else ""
        raise ValueError(
            f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}"
            + (f"; {near.strip()}" if near else ".")
        )


def check_flag(name: str, value: Any) -> bool:
    """``True`` or ``False``.

    Raises:
        TypeError: for anything else; ``"false"`` would count as true.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}.")
    return value


def check_function(name: str, value: Any, what: str) -> None:
    """Raises unless there is a function, or nothing.

    Args:
        name: of the argument.
        value: what was given; ``None`` is accepted.
        what: the function's arguments and result, for the error text.

    Raises:
        TypeError: for anything else.
    """
    if value is not None and not callable(value):
        raise TypeError(
            f"{name} must be a function {what}, got {type(value).__name__}."
        )


def check_criterion(value: Any) -> None:
    """Raises unless there is a function of module, inputs and targets, or nothing.

    Args:
        value: what was given; ``None`` is accepted.

    Raises:
        TypeError: for what is no function, or one of other arguments, such as a loss
            of outputs and targets.
    """
    what = "criterion(module, x, y) that returns one loss per sample"
    check_function("criterion", value, what)
    try:
        # The signature of a module is that of any module.
        asked = value.forward if isinstance(value, nn.Module) else value
        signature = None if value is None else inspect.signature(asked)
    except (TypeError, ValueError):  # of a builtin
        return
    if signature is None:
        return
    try:
        signature.bind(None, None, None)
    except TypeError:
        given = getattr(value, "__name__", type(value).__name__)
        raise TypeError(
            f"criterion must be a function {what}, and {given} takes {signature}; for "
            "a loss of outputs and targets, for instance criterion=lambda module, x, "
            "y: torch.nn.functional.cross_entropy(module(x), y, reduction='none')."
        ) from None


def check_dtype(value: Any) -> torch.dtype:
    """The precision of that name, or that one itself.

    Raises:
        ValueError: for anything but ``"float32"``, ``"float64"`` and torch's own.
    """
    dtypes = {"float32": torch.float32, "float64": torch.float64}
    found = dtypes.get(value) if isinstance(value, str) else value
    if not isinstance(found, torch.dtype) or found not in dtypes.values():
        raise ValueError(f"dtype must be 'float32' or 'float64', got {value!r}.")
    return found


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


def check_inputs(x: Tensor) -> None:
    """Raises unless ``x`` is a floating-point tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"inputs must be a tensor, got a {type(x).__name__}.")
    if not x.is_floating_point():
        raise ValueError(
            f"inputs must be floating point network inputs, got {x.dtype}; convert "
            f"images with x.float() / 255 and normalise them as in training."
        )


def check_samples(x: Tensor, y: Tensor) -> None:
    """Raises unless there are floating-point inputs and one label for each."""
    check_inputs(x)
    if not isinstance(y, Tensor):
        raise TypeError(f"labels must be a tensor, got a {type(y).__name__}.")
    if x.ndim == 0 or y.ndim == 0 or len(x) != len(y) or len(x) == 0:
        raise ValueError(
            f"one label per sample and at least one sample are needed, got inputs of "
            f"shape {tuple(x.shape)} and labels of shape {tuple(y.shape)}."
        )


def check_classes(y: Tensor, who: str) -> None:
    """Raises unless the labels are class indices.

    Args:
        y: labels of samples.
        who: takes no others; the subject of the error's sentence.
    """
    if y.ndim != 1 or y.is_floating_point() or y.is_complex():
        raise ValueError(
            f"{who} takes class indices only, got targets of shape "
            f"{tuple(y.shape)} and {y.dtype}; leakwatch.score, leakwatch.attack, "
            f"LeakageMonitor and InversionAudit take others, with a criterion."
        )


def check_tensor(name: str, value: Any) -> None:
    """Raise TypeError for anything but a tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}.")


def check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raises unless the tensor has this shape."""
    if tensor.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}.")


def first_not_finite(rows: Tensor) -> int | None:
    """The first row that holds NaN or infinity, ``None`` if there is none."""
    bad = ~rows.isfinite().flatten(1).all(1)
    return int(bad.nonzero()[0]) if bool(bad.any()) else None
