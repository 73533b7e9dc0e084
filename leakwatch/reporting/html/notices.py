"""What a reader must know before the numbers: unknown values, caveats, privacy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, final

from leakwatch.reporting.ledger.rows import status_reason, status_word
from leakwatch.reporting.ledger.table import Column, LedgerTable
from leakwatch.reporting.statistics.aggregates import count_excluded, describe_counts
from leakwatch.reporting.words import moment_words

__all__ = ["Lines", "Notices", "make_notices"]

_NOT_COMPUTED: Final = "not computed"
# A quantity of the run may have no value yet, as the share of training before it.
_CALM: Final = ("ok", "estimated", "undefined", _NOT_COMPUTED)
_MOST_LINES: Final = 8
_MOST_REASONS: Final = 4
_MOST_NAMES: Final = 5


class Lines(NamedTuple):
    """The first sentences of a list, and how many more there are."""

    shown: tuple[str, ...]
    more: int = 0


@final
@dataclass(frozen=True)
class Notices:
    """Empty where there is nothing to say.

    Attributes:
        unknown: Why values of the last probe are not known, in words.
        unknown_count: How many of them.
        unknown_names: Of which scores, most of them first.
        values: How many there are in all.
        trouble: What of the run itself could not be measured.
        notes: Caveats about the model, found while it was measured.
        problems: What of the record could not be read.
        private: Whether the report holds pictures of training data.
        not_computed: What nobody asked for, by reason.
    """

    unknown: str
    unknown_count: int
    unknown_names: str
    values: int
    trouble: Lines
    notes: Lines
    problems: Lines
    private: bool
    not_computed: str


def make_notices(
    table: LedgerTable,
    problems: Sequence[str],
    notes: Sequence[str] = (),
    *,
    private: bool,
) -> Notices:
    """Return what the reader must know before the numbers.

    Args:
        table: The run.
        problems: What of the record could not be read.
        notes: Caveats about the model, found while it was measured.
        private: Whether the report holds pictures of training data.
    """
    columns = table.at(table.moments[-1]) if table.moments else {}
    counts: Counter[str] = Counter()
    names: Counter[str] = Counter()
    for name, column in columns.items():
        excluded = Counter(count_excluded(column))
        excluded.pop(_NOT_COMPUTED, None)
        counts.update(excluded)
        names[name] = excluded.total()
    return Notices(
        unknown=describe_counts(counts),
        unknown_count=counts.total(),
        unknown_names=_listed([name for name, n in names.most_common() if n]),
        values=sum(len(column.samples) for column in columns.values()),
        trouble=_first(list(_trouble(table))),
        notes=Lines(tuple(notes)),
        problems=_first(problems),
        private=private,
        not_computed=_not_computed(table, columns),
    )


def _first(sentences: Sequence[str]) -> Lines:
    more = max(len(sentences) - _MOST_LINES, 0)
    return Lines(tuple(sentences[:_MOST_LINES]), more)


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    rest = [f"and {more} more"] if more > 0 else []
    return ", ".join([*names[:_MOST_NAMES], *rest])


def _trouble(table: LedgerTable) -> Iterator[str]:
    for (moment, name), row in sorted(table.run_level.items()):
        word, reason = status_word(row.status), status_reason(row.status)
        if word not in _CALM:
            why = f" ({reason})" if reason else ""
            yield f"{name}, {moment_words(moment)}: {word}{why}"


def _not_computed(table: LedgerTable, columns: Mapping[str, Column]) -> str:
    groups: dict[str, list[str]] = {}
    for name, status in _left_out(table, columns):
        names = groups.setdefault(status_reason(status) or "no reason recorded", [])
        if name not in names:
            names.append(name)
    parts = [f"{', '.join(names)} ({why})" for why, names in groups.items()]
    more = len(parts) - _MOST_REASONS
    if more > 0:
        parts[_MOST_REASONS:] = [f"and more, for {more} other reasons"]
    return "; ".join(parts)


def _left_out(
    table: LedgerTable, columns: Mapping[str, Column]
) -> Iterator[tuple[str, str]]:
    """Yield names and statuses of what the last probe did not compute."""
    for name, column in columns.items():
        everyone = len(column.samples)
        for status, number in Counter(column.statuses).items():
            if status_word(status) == _NOT_COMPUTED:
                some = f" for {number} of {everyone} samples"
                yield name + (some if number < everyone else ""), status
    for (_, name), row in sorted(table.run_level.items()):
        if status_word(row.status) == _NOT_COMPUTED:
            yield name, row.status
