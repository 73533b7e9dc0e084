"""Numbers and moments in words that a reader without the papers understands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from leakwatch.reporting.ledger.table import Moment

HARDLY_BELOW: Final = 12.0
"""dB; rule of thumb: below it a picture is hardly recognisable. Of reconstructions that
were looked at, digits could be read at 15 dB, and nothing at 10: see
docs/measurements/attacks.md."""

CLEARLY_ABOVE: Final = 20.0
"""dB; rule of thumb: above it a picture is clearly recognisable. So were digits, and
the subjects of photographs of 32×32 pixels."""


def psnr_words(psnr: float, bound: bool = False) -> str:
    """Say what a predicted PSNR (dB) means to the eye; a rule of thumb.

    Args:
        psnr: dB.
        bound: Whether it is at least that.

    Example:
        >>> psnr_words(11.0), psnr_words(18.0), psnr_words(31.0)
        ('hardly recognisable', 'partly recognisable', 'clearly recognisable')
        >>> psnr_words(float("nan"))
        'not known'
        >>> psnr_words(18.0, bound=True)
        'partly recognisable or more'
    """
    if math.isnan(psnr):
        return "not known"
    if psnr > CLEARLY_ABOVE:
        return "clearly recognisable"
    word = "hardly" if psnr < HARDLY_BELOW else "partly"
    return f"{word} recognisable" + (" or more" if bound else "")


NO_RANKS: Final = (
    "bounds can't be ranked: exposure is at least that, and may be more; "
    "precision='exact' has the numbers"
)


def least(text: str, bound: bool, estimated: bool = False) -> str:
    """Say of a bound that exposure is at least that, and mark an estimate.

    Example:
        >>> least("21.3 dB", True), least("21.3 dB", False, estimated=True)
        ('at least 21.3 dB', '≈ 21.3 dB')
    """
    if bound:
        return f"at least {text}"
    return f"≈ {text}" if estimated else text


def sign_of_bound(
    text: str, bound: bool, sign: int = 1, *, estimated: bool = False
) -> str:
    """The same in a table.

    Args:
        text: The number.
        bound: Whether it is one.
        sign: +1 if a higher number is more exposed, −1 if less, 0 if not known.
        estimated: Whether it is an estimate.

    Example:
        >>> sign_of_bound("21.3", True), sign_of_bound("0.2", True, -1)
        ('≥ 21.3', '≤ 0.2')
        >>> sign_of_bound("21.3", False, estimated=True)
        '≈ 21.3'
    """
    relation = {1: "≥", -1: "≤"}.get(sign, "≈") if bound else "≈"
    return f"{relation} {text}" if bound or estimated else text


def psnr_level(psnr: float) -> str:
    """Return ``low``, ``middle``, ``high`` or ``unknown``, for colours."""
    return {
        "hardly recognisable": "low",
        "partly recognisable": "middle",
        "clearly recognisable": "high",
    }.get(psnr_words(psnr), "unknown")


def number(value: float, digits: int = 3) -> str:
    """Write a number with ``digits`` significant digits.

    Example:
        >>> number(1234.5), number(0.00001234), number(21.0), number(0.0)
        ('1230', '1.23e-05', '21.0', '0')
        >>> number(float("inf")), number(float("nan"))
        ('∞', 'not a number')
    """
    if math.isnan(value):
        return "not a number"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0.0:
        return "0"
    exponent = math.floor(math.log10(abs(float(f"{value:.{digits - 1}e}"))))
    if -4 <= exponent < 6:
        text = f"{float(f'{value:.{digits - 1}e}'):.{max(digits - 1 - exponent, 0)}f}"
    else:
        text = f"{value:.{digits - 1}e}"
    return text.replace("-", "−", 1) if text.startswith("-") else text


def count(number_of: int, noun: str) -> str:
    """Write a count with its noun, whose plural takes an s.

    Example:
        >>> count(1, "probe"), count(3, "probe")
        ('1 probe', '3 probes')
    """
    return f"{number_of} {noun}" + ("" if number_of == 1 else "s")


def decibels(value: float) -> str:
    """Write a PSNR with one decimal.

    Example:
        >>> decibels(21.26), decibels(float("nan"))
        ('21.3 dB', 'not known')
    """
    if math.isnan(value):
        return "not known"
    if math.isinf(value):
        return number(value) + " dB"
    return f"{value:.1f} dB".replace("-", "−")


def moment_words(moment: Moment) -> str:
    """Say when a probe was taken.

    Example:
        >>> moment_words(Moment(0, 0)), moment_words(Moment(3, 120))
        ('before training', 'after epoch 3')
    """
    if moment.epoch == 0:
        return "before training" if moment.step == 0 else f"at step {moment.step}"
    return f"after epoch {moment.epoch}"


def aligned(grid: Sequence[Sequence[str]]) -> str:
    """Write rows of cells as lines of text: first column flush left, others right.

    Example:
        >>> print(aligned([["scheme", "psnr"], ["normal", "21.3"], ["he", "9.0"]]))
        scheme  psnr
        normal  21.3
        he       9.0
    """
    widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in grid
    )
