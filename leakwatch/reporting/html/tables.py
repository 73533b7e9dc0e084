"""Tables of classes and quantities, the limits of the scores, and the run itself."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from leakwatch.reporting.figures.style import ordered
from leakwatch.reporting.html.markup import esc, table
from leakwatch.reporting.ledger.table import LedgerTable
from leakwatch.reporting.message import Message
from leakwatch.reporting.quantities import BACKGROUND, Quantity, class_label, describe
from leakwatch.reporting.statistics.aggregates import (
    Spread,
    spread_of_classes,
    summarize_classes,
)
from leakwatch.reporting.words import moment_words, number

_OF_PREDICTIONS: Final = (
    (
        "Predictions, not attacks.",
        "The scores replace the network by its linearisation at each sample and speak "
        "of a worst-case attacker who is already close to the answer. An attack from a "
        "random start often does far worse; far from the sample the linearisation "
        "itself can be wrong. Only running the attack tells them apart.",
    ),
    (
        "The prior is Gaussian.",
        "i2f_bayes is the best error for a Gaussian prior with the mean and variance "
        "of the data. An attacker with a sharper prior, such as a good generator of "
        "such pictures, can do better than predicted.",
    ),
)

_OF_ALL: Final = (
    (
        "LAVP's direction is a hypothesis.",
        "That a larger LAVP value means less exposure is its paper's claim about "
        "attacks; it depends on network and attack, and only an attack tests it.",
    ),
    (
        "The watched samples only.",
        "Samples that are not watched can be more exposed than the most exposed one "
        "here.",
    ),
    (
        "PSNR is not recognition.",
        "It compares pixels. The lines at 15 and 25 dB are rules of thumb: a face can "
        "be recognised below them and a texture not above.",
    ),
    (
        "Unknown is not safe.",
        "A value marked unresolved, not converged, not computed, undefined or failed "
        "says nothing about the exposure of its sample.",
    ),
)


def limits(message: Message) -> str:
    """Return what the numbers do not say, of all runs and of this kind of message."""
    items = "".join(
        f"<li><strong>{esc(title)}</strong> {esc(text)}</li>"
        for title, text in (*_OF_PREDICTIONS, *message.limits, *_OF_ALL)
    )
    return f'<ul class="limits">{items}</ul>'


def fairness_table(
    ledger: LedgerTable,
    quantities: Mapping[str, Quantity],
    class_names: Sequence[str] | None,
) -> str:
    """Return how unequally classes are exposed, one row per quantity."""
    rows: list[str] = []
    for name in ordered(ledger.quantities):
        found = ledger.last(name)
        quantity = describe(name, quantities)
        said = quantity.meaning and not quantity.sign
        if said or name.startswith(BACKGROUND):
            continue  # shows nothing about exposure by itself
        classes = summarize_classes(found[1]) if found else []
        if found and len(classes) > 1:
            spread = spread_of_classes(classes, quantity)
            rows.append(_fairness_row(quantity, spread, class_names))
    if not rows:
        return ""
    head = ['<th scope="col">quantity</th>']
    head += [
        f'<th scope="col"{kind}>{title}<small>{note}</small></th>'
        for title, note, kind in (
            ("most exposed", "class", ""),
            ("least exposed", "class", ""),
            ("difference", "highest − lowest mean", ' class="num"'),
            ("ratio", "highest : lowest mean", ' class="num"'),
            ("Gini", "0 = all equal", ' class="num"'),
            ("remark", "", ""),
        )
    ]
    intro = (
        '<p class="soft">Are some classes more exposed than others? Compared are the '
        "class means at the latest probe; classes without a usable value are left "
        "out.</p>"
    )
    return intro + table(head, rows, "Differences between classes")


def class_table(
    ledger: LedgerTable,
    quantities: Mapping[str, Quantity],
    class_names: Sequence[str] | None,
) -> str:
    """Return mean and median per class for the first quantity, folded away."""
    name = next(iter(ordered(ledger.quantities)), None)
    found = ledger.last(name) if name else None
    classes = summarize_classes(found[1]) if found else []
    if name is None or found is None or not classes:
        return ""
    quantity = describe(name, quantities)
    rows = [
        f'<tr><td data-sort="{esc(class_label(row.label, class_names))}">'
        f"{esc(class_label(row.label, class_names))}</td>"
        f'<td class="num" data-sort="{row.used}">{row.used} of {row.count}</td>'
        + "".join(_number_cell(value, row.reason) for value in (row.mean, row.median))
        + "</tr>"
        for row in classes
    ]
    unit = f"<small>{esc(quantity.unit)}</small>" if quantity.unit else ""
    head = [
        '<th scope="col" data-kind="text"><button type="button">class</button></th>',
        *(
            f'<th scope="col" class="num" data-kind="number">'
            f'<button type="button">{title}</button>{note}</th>'
            for title, note in (("samples", ""), ("mean", unit), ("median", unit))
        ),
    ]
    return (
        f"<details><summary>{esc(quantity.name)} by class as a table, "
        f"{moment_words(found[0])}</summary>"
        + table(head, rows, "Classes", sortable=True)
        + "</details>"
    )


def about(metadata: Mapping[str, Any], ledger: LedgerTable) -> str:
    """Return the run's metadata as a table of keys and values."""
    rows = [
        f'<tr><td class="mono">{esc(key)}</td><td class="text">{esc(value)}</td></tr>'
        for key, value in _flatten(
            {
                "probe_steps": len(ledger.moments),
                **{key: metadata[key] for key in ("solver_used",) if key in metadata},
                **{
                    key: value
                    for key, value in metadata.items()
                    if key not in ("quantities", "class_names", "notes")
                },
            }
        )
    ]
    return table(
        ['<th scope="col">entry</th>', '<th scope="col">value</th>'], rows, "Run"
    )


def _flatten(content: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for key, value in content.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            found.extend(_flatten(value, f"{name}."))
        elif isinstance(value, list | tuple):
            words = ", ".join(str(item) for item in value[:40])
            more = f", … ({len(value)} entries)" if len(value) > 40 else ""
            found.append((name, words + more or "none"))
        else:
            found.append((name, "none" if value in (None, "", {}) else str(value)))
    return found


def _fairness_row(
    quantity: Quantity, spread: Spread, class_names: Sequence[str] | None
) -> str:
    ends = [spread.highest, spread.lowest]
    remark = spread.reason
    if quantity.sign < 0:
        ends.reverse()
    names = [
        "not known" if label is None else class_label(label, class_names)
        for label in ends
    ]
    if quantity.sign == 0 and spread.highest is not None:
        names = [f"{names[0]} (highest)", f"{names[1]} (lowest)"]
        remark = "; ".join(filter(None, (remark, "direction not known")))
    cells = [_number_cell(spread.difference, spread.reason)]
    cells += [
        _number_cell(value, spread.reason) for value in (spread.ratio, spread.gini)
    ]
    return (
        f'<tr><td class="mono">{esc(quantity.name)}</td>'
        f'<td class="name">{esc(names[0])}</td>'
        f'<td class="name">{esc(names[1])}</td>{"".join(cells)}'
        f'<td class="soft remark">{esc(remark)}</td></tr>'
    )


def _number_cell(value: float, reason: str) -> str:
    if math.isnan(value):
        word = "undefined" if reason.startswith(("undefined", "ratio")) else "not known"
        kind = "about" if "decibels" in reason else "bad"
        return (
            f'<td class="num" data-sort=""><span class="{kind}" title="{esc(reason)}">'
            f"{word}</span></td>"
        )
    sort = repr(value).replace("inf", "Infinity")
    return f'<td class="num" data-sort="{sort}">{esc(number(value))}</td>'
