"""A trade-off as lines of text."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from leakwatch.defenses.budget import Unit
from leakwatch.reporting.words import number
from leakwatch.studies.trade_off_grid import NONE
from leakwatch.studies.trade_off_outcomes import Attacker
from leakwatch.studies.trade_off_rows import TradeOffRow

if TYPE_CHECKING:
    from leakwatch.studies.trade_off_result import TradeOff

__all__ = ["columns", "decibels", "notes", "text_table"]

_UNKNOWN: Final = "not known"

# How far what training consumed may be from the budget; few draws scatter.
_OFF: Final = 0.2


def columns(found: TradeOff) -> tuple[list[str], list[list[str]]]:
    """Header and cells, in words: a row for each defense and budget.

    Args:
        found: the trade-off.
    """
    head = ["defense", "budget", "trained ‖δ‖/‖g‖", "accuracy", "attacked ‖δ‖/‖g‖"]
    for who in found.attackers:
        head += [f"{who}, dB", "worst"]
    head += [f"predicted {who}" for who in found.attackers if _predicts(found, who)]
    lpips = [who for who in found.attackers if _perceives(found, who)]
    head += [f"LPIPS {who}" for who in lpips]
    lines = []
    for row in found.summary:
        cells = [
            row.defense if row.coefficient is None else row.setting.words(),
            "–" if _unasked(row) else number(row.budget),
            "–" if row.defense == NONE else _number(row.training_relative),
            _UNKNOWN if math.isnan(row.accuracy) else f"{100 * row.accuracy:.1f} %",
            _number(row.message_relative),
        ]
        for who in found.attackers:
            cells += [decibels(row.psnr[who]), decibels(row.worst[who])]
        cells += [
            decibels(row.predicted[who])
            for who in found.attackers
            if _predicts(found, who)
        ]
        cells += [_number(row.lpips[who]) for who in lpips]
        lines.append(cells)
    return head, lines


def text_table(found: TradeOff) -> str:
    """The table and what to know about it, aligned.

    Args:
        found: the trade-off.
    """
    head, lines = columns(found)
    grid = [head, *lines]
    widths = [max(len(row[i]) for row in grid) for i in range(len(head))]
    text = [
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in grid
    ]
    return "\n".join([*text, *(f"  {note}" for note in notes(found))])


def notes(found: TradeOff) -> list[str]:
    """What to know of all rows, and what failed, a sentence for each of them.

    Args:
        found: the trade-off.
    """
    queries = found.settings.get("queries", 1)
    first = []
    if queries != 1:
        first.append(
            f"every message was asked for {queries} times at the same weights, and "
            "attackers take the mean"
        )
    if any(row.coefficient is not None for row in found.summary):
        first.append(
            "α is the share of the sample in a mixture, of which no ‖δ‖ is asked; the "
            "adaptive attacker knows whom it was mixed with, the estimating one takes "
            "the mean image for that"
        )
    return first + [note for row in found.summary for note in _notes(row, found.unit)]


def decibels(value: float) -> str:
    """A PSNR; what is not known is not safe.

    Example:
        >>> decibels(21.26), decibels(float("nan"))
        ('21.3', 'not known')
    """
    return _UNKNOWN if math.isnan(value) else f"{value:.1f}"


def _notes(row: TradeOffRow, unit: Unit) -> list[str]:
    plain = row.coefficient is not None or not row.budget
    name = row.setting.words() if plain else f"{row.defense} at {number(row.budget)}"
    out = []
    consumed = row.training_relative
    if unit == "relative" and abs(consumed - row.budget) > _OFF * row.budget:
        out.append(
            f"{name}: training consumed ‖δ‖/‖g‖ = {number(consumed)}, so that its "
            "accuracy is not that of this budget"
        )
    if row.failed:
        out.append(f"{name}: {row.failed} of {row.cells} runs failed ({row.status})")
    for who, missing in row.inconclusive.items():
        if missing:
            out.append(
                f"{name}: the {who} attack did not match {missing} of {row.messages} "
                "messages, which does not say that they are safe"
            )
    return out


def _unasked(row: TradeOffRow) -> bool:
    """Whether its ‖δ‖ was not asked for."""
    return row.defense == NONE or row.coefficient is not None


def _predicts(found: TradeOff, who: Attacker) -> bool:
    return any(not math.isnan(row.predicted[who]) for row in found.summary)


def _perceives(found: TradeOff, who: Attacker) -> bool:
    return any(not math.isnan(row.lpips[who]) for row in found.summary)


def _number(value: float) -> str:
    return _UNKNOWN if math.isnan(value) else number(value)
