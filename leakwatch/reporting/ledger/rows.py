"""One measured value with its status, and its form in a CSV part."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, final

from leakwatch.status import STATUS_WORDS, Status

COLUMNS: Final = (
    "run",
    "epoch",
    "step",
    "sample",
    "class",
    "quantity",
    "value",
    "status",
)

_LONGEST_STATUS: Final = 2000
# A quote itself among them, so that reading can take one away.
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r", "'")


@final
@dataclass(frozen=True)
class Row:
    """One value of the ledger.

    Args:
        epoch: Completed epochs; 0 is before training.
        step: Optimizer steps taken.
        sample: Data-set index of the sample; None for a run-level quantity such
            as ``seconds``.
        label: Class of the sample; None where there is none.
        quantity: Name of the score, or ``loss``, ``confidence``, ...
        value: The number; NaN and infinity are allowed.
        status: ``"ok"`` or ``"<word>: <reason>"`` with a word of
            `leakwatch.status.STATUS_WORDS`. A value that is not usable never enters
            an aggregate.
    """

    epoch: int
    step: int
    sample: int | None
    label: int | None
    quantity: str
    value: float
    status: str = "ok"

    @property
    def usable(self) -> bool:
        """Whether the value may be read as a number.

        Example:
            >>> Row(0, 0, 3, None, "i2f", 1.0).usable
            True
            >>> Row(0, 0, 3, None, "i2f", 1.0, "unresolved: below floor").usable
            False
            >>> Row(0, 0, 3, None, "i2f", float("nan")).usable
            False
        """
        return is_usable(self.value, self.status)

    @property
    def bound(self) -> bool:
        """Whether exposure is at least that, and maybe more."""
        return self.usable and is_bound(self.status)


def status_word(status: str) -> str:
    """Return the word before the colon.

    Example:
        >>> status_word("not converged: residual 0.2 after 50 products")
        'not converged'
    """
    return status.partition(":")[0].strip()


def status_reason(status: str) -> str:
    """Return the text after the colon, which may be empty."""
    return status.partition(":")[2].strip()


def is_usable(value: float, status: str) -> bool:
    """Whether ``value`` may be read as a number: right status and not NaN."""
    return Status(status_word(status)).usable and not math.isnan(value)


def is_bound(status: str) -> bool:
    """Whether a value is known to be at least so exposed, and may be more.

    Example:
        >>> is_bound("estimated: exposure is at least that and at most 31.5 dB: …")
        True
        >>> is_bound("ok"), is_bound("estimated: within 3 %")
        (False, False)
    """
    said = "exposure is at least" in status_reason(status)
    return said and status_word(status) == "estimated"


def encode_rows(rows: Iterable[Row], run: str) -> bytes:
    """Return the CSV bytes of one part, header included.

    Floats are written with ``repr`` and so come back bit for bit.

    Raises:
        ValueError: If a status has an unknown word or a quantity has no name.
    """
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    run = inert(_one_line(run))
    writer.writerows(_encode(row, run) for row in rows)
    return text.getvalue().encode("utf-8", errors="backslashreplace")


def decode_rows(data: bytes) -> list[tuple[str, Row]]:
    """Return (run, row) pairs of one part.

    Raises:
        ValueError: If the part is cut short or is not a part at all; the text
            says what was found.
    """
    text = data.decode("utf-8")
    if not text.endswith("\n"):
        raise ValueError("it does not end with a line break: it was cut short")
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = next(reader, [])
        if tuple(header) != COLUMNS:
            raise ValueError(f"its first line is {header!r}, expected {COLUMNS!r}")
        return [_decode(cells) for cells in reader]
    except csv.Error as error:
        raise ValueError(str(error)) from error


def _encode(row: Row, run: str) -> tuple[object, ...]:
    if status_word(row.status) not in STATUS_WORDS:
        raise ValueError(
            f"status {row.status!r} of {row.quantity!r}: the word before the colon "
            f"must be one of {', '.join(STATUS_WORDS)}; "
            "for example 'failed: out of memory'"
        )
    if not row.quantity:
        raise ValueError(
            f"{row!r} has an empty quantity; expected a name such as 'i2f'"
        )
    return (
        run,
        int(row.epoch),
        int(row.step),
        "" if row.sample is None else int(row.sample),
        "" if row.label is None else int(row.label),
        inert(_one_line(row.quantity)),
        repr(float(row.value)),
        _one_line(row.status),
    )


def _decode(cells: list[str]) -> tuple[str, Row]:
    if len(cells) != len(COLUMNS):
        raise ValueError(f"a line has {len(cells)} cells, expected {len(COLUMNS)}")
    run, epoch, step, sample, label, quantity, value, status = cells
    row = Row(
        epoch=int(epoch),
        step=int(step),
        sample=int(sample) if sample else None,
        label=int(label) if label else None,
        quantity=_spoken(quantity),
        value=float(value),
        status=status,
    )
    return _spoken(run), row


def inert(text: str) -> str:
    """Put a quote before what a spreadsheet would run as a formula.

    Example:
        >>> inert("=HYPERLINK(0)"), inert("i2f_psnr")
        ("'=HYPERLINK(0)", 'i2f_psnr')
    """
    return f"'{text}" if text.startswith(_FORMULA) else text


def _spoken(text: str) -> str:
    return text.removeprefix("'")


def _one_line(text: str) -> str:
    """Collapse white space: exception texts bring line breaks and tracebacks."""
    line = " ".join(text.replace("\0", " ").split())
    if len(line) > _LONGEST_STATUS:
        line = line[: _LONGEST_STATUS - 1] + "…"
    return line
