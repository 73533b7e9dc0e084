"""Heat maps of classes: the mean predicted PSNR of each at every probe, or run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

from leakwatch.reporting.figures import style
from leakwatch.reporting.ledger.rows import Row
from leakwatch.reporting.ledger.table import LedgerTable
from leakwatch.reporting.quantities import class_label
from leakwatch.reporting.statistics.aggregates import summarize_classes
from leakwatch.reporting.statistics.headline import find_headline
from leakwatch.reporting.words import moment_words

__all__ = ["classes_over_epochs", "heat_map"]

# Height of one class, pixels.
_LINE: Final = 22


def classes_over_epochs(
    rows: Iterable[Row] | LedgerTable, class_names: Sequence[str] | None = None
) -> Any | None:
    """Draw the mean headline of each class at every probe; gaps are not known.

    Args:
        rows: Rows of the whole run.
        class_names: By label.

    Returns:
        A plotly figure; None with fewer than two classes or two probes.
    """
    ledger = LedgerTable.of(rows)
    headline = find_headline(ledger)
    if headline is None:
        return None
    moments = ledger.moments_of(headline.quantity)
    means = {
        moment: {
            row.label: row.mean
            for row in summarize_classes(ledger.columns[moment, headline.quantity])
        }
        for moment in moments
    }
    bounds = any(
        ledger.columns[moment, headline.quantity].bounds.any() for moment in moments
    )
    labels = sorted({label for row in means.values() for label in row})
    if len(moments) < 2 or len(labels) < 2:
        return None
    return heat_map(
        "Classes over training",
        f"mean {headline.quantity} of each class, dB; brighter = more exposed"
        + ("; of bounds: exposure is at least that" if bounds else ""),
        [moment_words(moment) for moment in moments],
        [style.text(class_label(label, class_names)) for label in labels],
        [
            [means[moment].get(label, math.nan) for moment in moments]
            for label in labels
        ],
    )


def heat_map(
    title: str,
    subtitle: str,
    columns: Sequence[str],
    classes: Sequence[str],
    values: Sequence[Sequence[float]],
) -> Any:
    """Draw a PSNR of classes in several columns.

    Args:
        title: Of the figure.
        subtitle: Below it.
        columns: Their names, escaped.
        classes: Names of the rows, escaped.
        values: A row for each class, dB; NaN is a gap.

    Returns:
        A plotly figure.
    """
    low, high = style.decibel_range(value for row in values for value in row)
    figure = style.new_figure(title, subtitle, 150 + _LINE * len(classes))
    figure.add_heatmap(
        x=list(columns),
        y=list(classes),
        z=[style.drawable(row) for row in values],
        zmin=low,
        zmax=high,
        colorscale="Cividis",
        colorbar={"ticksuffix": " dB", "thickness": 12},
        hoverongaps=False,
        hovertemplate="%{y}, %{x}: %{z:.1f} dB<extra></extra>",
    )
    figure.update_yaxes(autorange="reversed", type="category", showgrid=False)
    figure.update_xaxes(type="category", showgrid=False)
    return figure
