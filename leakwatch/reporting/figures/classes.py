"""Figure of the classes at the latest probe."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from leakwatch.reporting.figures import style
from leakwatch.reporting.ledger.rows import Row
from leakwatch.reporting.ledger.table import Column, LedgerTable, Moment
from leakwatch.reporting.quantities import Quantity, class_label, describe, ordered
from leakwatch.reporting.statistics.aggregates import (
    ClassSummary,
    summarize,
    summarize_classes,
)
from leakwatch.reporting.words import moment_words

_MANY_CLASSES: Final = 20


def class_bars(
    rows: Iterable[Row] | LedgerTable,
    quantities: Mapping[str, Quantity] | None = None,
    class_names: Sequence[str] | None = None,
    *,
    height: int | None = None,
    lead: str = "",
) -> Any | None:
    """Draw class means at the latest step, with their samples as points.

    The most exposed class is on top; without a direction, the highest mean.

    Args:
        rows: Rows of the whole run or of one step.
        quantities: Descriptions, which give units and directions.
        class_names: Names of the classes, by label.
        height: Height in pixels; by default it grows with the number of classes.
        lead: The quantity to start with. Default: the predicted PSNR.

    Returns:
        A plotly figure, with a menu when there is more than one quantity.
    """
    table = LedgerTable.of(rows)
    groups: dict[str, list[Any]] = {}
    layouts: dict[str, dict[str, Any]] = {}
    most, bounds = 0, False
    for name in ordered(table.quantities, lead):
        last = table.last(name)
        classes = summarize_classes(last[1]) if last else []
        if last is None or not classes:
            continue
        most = max(most, len(classes))
        bounds = bounds or any(row.bounds for row in classes)
        groups[name], layouts[name] = _class_traces(
            *last, classes, describe(name, quantities), class_names
        )
    if not groups:
        return None
    figure = style.new_figure(
        "Exposure by class",
        "class means at the latest probe, each point is a sample"
        + (f"; {style.CARETS}, and the order may be another" if bounds else ""),
        height or 150 + max(22 * most, 90),
        bargap=0.35,
        showlegend=False,
    )
    figure.update_yaxes(ticks="", showgrid=False)
    style.add_menu(figure, groups, layouts, quantities)
    return figure


def _class_traces(
    moment: Moment,
    column: Column,
    classes: list[ClassSummary],
    quantity: Quantity,
    class_names: Sequence[str] | None,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    sign = quantity.sign or 1

    def exposure(row: ClassSummary) -> float:
        return -math.inf if math.isnan(row.mean) else sign * row.mean

    ranked = sorted(classes, key=exposure)
    place = {row.label: position for position, row in enumerate(ranked)}
    names = {row.label: class_label(row.label, class_names) for row in ranked}
    points = [
        (value, place[label], sample, label, bound)
        for value, label, sample, bound in zip(
            column.usable_values.tolist(),
            column.labels,
            column.samples,
            column.bounds.tolist(),
            strict=True,
        )
        if label is not None and not math.isnan(value)
    ]
    drawn = np.array([value for value, *_ in points], np.float64)
    traces = [
        {
            "type": "bar",
            "x": style.drawable([row.mean for row in ranked]),
            "y": list(range(len(ranked))),
            "orientation": "h",
            "marker": {"color": style.translucent(style.BLUE, 0.55)},
            "customdata": [
                f"{style.text(names[row.label])}<br>"
                + (row.reason or f"{row.used} of {row.count} samples usable")
                + (", exposed at least so much" if row.bounds else "")
                for row in ranked
            ],
            "hovertemplate": "%{customdata}<br>mean %{x:.4g}<extra></extra>",
        },
        {
            "type": "scatter",
            "x": style.drawable(drawn),
            "y": [position for _, position, *_ in points],
            "mode": "markers",
            "marker": {
                "size": 10 if column.bounds.any() else 7,
                "symbol": style.markers(
                    (bound for *_, bound in points), quantity.sign, across=True
                ),
                "color": style.VERMILION,
                "opacity": 0.75,
                "line": {"width": 1, "color": "#FFFFFF"},
            },
            "customdata": [
                f"sample #{sample}, {style.text(names[label])}"
                + (": exposed at least so much" if bound else "")
                for _, _, sample, label, bound in points
            ],
            "hovertemplate": "%{customdata}<br>%{x:.4g}<extra></extra>",
        },
    ]
    title = style.axis_title(quantity)
    any_usable = any(row.used for row in classes)
    layout = {
        "xaxis.side": "top" if len(ranked) > _MANY_CLASSES else "bottom",
        "xaxis.title.text": f"{title}<br>{moment_words(moment)}",
        "xaxis.type": style.axis_type(drawn, quantity),
        "yaxis.tickmode": "array",
        "yaxis.tickvals": list(range(len(ranked))),
        "yaxis.ticktext": [
            style.short(names[row.label])
            + (": not known" if any_usable and not row.used else "")
            for row in ranked
        ],
        "yaxis.range": [-0.7, len(ranked) - 0.3],
        "annotations": []
        if any_usable
        else [
            style.note(
                "<b>Not known</b>, which is not safe:<br>"
                + summarize(column, quantity.sign).reason
            )
        ],
    }
    return traces, layout
