"""The table of samples, in which an unknown value looks like one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from leakwatch.reporting.figures.style import ordered
from leakwatch.reporting.html.markup import esc, table
from leakwatch.reporting.ledger.rows import is_usable, status_reason, status_word
from leakwatch.reporting.ledger.table import LedgerTable
from leakwatch.reporting.quantities import HEADLINES, Quantity, class_label, describe
from leakwatch.reporting.statistics.aggregates import describe_counts
from leakwatch.reporting.words import count, moment_words, number, psnr_level


def sample_table(
    ledger: LedgerTable,
    quantities: Mapping[str, Quantity],
    class_names: Sequence[str] | None,
    pictures: Mapping[int, str],
) -> str:
    """Return the samples of the last probe, most exposed first, unknown on top."""
    if not ledger.moments:
        return ""
    moment = max((when for when, _ in ledger.columns), default=None)
    if moment is None:
        return ""
    names = [
        name for name in ordered(ledger.quantities) if (moment, name) in ledger.columns
    ]
    columns = [ledger.columns[moment, name] for name in names]
    labels: dict[int, int | None] = {}
    for column in columns:
        labels.update(zip(column.samples, column.labels, strict=True))
    cells = {sample: [column.at(sample) for column in columns] for sample in labels}
    sign = describe(names[0], quantities).sign or 1

    def rank(sample: int) -> float:
        value, status = cells[sample][0]
        return -sign * value if is_usable(value, status) else -math.inf

    head = [_sort_head("sample"), _sort_head("class", kind="text")]
    head += [_score_head(describe(name, quantities)) for name in names]
    head.append(_sort_head("status", kind="text"))
    if sign == 1 or names[0] in HEADLINES:
        head[2] = head[2].replace("<th ", '<th aria-sort="descending" ', 1)
    rows = [
        _row(
            sample,
            class_label(labels[sample], class_names),
            list(zip(names, cells[sample], strict=True)),
            pictures,
        )
        for sample in sorted(cells, key=rank)
    ]
    unknown = sum(not is_usable(*cell) for sample in cells for cell in cells[sample])
    words = (
        f"{count(len(rows), 'sample')}, {moment_words(moment)}. Click a header to sort"
        + ("; values that are not known stay on top." if unknown else ".")
    )
    return f'<p class="soft">{esc(words)}</p>' + table(
        head, rows, "Samples and their scores", sortable=True
    )


def _row(
    sample: int,
    name: str,
    cells: list[tuple[str, tuple[float, str]]],
    pictures: Mapping[int, str],
) -> str:
    address = pictures.get(sample)
    image = (
        f'<img src="{esc(address)}" alt="sample {sample}, {esc(name)}">'
        if address
        else ""
    )
    found = [f'<td class="who" data-sort="{sample}"><div>{image}#{sample}</div></td>']
    found.append(
        f'<td class="name" data-sort="{esc(name)}">{esc(name)}{_badge(cells)}</td>'
    )
    found += [_value(quantity, value, status) for quantity, (value, status) in cells]
    found.append(_status(cells))
    return f"<tr>{''.join(found)}</tr>"


def _value(quantity: str, value: float, status: str) -> str:
    if not is_usable(value, status):
        word = _word(status)
        return (
            f'<td class="num" data-sort=""><span class="{_kind(word)}" '
            f'title="{esc(status)}">'
            f"{esc(word)}</span></td>"
        )
    text = f"{value:.1f}".replace("-", "−") if quantity in HEADLINES else number(value)
    if math.isinf(value):
        text = number(value)
    level = psnr_level(value) if quantity in HEADLINES else ""
    if status_word(status) == "estimated":
        text = f"≈ {text}"
    sort = repr(value).replace("inf", "Infinity")
    return (
        f'<td class="num {level}" data-sort="{sort}" title="{esc(repr(value))}, '
        f'{esc(status)}">{esc(text)}</td>'
    )


def _badge(cells: list[tuple[str, tuple[float, str]]]) -> str:
    """Say next to the class what a narrow screen would show far to the right."""
    words = Counter(
        _word(status) for _, (value, status) in cells if not is_usable(value, status)
    )
    if not words:
        return ""
    word = next(iter(words)) if len(words) == 1 else "not known"
    return (
        f'<div><span class="{_kind(word)}" title="{esc(describe_counts(words))}">'
        f"{sum(words.values())} {esc(word)}</span></div>"
    )


def _status(cells: list[tuple[str, tuple[float, str]]]) -> str:
    """Group the scores that share a status, so that the reason is read once."""
    groups: dict[str, list[str]] = {}
    for quantity, (value, status) in cells:
        if not is_usable(value, status) or status_word(status) == "estimated":
            word = status_word(status)
            if word == "ok":
                status = "not a number: recorded as NaN with status ok"
            groups.setdefault(status, []).append(quantity)
    if not groups:
        return '<td class="why" data-sort="ok"><span class="fine">ok</span></td>'
    lines = []
    for status, names in groups.items():
        word, reason = status_word(status) or "no status", status_reason(status)
        lines.append(
            f'<div><span class="{_kind(word)}">{esc(word)}</span> '
            f"{esc(', '.join(names))}{': ' + esc(reason) if reason else ''}</div>"
        )
    return (
        f'<td class="why" data-sort="{esc(next(iter(groups)))}">{"".join(lines)}</td>'
    )


def _kind(word: str) -> str:
    """Return the style of a status: an estimate or a gap by choice is no alarm."""
    return "about" if word in ("estimated", "not computed") else "bad"


def _word(status: str) -> str:
    word = status_word(status)
    return "not a number" if word in ("ok", "estimated") else word or "no status"


def _sort_head(name: str, kind: str = "number") -> str:
    return (
        f'<th scope="col" data-kind="{kind}">'
        f'<button type="button">{esc(name)}</button></th>'
    )


def _score_head(quantity: Quantity) -> str:
    end = {1: "high = exposed", -1: "low = exposed"}.get(quantity.sign, "")
    below = ", ".join(part for part in (quantity.unit, end) if part) or "no direction"
    return (
        f'<th scope="col" class="num" data-kind="number" '
        f'title="{esc(quantity.meaning)}">'
        f'<button type="button">{esc(quantity.name)}</button>'
        f"<small>{esc(below)}</small></th>"
    )
