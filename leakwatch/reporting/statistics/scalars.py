"""The scalars that a probe step sends to every logger, and their keys: an API."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import nan
from typing import Final

from leakwatch.reporting.ledger.rows import Row
from leakwatch.reporting.ledger.table import LedgerTable
from leakwatch.reporting.quantities import Quantity, class_name, describe
from leakwatch.reporting.statistics.aggregates import (
    spread_of_classes,
    summarize,
    summarize_classes,
)

__all__ = ["PREFIX", "class_tags", "log_scalars"]

#: First part of all keys.
PREFIX: Final = "leakwatch"

_STATISTICS: Final = ("median", "p05", "p95", "worst")


def log_scalars(
    rows: Iterable[Row],
    quantities: Mapping[str, Quantity] | None = None,
    class_names: Sequence[str] | None = None,
    *,
    per_class: Collection[str] | None = None,
) -> dict[str, float]:
    """Return key to value for the rows of one probe step.

    Keys: ``leakwatch/<score>/<median|p05|p95|worst|class_ratio|class_gini>``,
    ``leakwatch/class/<class>/<score>``, and ``leakwatch/<quantity>`` for what is
    measured of the run, such as ``leakwatch/seconds``.

    NaN stands for "no usable value", so that the keys of a run stay the same.
    ``worst`` is left out for quantities without a direction; ratio and Gini
    coefficient for decibels, and where fewer than two classes were recorded.

    Args:
        rows: Rows of one step; of several, only the latest counts.
        quantities: Descriptions, which give the directions.
        class_names: Names of the classes, by label.
        per_class: Quantities that get a key per class; all by default.

    Example:
        >>> rows = [Row(0, 0, 7, 0, "i2f_psnr", 20.0),
        ...         Row(0, 0, 8, 1, "i2f_psnr", 30.0)]
        >>> found = log_scalars(rows, class_names=["cat", "dog"])
        >>> found["leakwatch/i2f_psnr/worst"], found["leakwatch/class/cat/i2f_psnr"]
        (30.0, 20.0)
    """
    table = LedgerTable.from_rows(rows)
    scalars: dict[str, float] = {}
    if not table.moments:
        return scalars
    moment = table.moments[-1]
    for quantity, column in table.at(moment).items():
        description = describe(quantity, quantities)
        summary = summarize(column, description.sign)
        for statistic in _STATISTICS:
            if statistic != "worst" or description.sign:
                value: float = getattr(summary, statistic)
                scalars[f"{PREFIX}/{quantity}/{statistic}"] = value
        classes = summarize_classes(column)
        tags = class_tags((row.label for row in classes), class_names)
        if per_class is None or quantity in per_class:
            for row in classes:
                scalars[f"{PREFIX}/class/{tags[row.label]}/{quantity}"] = row.mean
        if len(classes) > 1 and not description.logarithmic:
            spread = spread_of_classes(classes, description)
            scalars[f"{PREFIX}/{quantity}/class_ratio"] = spread.ratio
            scalars[f"{PREFIX}/{quantity}/class_gini"] = spread.gini
    for (when, quantity), run_row in table.run_level.items():
        if when == moment:
            scalars[f"{PREFIX}/{quantity}"] = run_row.value if run_row.usable else nan
    return scalars


def class_tags(labels: Iterable[int], names: Sequence[str] | None) -> dict[int, str]:
    """Return one distinct path segment per class.

    Slashes would open a new level in a logger's tree and become underscores;
    classes of equal name carry their label.

    Example:
        >>> class_tags([0, 1, 2], ["cat", "cat", "truck/van"])
        {0: 'cat-0', 1: 'cat-1', 2: 'truck_van'}
    """
    ordered = sorted(set(labels))
    all_labels = {*ordered, *range(len(names or ()))}
    plain = {
        label: class_name(label, names).replace("/", "_").strip() or str(label)
        for label in all_labels
    }
    taken = list(plain.values())
    return {
        label: plain[label]
        if taken.count(plain[label]) == 1
        else f"{plain[label]}-{label}"
        for label in ordered
    }
