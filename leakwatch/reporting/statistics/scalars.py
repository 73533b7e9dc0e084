"""The scalars that a probe step sends to every logger."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from leakwatch.reporting.ledger.rows import Row
from leakwatch.reporting.ledger.table import LedgerTable
from leakwatch.reporting.quantities import Quantity, describe
from leakwatch.reporting.statistics import keys
from leakwatch.reporting.statistics.aggregates import (
    spread_of_classes,
    summarize,
    summarize_classes,
)


def log_scalars(
    rows: Iterable[Row],
    quantities: Mapping[str, Quantity] | None = None,
    class_names: Sequence[str] | None = None,
    *,
    per_class: Collection[str] | None = None,
) -> dict[str, float]:
    """Return key to value for the rows of one probe step.

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
    for quantity in table.quantities:
        column = table.columns.get((moment, quantity))
        if column is None:
            continue
        description = describe(quantity, quantities)
        summary = summarize(column, description.sign)
        for statistic in keys.STATISTICS:
            if statistic != "worst" or description.sign:
                value: float = getattr(summary, statistic)
                scalars[keys.score_key(quantity, statistic)] = value
        classes = summarize_classes(column)
        tags = keys.class_tags((row.label for row in classes), class_names)
        if per_class is None or quantity in per_class:
            for row in classes:
                scalars[keys.class_key(tags[row.label], quantity)] = row.mean
        if len(classes) > 1 and not description.logarithmic:
            spread = spread_of_classes(classes, description)
            scalars[keys.class_ratio_key(quantity)] = spread.ratio
            scalars[keys.class_gini_key(quantity)] = spread.gini
    for (when, quantity), run_row in table.run_level.items():
        if when == moment:
            value = run_row.value if run_row.usable else float("nan")
            scalars[keys.run_key(quantity)] = value
    return scalars
