"""The table of correlations: which scores foresaw what attacks achieved."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, final

from leakwatch.reporting.html.markup import Badge, NumberCell
from leakwatch.reporting.ledger.rows import Row, status_reason, status_word
from leakwatch.reporting.ledger.table import LedgerTable, Moment
from leakwatch.reporting.quantities import SPEARMAN, Quantity, describe
from leakwatch.reporting.statistics.achieved import FEWEST_ATTACKS, KINDS, Achieved
from leakwatch.reporting.words import count

__all__ = ["Correlations", "make_correlations"]

_INTERVAL: Final = re.compile(r"\[[^\]]*\]")
_PAIRS: Final = re.compile(r"n = (\d+)")
_MANY: Final = 20


class MetricHead(NamedTuple):
    """A metric of one kind of attack, and how many of these count."""

    metric: str
    attacks: str


class ScoreRow(NamedTuple):
    """A score with its direction and its correlation in each column."""

    score: str
    direction: str
    cells: tuple[NumberCell, ...]


@final
@dataclass(frozen=True)
class Correlations:
    """The correlations of one audit.

    Attributes:
        columns: Metrics of those kinds of attack that have any correlation.
        rows: One for each score.
        silent: A sentence for each kind of attack without any.
        intervals: How many correlations are shown.
        by_chance: How many of them would exclude zero if nothing were related; 0
            where they are few.
    """

    columns: tuple[MetricHead, ...]
    rows: tuple[ScoreRow, ...]
    silent: tuple[str, ...]
    intervals: int
    by_chance: int


def make_correlations(
    ledger: LedgerTable,
    moment: Moment,
    kinds: Mapping[str, Achieved],
    quantities: Mapping[str, Quantity],
) -> Correlations | None:
    """Return the correlations of one audit; None where none was recorded.

    Starts without a defined correlation have no column, but a sentence.

    Args:
        ledger: The run.
        moment: Of the audit.
        kinds: What each kind of attack achieved.
        quantities: Descriptions, which give the direction of scores.
    """
    by_score: dict[str, dict[tuple[str, str], Row]] = {}
    for (when, name), row in ledger.run_level.items():
        if when == moment and name.startswith(SPEARMAN):
            score, _, column = name.removeprefix(SPEARMAN).partition("/")
            kind, _, metric = column.partition("/")
            by_score.setdefault(score, {})[kind, metric] = row
    if not by_score:
        return None
    enough = {k for k, result in kinds.items() if result.conclusive >= FEWEST_ATTACKS}
    usable = [
        key
        for line in by_score.values()
        for key in line
        if key[0] in enough and line[key].usable
    ]
    shown = {kind for kind, _ in usable} & kinds.keys()
    columns = [
        (kind, metric)
        for kind, metric in dict.fromkeys(k for line in by_score.values() for k in line)
        if kind in shown
    ]
    intervals = sum(key in columns for key in usable)
    return Correlations(
        columns=tuple(
            MetricHead(
                metric, f"{KINDS[kind].partition(' (')[0]}, {_used(kinds[kind])}"
            )
            for kind, metric in columns
        ),
        rows=tuple(
            ScoreRow(
                score,
                describe(score, quantities).direction or "no direction of its own",
                tuple(_cell(line.get(column)) for column in columns),
            )
            for score, line in by_score.items()
        ),
        silent=tuple(
            f"{KINDS[kind]}: no correlation, {_why(result)}."
            for kind, result in kinds.items()
            if kind not in shown
        ),
        intervals=intervals,
        by_chance=max(round(intervals / 20), 1) if intervals >= _MANY else 0,
    )


def _used(result: Achieved) -> str:
    return f"{result.conclusive} of {result.attacked} conclusive"


def _why(result: Achieved) -> str:
    if not result.conclusive:
        return f"no attack on {count(result.attacked, 'sample')} was conclusive"
    if result.conclusive < FEWEST_ATTACKS:
        return f"{_used(result)}, and it takes {FEWEST_ATTACKS}"
    return f"{_used(result)}, all alike"


def _cell(row: Row | None) -> NumberCell:
    if row is None:
        return NumberCell(badge=Badge("not computed", "about"))
    reason = status_reason(row.status)
    if not row.usable:
        word = status_word(row.status) or "not known"
        return NumberCell(badge=Badge(word, "about", reason))
    interval, pairs = _INTERVAL.search(reason), _PAIRS.search(reason)
    notes = [interval[0].replace("-", "−")] if interval else []
    notes += [f"n = {pairs[1]}"] if pairs else []
    text = f"{row.value:+.2f}".replace("-", "−")
    return NumberCell(text, about=reason, note=", ".join(notes))
