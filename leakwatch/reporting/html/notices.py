"""What a reader must know before the numbers: unknown values, caveats, privacy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from leakwatch.reporting.html.markup import Notice
from leakwatch.reporting.ledger.rows import status_reason, status_word
from leakwatch.reporting.ledger.table import Column, LedgerTable
from leakwatch.reporting.statistics.aggregates import count_excluded, describe_counts
from leakwatch.reporting.words import moment_words

__all__ = ["make_notices", "read_with_care"]

_NOT_COMPUTED: Final = "not computed"
# A quantity of the run may have no value yet, as the share of training before it.
_CALM: Final = ("ok", "estimated", "undefined", _NOT_COMPUTED)
_MOST_LINES: Final = 8
_MOST_REASONS: Final = 4


def read_with_care(texts: Sequence[str]) -> Notice | None:
    """Return what a reader must know beside the headline; None for nothing.

    Args:
        texts: Without capital and full stop.
    """
    words = " ".join(f"{text[0].upper()}{text[1:]}." for text in texts if text)
    return Notice("Read with care.", words) if words else None


def make_notices(
    table: LedgerTable,
    problems: Sequence[str],
    notes: Sequence[str] = (),
    *,
    private: bool,
) -> list[Notice]:
    """Return what the reader must know before the numbers.

    Args:
        table: The run.
        problems: What of the record could not be read.
        notes: Caveats about the model, found while it was measured.
        private: Whether the report holds pictures of training data.
    """
    notices = [*_unknown(table), *_trouble(table)]
    if notes:
        notices.append(Notice("About this model.", lines=tuple(notes)))
    if problems:
        title = "Part of the record could not be read"
        notices.append(_list(title, "and is missing here.", problems))
    if private:
        notices.append(
            Notice(
                "This file holds pictures of training data.",
                "Treat it as you treat the data; nothing in it was sent anywhere.",
            )
        )
    return [*notices, *_not_computed(table)]


def _list(title: str, text: str, lines: Sequence[str]) -> Notice:
    more = max(len(lines) - _MOST_LINES, 0)
    return Notice(title, text, tuple(lines[:_MOST_LINES]), more)


def _unknown(table: LedgerTable) -> Iterator[Notice]:
    counts: Counter[str] = Counter()
    total = 0
    for column in _last(table).values():
        counts.update(count_excluded(column))
        total += len(column.samples)
    counts.pop(_NOT_COMPUTED, None)
    if counts:
        yield Notice(
            f"{counts.total()} of {total} values at the last probe are not known",
            f"({describe_counts(counts)}). They are left out of every summary and are "
            "marked in the table of samples; a value that is not known is not a safe "
            "value.",
        )


def _last(table: LedgerTable) -> dict[str, Column]:
    return table.at(table.moments[-1]) if table.moments else {}


def _trouble(table: LedgerTable) -> Iterator[Notice]:
    broken = [
        f"{name}, {moment_words(moment)}: {status_word(row.status)}"
        + (f" ({status_reason(row.status)})" if status_reason(row.status) else "")
        for (moment, name), row in sorted(table.run_level.items())
        if status_word(row.status) not in _CALM
    ]
    if broken:
        yield _list("Some probes report trouble.", "", broken)


def _not_computed(table: LedgerTable) -> Iterator[Notice]:
    groups: dict[str, list[str]] = {}
    for name, status in _left_out(table):
        names = groups.setdefault(status_reason(status) or "no reason recorded", [])
        if name not in names:
            names.append(name)
    parts = [f"{', '.join(names)} ({why})" for why, names in groups.items()]
    more = len(parts) - _MOST_REASONS
    if more > 0:
        parts[_MOST_REASONS:] = [f"and more, for {more} other reasons"]
    if parts:
        words = f"{'; '.join(parts)}. This says nothing about exposure."
        yield Notice("Not computed:", words, calm=True)


def _left_out(table: LedgerTable) -> Iterator[tuple[str, str]]:
    """Yield names and statuses of what the last probe did not compute."""
    for name, column in _last(table).items():
        everyone = len(column.samples)
        for status, number in Counter(column.statuses).items():
            if status_word(status) == _NOT_COMPUTED:
                some = f" for {number} of {everyone} samples"
                yield name + (some if number < everyone else ""), status
    for (_, name), row in sorted(table.run_level.items()):
        if status_word(row.status) == _NOT_COMPUTED:
            yield name, row.status
