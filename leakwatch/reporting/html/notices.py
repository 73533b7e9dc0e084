"""What a reader must know before the numbers: unknown values, caveats, privacy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from leakwatch.reporting.html.markup import esc
from leakwatch.reporting.ledger.rows import status_reason, status_word
from leakwatch.reporting.ledger.table import LedgerTable
from leakwatch.reporting.statistics.aggregates import count_excluded, describe_counts
from leakwatch.reporting.words import moment_words

_NOT_COMPUTED: Final = "not computed"
# A quantity of the run may have no value yet, as the share of training before it.
_CALM: Final = ("ok", "estimated", "undefined", _NOT_COMPUTED)


def notices(
    table: LedgerTable,
    problems: Iterable[str],
    notes: Sequence[str] = (),
    *,
    private: bool,
) -> str:
    """Return what the reader must know before the numbers.

    Args:
        table: The run.
        problems: What of the record could not be read.
        notes: Caveats about the model, found while it was measured.
        private: Whether the report holds pictures of training data.
    """
    found = [_unknown(table), _trouble(table)]
    if notes:
        found.append(f"<strong>About this model.</strong>{_list(notes, len(notes))}")
    sentences = list(problems)
    if sentences:
        found.append(
            "<strong>Part of the record could not be read</strong> and is missing here."
            + _list(sentences)
        )
    if private:
        found.append(
            "<strong>This file holds pictures of training data.</strong> Treat it as "
            "you treat the data; nothing in it was sent anywhere."
        )
    calm = _not_computed(table)
    return "".join(
        f'<div class="{kind}">{content}</div>'
        for kind, content in (
            *(("notice", content) for content in found),
            ("notice calm", calm),
        )
        if content
    )


def _unknown(table: LedgerTable) -> str:
    counts: Counter[str] = Counter()
    total = 0
    last = table.moments[-1] if table.moments else None
    for (moment, _), column in table.columns.items():
        if moment == last:
            counts.update(count_excluded(column))
            total += len(column.samples)
    counts.pop(_NOT_COMPUTED, None)
    if not counts:
        return ""
    return (
        f"<strong>{sum(counts.values())} of {total} values at the last probe are "
        f"not known</strong> ({esc(describe_counts(counts))}). They are left out "
        "of every summary and are marked in the table of samples; a value that is "
        "not known is not a safe value."
    )


def _trouble(table: LedgerTable) -> str:
    broken = [
        f"{name}, {moment_words(moment)}: {status_word(row.status)}"
        + (f" ({status_reason(row.status)})" if status_reason(row.status) else "")
        for (moment, name), row in sorted(table.run_level.items())
        if status_word(row.status) not in _CALM
    ]
    if not broken:
        return ""
    return f"<strong>Some probes report trouble.</strong>{_list(broken)}"


def _not_computed(table: LedgerTable, most: int = 4) -> str:
    groups: dict[str, list[str]] = {}
    for name, status, scope in _left_out(table):
        names = groups.setdefault(status_reason(status) or "no reason recorded", [])
        if name + scope not in names:
            names.append(name + scope)
    if not groups:
        return ""
    parts = [f"{', '.join(names)} ({why})" for why, names in groups.items()]
    more = len(parts) - most
    parts[most:] = [f"and more, for {more} other reasons"] if more > 0 else []
    return (
        f"<strong>Not computed:</strong> {esc('; '.join(parts))}. "
        "This says nothing about exposure."
    )


def _left_out(table: LedgerTable) -> Iterator[tuple[str, str, str]]:
    """Yield quantity, status and scope of what the last probe did not compute."""
    last = table.moments[-1] if table.moments else None
    for (moment, name), column in table.columns.items():
        if moment == last:
            statuses = Counter(
                status
                for status in column.statuses
                if status_word(status) == _NOT_COMPUTED
            )
            everyone = len(column.samples)
            for status, number in statuses.items():
                some = f" for {number} of {everyone} samples"
                yield name, status, "" if number == everyone else some
    for (_, name), row in sorted(table.run_level.items()):
        if status_word(row.status) == _NOT_COMPUTED:
            yield name, row.status, ""


def _list(sentences: Sequence[str], most: int = 8) -> str:
    items = "".join(f"<li>{esc(sentence)}</li>" for sentence in sentences[:most])
    more = len(sentences) - most
    return f"<ul>{items}{f'<li>and {more} more</li>' if more > 0 else ''}</ul>"
