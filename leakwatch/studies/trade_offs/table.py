"""A trade-off as lines of text."""

from __future__ import annotations

import math
import re
from typing import Final

from leakwatch.defenses.budget import Unit
from leakwatch.reporting.words import aligned, number, sign_of_bound
from leakwatch.studies.trade_offs.grid import NONE
from leakwatch.studies.trade_offs.outcomes import EXACT, Attacker
from leakwatch.studies.trade_offs.rows import Overview, TradeOffRow

__all__ = ["columns", "decibels", "headings", "notes", "text_table"]

_UNKNOWN: Final = "not known"

#: What attackers know of mixtures.
_OF_MIXTURES: Final[dict[Attacker, str]] = {
    "naive": "the naive attacker takes a mixture for one image",
    "estimating": "the estimating one knows what images are like: their mean, and that "
    "samples and partners differ alike",
    "adaptive": "the adaptive attacker knows whom it was mixed with",
}

# How far what training consumed may be from the budget; few draws scatter.
_OFF: Final = 0.2

_OF: Final = re.compile(r"\(\d+ of \d+\)$|^≥ ")


def columns(overview: Overview) -> tuple[list[str], list[list[str]]]:
    """Header and cells, in words: a row for each defense and budget.

    Args:
        overview: of the trade-off.
    """
    lpips = [who for who in overview.attackers if _perceives(overview, who)]
    lines = []
    for row in overview.rows:
        cells = [
            row.defense if row.coefficient is None else row.setting.words(),
            "–" if _unasked(row) else number(row.budget),
            "–" if row.defense == NONE else _number(row.training_relative),
            _UNKNOWN if math.isnan(row.accuracy) else f"{100 * row.accuracy:.1f} %",
            _number(row.message_relative),
        ]
        if not math.isnan(overview.delta):
            cells.append("∞" if math.isinf(row.epsilon) else _number(row.epsilon))
        for who in overview.attackers:
            cells += [_achieved(row, who), _worst(row, who)]
        cells += [
            _predicted(row, who)
            for who in overview.attackers
            if _predicts(overview, who)
        ]
        cells += [_number(row.lpips[who]) for who in lpips]
        lines.append(cells)
    return [" ".join(filter(None, pair)) for pair in headings(overview)], lines


def headings(overview: Overview) -> list[tuple[str, str]]:
    """Of each column what it shows and, in smaller type, which of it; all different.

    Args:
        overview: of the trade-off.
    """
    head = [
        ("defense", ""),
        ("budget", ""),
        ("trained", "‖δ‖/‖g‖"),
        ("accuracy", ""),
        ("attacked", "‖δ‖/‖g‖"),
    ]
    if not math.isnan(overview.delta):
        head.append(("ε", f"at δ = {overview.delta:g}"))
    for who in overview.attackers:
        head += [(who, "median, dB"), (who, "worst, dB")]
    head += [
        (who, "predicted, dB") for who in overview.attackers if _predicts(overview, who)
    ]
    head += [(who, "LPIPS") for who in overview.attackers if _perceives(overview, who)]
    return head


def text_table(overview: Overview) -> str:
    """The table and what to know about it, aligned.

    Args:
        overview: of the trade-off.
    """
    head, lines = columns(overview)
    remarks = (f"  {note}" for note in notes(overview))
    return "\n".join([aligned([head, *lines]), *remarks])


def notes(overview: Overview) -> list[str]:
    """What to know of all rows, and what failed, a sentence for each of them.

    Args:
        overview: of the trade-off.
    """
    first = []
    if overview.queries != 1:
        first.append(
            f"every message was asked for {overview.queries} times at the same "
            "weights, and attackers take the mean"
        )
    if overview.mixes:
        by_whom = [_OF_MIXTURES[w] for w in overview.attackers if w in _OF_MIXTURES]
        first.append(
            "; ".join(
                [
                    "α is the share of the sample in a mixture, of which no ‖δ‖ is "
                    "asked",
                    *by_whom,
                ]
            )
        )
    if not math.isnan(overview.delta):
        first.append(
            "ε is that of all of training; attacks are on single messages, as of a "
            "client with one sample, whose others the attacker knows"
        )
    first += _legend(overview)
    return first + [
        note for row in overview.rows for note in _notes(row, overview.unit)
    ]


def _legend(overview: Overview) -> list[str]:
    """What marks in the table mean, where they are."""
    marks = []
    cells = [cell for line in columns(overview)[1] for cell in line]
    if "exact" in cells:
        marks.append(
            "exact: by linearisation this attacker misses less than 1/100,000 of the "
            f"pixel range ({EXACT:g} dB)"
        )
    if any(_OF.search(cell) for cell in cells):
        marks.append(
            "(1 of 2) and ≥: of that many messages, and at least that; of the others "
            "nothing is known, which does not say that they are safe"
        )
    if any(sum(row.predicted_bounds.values()) for row in overview.rows):
        marks.append(
            "≥ of a prediction: rounding hides what is left; exposure is at least that"
        )
    return marks


def decibels(value: float) -> str:
    """A PSNR; what is not known is not safe.

    Example:
        >>> decibels(21.26), decibels(float("nan"))
        ('21.3', 'not known')
    """
    return _UNKNOWN if math.isnan(value) else f"{value:.1f}"


def _achieved(row: TradeOffRow, who: Attacker) -> str:
    """The median, and of how many messages where not of all."""
    text = decibels(row.psnr[who])
    missing = row.inconclusive[who]
    if not missing or math.isnan(row.psnr[who]):
        return text
    return f"{text} ({row.messages - missing} of {row.messages})"


def _worst(row: TradeOffRow, who: Attacker) -> str:
    """The largest, no less than which it is where some messages were not matched."""
    text = decibels(row.worst[who])
    return f"≥ {text}" if row.inconclusive[who] and text != _UNKNOWN else text


def _predicted(row: TradeOffRow, who: Attacker) -> str:
    """The median, and of how many messages where not of all."""
    value, missing = row.predicted[who], row.unpredicted[who]
    bound = row.predicted_bounds[who] > 0 and not math.isnan(value)
    text = "exact" if value >= EXACT else sign_of_bound(decibels(value), bound)
    if not missing or math.isnan(value):
        return text
    return f"{text} ({row.messages - missing} of {row.messages})"


def _notes(row: TradeOffRow, unit: Unit) -> list[str]:
    plain = row.coefficient is not None or not row.budget
    name = row.setting.words() if plain else f"{row.defense} at {number(row.budget)}"
    remarks = []
    consumed = row.training_relative
    if unit == "relative" and abs(consumed - row.budget) > _OFF * row.budget:
        remarks.append(
            f"{name}: training consumed ‖δ‖/‖g‖ = {number(consumed)}, so that its "
            "accuracy is not that of this budget"
        )
    if row.failed:
        remarks.append(
            f"{name}: {row.failed} of {row.cells} runs failed ({row.status})"
        )
    for who, missing in row.inconclusive.items():
        if missing and math.isnan(row.psnr[who]):
            remarks.append(
                f"{name}: the {who} attack did not match {missing} of {row.messages} "
                "messages, which does not say that they are safe"
            )
    return remarks


def _unasked(row: TradeOffRow) -> bool:
    """Whether its ‖δ‖ was not asked for."""
    return row.defense == NONE or row.coefficient is not None


def _predicts(overview: Overview, who: Attacker) -> bool:
    return any(not math.isnan(row.predicted[who]) for row in overview.rows)


def _perceives(overview: Overview, who: Attacker) -> bool:
    return any(not math.isnan(row.lpips[who]) for row in overview.rows)


def _number(value: float) -> str:
    return _UNKNOWN if math.isnan(value) else number(value)
