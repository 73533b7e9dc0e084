"""What is wrong with the arguments of a defense, said before anything is shared."""

from __future__ import annotations

import math
import numbers

import torch
from torch import Tensor

__all__ = ["check_count", "check_gradient", "check_number", "check_share"]


def check_number(name: str, value: object, *, zero: bool = False) -> float:
    """Returns a positive finite number, or one of at least 0.

    Args:
        name: of the argument, for the message.
        value: what was given.
        zero: whether 0 is allowed.

    Raises:
        TypeError: not a number.
        ValueError: negative, not finite, or 0 where it is not allowed.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {value!r}.")
    number = float(value)
    if not (math.isfinite(number) and (number > 0 or (zero and number == 0))):
        words = "at least 0" if zero else "positive"
        raise ValueError(f"{name} must be finite and {words}, got {value!r}.")
    return number


def check_count(name: str, value: object) -> int:
    """Returns an integer of at least 1.

    Raises:
        TypeError: not an integer.
        ValueError: below 1.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an integer, got {value!r}.")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value!r}.")
    return int(value)


def check_share(name: str, value: object) -> float:
    """Returns a number from 0 to 1.

    Raises:
        TypeError: not a number.
        ValueError: outside of [0, 1].
    """
    number = check_number(name, value, zero=True)
    if number > 1:
        raise ValueError(f"{name} must be between 0 and 1, got {value!r}.")
    return number


def check_gradient(gradient: Tensor, rows: int | None = None) -> None:
    """Raises unless these are finite gradients, one in each row.

    Args:
        gradient: what was given.
        rows: how many are expected, any number when None.

    Raises:
        ValueError: another shape, integers, or NaN or infinity in a row.
    """
    if gradient.ndim != 2 or 0 in gradient.shape or not gradient.is_floating_point():
        raise ValueError(
            f"gradient must be (n, d_θ), floating point, one message in each row, got "
            f"{tuple(gradient.shape)} of {gradient.dtype}."
        )
    if rows is not None and len(gradient) != rows:
        raise ValueError(
            f"gradient has {len(gradient)} rows, but there are {rows} samples; this "
            f"defense needs the gradient of each sample."
        )
    finite = torch.isfinite(gradient).all(1)
    if not bool(finite.all()):
        raise ValueError(
            f"gradient of row {int((~finite).nonzero()[0])} is not finite; skip that "
            f"step, as the optimiser would have to."
        )
