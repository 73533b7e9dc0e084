"""The table of samples, in which an unknown value looks like one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

from leakwatch.reporting.html.markup import Badge, NumberCell, sort_key
from leakwatch.reporting.ledger.rows import status_reason, status_word
from leakwatch.reporting.ledger.table import LedgerTable, LedgerValue
from leakwatch.reporting.quantities import (
    HEADLINES,
    Quantity,
    describe,
    ordered,
)
from leakwatch.reporting.run_facts import RunFacts
from leakwatch.reporting.statistics.aggregates import describe_counts
from leakwatch.reporting.words import (
    count,
    moment_words,
    number,
    psnr_level,
    sign_of_bound,
)

__all__ = ["SampleTable", "make_sample_table"]


class ScoreHead(NamedTuple):
    """The header of a score; ``descending`` if the table starts sorted by it."""

    name: str
    note: str
    meaning: str
    descending: bool


class StatusNote(NamedTuple):
    """A status with the scores that share it, so that the reason is read once."""

    status: str
    badge: Badge
    text: str


@final
@dataclass(frozen=True)
class SampleRow:
    """One sample.

    Attributes:
        sample: Data-set index.
        name: Of its class.
        picture: Its address; empty without one.
        trouble: How many values are unknown, next to the class: a narrow screen
            shows the values themselves far to the right.
        cells: One for each score.
        reasons: Why values are unknown or estimated.
    """

    sample: int
    name: str
    picture: str
    trouble: Badge | None
    cells: tuple[NumberCell, ...]
    reasons: tuple[StatusNote, ...]


@final
@dataclass(frozen=True)
class SampleTable:
    """The samples of the last probe, most exposed first, unknown on top."""

    words: str
    scores: tuple[ScoreHead, ...]
    rows: tuple[SampleRow, ...]


def make_sample_table(
    ledger: LedgerTable, facts: RunFacts, pictures: Mapping[int, str], lead: str = ""
) -> SampleTable | None:
    """Return the samples of the last probe; None without any.

    Args:
        ledger: The run.
        facts: Of the run.
        pictures: Sample to the address of its picture.
        lead: The quantity on top of the page, by which the table starts sorted.
    """
    moment = max((when for when, _ in ledger.columns), default=None)
    if moment is None:
        return None
    columns = ledger.at(moment)
    names = ordered((n for n in ledger.quantities if n in columns), lead)
    labels: dict[int, int | None] = {}
    for name in names:
        labels.update(zip(columns[name].samples, columns[name].labels, strict=True))
    values = {s: [columns[name].at(s) for name in names] for s in labels}
    sign = describe(names[0], facts.quantities).sign or 1

    def rank(sample: int) -> float:
        first = values[sample][0]
        return -sign * first.value if first.usable else -math.inf

    some = any(not value.usable for row in values.values() for value in row)
    return SampleTable(
        words=f"{count(len(values), 'sample')}, {moment_words(moment)}. Click a header "
        "to sort" + ("; values that are not known stay on top." if some else "."),
        scores=tuple(
            _head(
                describe(name, facts.quantities),
                name == names[0] and (sign == 1 or name in HEADLINES),
            )
            for name in names
        ),
        rows=tuple(
            SampleRow(
                sample=sample,
                name=facts.class_label(labels[sample]),
                picture=pictures.get(sample, ""),
                trouble=_trouble(values[sample]),
                cells=tuple(
                    _cell(describe(name, facts.quantities), value)
                    for name, value in zip(names, values[sample], strict=True)
                ),
                reasons=_reasons(names, values[sample]),
            )
            for sample in sorted(values, key=rank)
        ),
    )


def _head(quantity: Quantity, descending: bool) -> ScoreHead:
    end = {1: "high = exposed", -1: "low = exposed"}.get(quantity.sign, "")
    note = ", ".join(filter(None, (quantity.unit, end))) or "no direction"
    return ScoreHead(quantity.name, note, quantity.meaning, descending)


def _cell(quantity: Quantity, recorded: LedgerValue) -> NumberCell:
    value, status = recorded
    if not recorded.usable:
        return NumberCell(badge=_badge(recorded.trouble, status), sort="")
    headline = quantity.name in HEADLINES
    text = number(value)
    if headline and math.isfinite(value):
        text = f"{value:.1f}".replace("-", "−")
    return NumberCell(
        text=sign_of_bound(
            text, recorded.bound, quantity.sign, estimated=recorded.estimated
        ),
        sort=sort_key(value),
        about=f"{value!r}, {status}",
        level=psnr_level(value) if headline else "",
    )


def _trouble(values: Sequence[LedgerValue]) -> Badge | None:
    words = Counter(value.trouble for value in values if not value.usable)
    if not words:
        return None
    word = next(iter(words)) if len(words) == 1 else "not known"
    badge = _badge(word, describe_counts(words))
    return Badge(f"{words.total()} {word}", badge.style, badge.about)


def _reasons(
    names: Sequence[str], values: Sequence[LedgerValue]
) -> tuple[StatusNote, ...]:
    groups: dict[str, list[str]] = {}
    for name, value in zip(names, values, strict=True):
        word, status = status_word(value.status), value.status
        if not value.usable or word == "estimated":
            if word == "ok":
                status = "not a number: recorded as NaN with status ok"
            groups.setdefault(status, []).append(name)
    return tuple(
        StatusNote(
            status,
            _badge(status_word(status) or "no status"),
            ", ".join(scores)
            + (f": {status_reason(status)}" if status_reason(status) else ""),
        )
        for status, scores in groups.items()
    )


def _badge(word: str, about: str = "") -> Badge:
    """Return the word of a status: an estimate or a gap by choice is no alarm."""
    calm = word in ("estimated", "not computed")
    return Badge(word, "about" if calm else "bad", about)
