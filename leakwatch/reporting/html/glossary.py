"""What each recorded quantity means."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from leakwatch.reporting.figures.style import ordered
from leakwatch.reporting.html.markup import esc, table
from leakwatch.reporting.ledger.table import LedgerTable
from leakwatch.reporting.quantities import Quantity, describe

__all__ = ["glossary"]

# Names that share a meaning, as a pattern and as one entry stands for all of them.
_FAMILIES: Final = (
    (r"audit/spearman/.+", "audit/spearman/<score>/<start>/<metric>"),
    (r"audit/(near|random)/(conclusive|recovered)", r"audit/<start>/\2"),
    (r"update/client-\d+/(.+)", r"update/client-<number>/\1"),
    (r"layers/.+", "layers/<layer>"),
)

_DERIVED: Final = {
    quantity.name: quantity
    for quantity in (
        Quantity("seconds", "s", meaning="Time that the probe step took."),
        Quantity(
            "time_fraction",
            meaning="Share of training time that probe steps have taken so far.",
        ),
        Quantity(
            "audit/<start>/conclusive",
            meaning="Share of attacked samples whose attack showed anything: it "
            "matched what was shared, or its image shows the sample.",
        ),
        Quantity(
            "audit/<start>/recovered",
            direction="higher = more exposed",
            meaning="Share of samples that were recovered, of those whose attack was "
            "conclusive.",
        ),
        Quantity(
            "audit/spearman/<score>/<start>/<metric>",
            meaning="Rank correlation of a score with the quality that conclusive "
            "attacks achieved.",
        ),
        Quantity(
            "layers/<layer>",
            meaning="Share of a layer in the trace of JᵀJ of a sample.",
        ),
    )
}


def glossary(ledger: LedgerTable, quantities: Mapping[str, Quantity]) -> str:
    """Return what each recorded quantity means, families of names as one entry."""
    run_level = dict.fromkeys(name for _, name in ledger.run_level)
    known: dict[str, Quantity] = {}
    for name in [*ordered(ledger.quantities), *run_level]:
        entry = _entry(name)
        quantity = describe(name, quantities)
        if not quantity.meaning:
            quantity = _DERIVED.get(entry, quantity)
        known.setdefault(entry, quantity)
    rows = [
        f'<tr><td class="mono">{esc(entry)}</td>'
        f'<td class="text">'
        f"{esc(quantity.meaning or 'no description recorded with this run')}</td>"
        f"<td>{esc(quantity.unit or '–')}</td>"
        f"<td>{esc(quantity.direction or '–')}</td>"
        f"<td>{esc(quantity.source or '–')}</td></tr>"
        for entry, quantity in known.items()
    ]
    titles = ("quantity", "meaning", "unit", "direction", "source")
    head = [f'<th scope="col">{title}</th>' for title in titles]
    return table(head, rows, "Glossary") if rows else ""


def _entry(name: str) -> str:
    for pattern, entry in _FAMILIES:
        match = re.fullmatch(pattern, name)
        if match:
            return match.expand(entry)
    return name
