"""Tables of classes, layers and quantities, and the run's own facts."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, final

import numpy as np

from leakwatch.reporting.figures.class_heat import classes_over_epochs
from leakwatch.reporting.figures.classes import class_bars
from leakwatch.reporting.figures.layers import layers_over_epochs
from leakwatch.reporting.html.markup import (
    Badge,
    NumberCell,
    Panel,
    make_panel,
    sort_key,
)
from leakwatch.reporting.ledger.table import Column, LedgerTable
from leakwatch.reporting.quantities import (
    BACKGROUND,
    LAYERS,
    Quantity,
    describe,
    ordered,
)
from leakwatch.reporting.run_facts import RunFacts
from leakwatch.reporting.statistics.aggregates import (
    Spread,
    spread_of_classes,
    summarize_classes,
)
from leakwatch.reporting.words import NO_RANKS, moment_words, number, sign_of_bound

__all__ = [
    "ClassSection",
    "LayerSection",
    "flatten",
    "make_about",
    "make_classes",
    "make_glossary",
    "make_layers",
]


class ClassRow(NamedTuple):
    """A class: how many samples count, and what they come to."""

    name: str
    samples: NumberCell
    mean: NumberCell
    median: NumberCell


class ClassMeans(NamedTuple):
    """Mean and median by class of the quantity that leads the report."""

    quantity: str
    unit: str
    when: str
    rows: tuple[ClassRow, ...]


class SpreadRow(NamedTuple):
    """How unequally a quantity is spread: difference, ratio and Gini coefficient."""

    quantity: str
    most: str
    least: str
    values: tuple[NumberCell, NumberCell, NumberCell]
    remark: str


@final
@dataclass(frozen=True)
class ClassSection:
    """What the section on classes shows; at least one of its parts."""

    figure: Panel | None
    over: Panel | None
    means: ClassMeans | None
    spreads: tuple[SpreadRow, ...]


def make_classes(
    shown: LedgerTable, table: LedgerTable, facts: RunFacts, lead: str = ""
) -> ClassSection | None:
    """Return how classes differ; None without any.

    Args:
        shown: Quantities of the figure.
        table: Quantities of the tables.
        facts: Of the run.
        lead: The quantity on top of the page.
    """
    figure = class_bars(shown, facts.quantities, facts.class_names, lead=lead)
    means = _class_means(table, facts, lead)
    spreads = _spreads(table, facts, lead)
    if figure is None and means is None and not spreads:
        return None
    over = classes_over_epochs(shown, facts.class_names)
    return ClassSection(
        make_panel("fig-class", figure, tall=True),
        make_panel("fig-class-epochs", over, tall=True),
        means,
        spreads,
    )


def _class_means(ledger: LedgerTable, facts: RunFacts, lead: str) -> ClassMeans | None:
    name = next(iter(ordered(ledger.quantities, lead)), "")
    last = ledger.last(name)
    classes = summarize_classes(last[1]) if last else []
    if last is None or not classes:
        return None
    quantity = describe(name, facts.quantities)
    return ClassMeans(
        quantity.name,
        quantity.unit,
        moment_words(last[0]),
        tuple(
            ClassRow(
                facts.class_label(row.label),
                NumberCell(f"{row.used} of {row.count}", sort=str(row.used)),
                *(
                    _number_cell(
                        value,
                        row.reason,
                        row.bounds > 0,
                        quantity.sign,
                        estimated=row.estimated,
                    )
                    for value in (row.mean, row.median)
                ),
            )
            for row in classes
        ),
    )


def _spreads(ledger: LedgerTable, facts: RunFacts, lead: str) -> tuple[SpreadRow, ...]:
    rows = []
    for name in ordered(ledger.quantities, lead):
        quantity = describe(name, facts.quantities)
        if (quantity.meaning and not quantity.sign) or name.startswith(BACKGROUND):
            continue  # shows nothing about exposure by itself
        last = ledger.last(name)
        classes = summarize_classes(last[1]) if last else []
        if len(classes) < 2:
            continue
        spread = spread_of_classes(classes, quantity)
        if any(row.bounds for row in classes):
            nan = math.nan
            spread = Spread(None, None, nan, nan, nan, NO_RANKS)
        most, least = (
            "not known" if label is None else facts.class_label(label)
            for label in (spread.highest, spread.lowest)
        )
        remark = spread.reason
        if quantity.sign < 0:
            most, least = least, most
        elif quantity.sign == 0 and spread.highest is not None:
            most, least = f"{most} (highest)", f"{least} (lowest)"
            remark = "; ".join(filter(None, (remark, "direction not known")))
        values = (
            _number_cell(spread.difference, spread.reason),
            _number_cell(spread.ratio, spread.reason),
            _number_cell(spread.gini, spread.reason),
        )
        rows.append(SpreadRow(quantity.name, most, least, values, remark))
    return tuple(rows)


def _number_cell(
    value: float,
    reason: str,
    bound: bool = False,
    sign: int = 1,
    *,
    estimated: bool = False,
) -> NumberCell:
    if not math.isnan(value):
        text = sign_of_bound(number(value), bound, sign, estimated=estimated)
        return NumberCell(text, sort=sort_key(value))
    word = "undefined" if reason.startswith(("undefined", "ratio")) else "not known"
    style = "about" if "decibels" in reason else "bad"
    return NumberCell(badge=Badge(word, style, reason), sort="")


class LayerRow(NamedTuple):
    """A layer's share in the trace of JᵀJ, in words."""

    layer: str
    first: str
    last: str
    spread: str


@final
@dataclass(frozen=True)
class LayerSection:
    """Shares of layers at the ``first`` and the ``last`` probe that measured them."""

    figure: Panel | None
    first: str
    last: str
    rows: tuple[LayerRow, ...]


def make_layers(ledger: LedgerTable) -> LayerSection | None:
    """Return the heat map, and the latest shares as a table; None without any."""
    names = [name for name in ledger.quantities if name.startswith(LAYERS)]
    moments = [m for m in ledger.moments if not ledger.at(m).keys().isdisjoint(names)]
    if not moments:
        return None
    first, last = ledger.at(moments[0]), ledger.at(moments[-1])
    return LayerSection(
        figure=make_panel("fig-layers", layers_over_epochs(ledger), tall=True),
        first=moment_words(moments[0]),
        last=moment_words(moments[-1]),
        rows=tuple(
            LayerRow(
                name.removeprefix(LAYERS),
                _median_share(first.get(name)),
                _median_share(last.get(name)),
                _range_of_shares(last.get(name)),
            )
            for name in names
        ),
    )


def _median_share(column: Column | None) -> str:
    if column is None or np.isnan(column.usable_values).all():
        return "–"
    return f"{np.nanmedian(column.usable_values):.1%}"


def _range_of_shares(column: Column | None) -> str:
    if column is None:
        return "not measured"
    shares = column.usable_values
    if np.isnan(shares).all():
        return "; ".join(sorted(set(column.statuses)))
    return f"{np.nanmin(shares):.1%} to {np.nanmax(shares):.1%}"


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
            meaning="Share of all time since training began that went into watching, "
            "the first probe step and what prepared it included.",
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


def make_glossary(
    ledger: LedgerTable, quantities: Mapping[str, Quantity]
) -> list[Quantity]:
    """Return what each recorded quantity means, families of names as one entry."""
    run_level = dict.fromkeys(name for _, name in ledger.run_level)
    entries: dict[str, Quantity] = {}
    for name in [*ordered(ledger.quantities), *run_level]:
        entry = _entry(name)
        quantity = describe(name, quantities)
        if not quantity.meaning:
            quantity = _DERIVED.get(entry, quantity)
        entries.setdefault(entry, replace(quantity, name=entry))
    return list(entries.values())


def _entry(name: str) -> str:
    for pattern, entry in _FAMILIES:
        match = re.fullmatch(pattern, name)
        if match:
            return match.expand(entry)
    return name


def make_about(
    metadata: Mapping[str, Any], ledger: LedgerTable
) -> list[tuple[str, str]]:
    """Return the run's metadata as keys and values, each setting once.

    Private attributes and digests of arrays stay in ``run.json``.
    """
    first = {"probe_steps": len(ledger.moments)}
    if "solver_used" in metadata:
        first["solver_used"] = metadata["solver_used"]
    hidden = ("quantities", "class_names", "notes", "subject", "files", "checksum")
    rest = {key: value for key, value in metadata.items() if key not in hidden}
    if isinstance(rest.get("arguments"), Mapping):  # settings are those of the config
        said = rest["arguments"].items()
        rest["arguments"] = {k: v for k, v in said if k != "settings"}
    shown: dict[tuple[str, str], str] = {}
    for name, text in flatten({**first, **rest}):
        last, of_arguments = name.rpartition(".")[2], name.startswith("arguments.")
        private = "._" in name or "sha256" in text
        # What an argument's default came to stands in the config.
        if not (private or (of_arguments and text == "none")):
            shown.setdefault((last, text), name)
    return [(name, text) for (_, text), name in shown.items()]


def flatten(content: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Return nested entries as keys with dots and values in words.

    Example:
        >>> flatten({"a": {"b": 1, "c": [2, 3]}, "d": None})
        [('a.b', '1'), ('a.c', '2, 3'), ('d', 'none')]
    """
    entries: list[tuple[str, str]] = []
    for key, value in content.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            entries.extend(flatten(value, f"{name}."))
        elif isinstance(value, list | tuple):
            words = ", ".join(str(item) for item in value[:40])
            more = f", … ({len(value)} entries)" if len(value) > 40 else ""
            entries.append((name, words + more or "none"))
        else:
            entries.append((name, "none" if value in (None, "", {}) else str(value)))
    return entries
