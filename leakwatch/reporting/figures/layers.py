"""Which layer leaks: the parts of all layers in the trace of H = JᵀJ."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import numpy as np

from leakwatch.reporting.figures import style
from leakwatch.reporting.figures.extras import require
from leakwatch.reporting.html.markup import esc, figure_panel, table
from leakwatch.reporting.ledger.rows import Row
from leakwatch.reporting.ledger.table import Column, LedgerTable, Moment
from leakwatch.reporting.words import moment_words

__all__ = ["LAYERS", "layer_section", "layers_over_epochs", "without_layers"]

#: First part of the names of these quantities; the rest is the layer's.
LAYERS: Final = "layers/"
# Height of one layer in the heat map, pixels.
_LINE: Final = 22


def without_layers(rows: Iterable[Row]) -> list[Row]:
    """Return what is recorded about samples, and not about layers."""
    return [row for row in rows if not row.quantity.startswith(LAYERS)]


def layers_over_epochs(rows: Iterable[Row] | LedgerTable) -> Any | None:
    """Draw the share of each layer over training, medians over the samples.

    Args:
        rows: Rows of the whole run.

    Returns:
        A plotly figure; None when no layer has been measured.
    """
    ledger = LedgerTable.of(rows)
    names = [name for name in ledger.quantities if name.startswith(LAYERS)]
    shares = [
        [_median(ledger.columns.get((moment, name))) for moment in ledger.moments]
        for name in names
    ]
    if not any(share is not None for line in shares for share in line):
        return None
    graph = require("plotly.graph_objects", "A figure")
    figure = style.new_figure(
        "Which layer leaks",
        "share of each layer in Σλ of JᵀJ, median over the samples",
        150 + _LINE * len(names),
    )
    figure.add_trace(
        graph.Heatmap(
            x=[moment_words(moment) for moment in ledger.moments],
            y=[esc(name.removeprefix(LAYERS)) for name in names],
            z=shares,
            zmin=0.0,
            colorscale="Cividis",
            colorbar={"tickformat": ".0%", "thickness": 12},
            hovertemplate="%{y}, %{x}: %{z:.1%}<extra></extra>",
        )
    )
    # From the input at the top to the logits at the bottom.
    figure.update_yaxes(autorange="reversed", type="category", showgrid=False)
    figure.update_xaxes(type="category", showgrid=False)
    return figure


def layer_section(ledger: LedgerTable) -> str:
    """Return the heat map, and the latest shares as a table; empty without any."""
    names = [name for name in ledger.quantities if name.startswith(LAYERS)]
    moments = [
        m for m in ledger.moments if any((m, n) in ledger.columns for n in names)
    ]
    if not moments:
        return ""
    rows = [_row(ledger, name, moments) for name in names]
    head = [
        '<th scope="col">layer</th>',
        *(
            f'<th scope="col" class="num">{esc(text)}</th>'
            for text in (
                moment_words(moments[0]),
                moment_words(moments[-1]),
                "over the samples",
            )
        ),
    ]
    return (
        '<p class="soft">JᵀJ is the sum of the parts of all layers. The share of a '
        "layer in its trace says how much of what the gradient shows of a sample is "
        "in that layer&#x27;s own gradient; a layer that is not shared shows "
        "nothing.</p>"
        + figure_panel("fig-layers", layers_over_epochs(ledger), tall=True)
        + table(head, rows, "Share of each layer")
    )


def _row(ledger: LedgerTable, name: str, moments: list[Moment]) -> str:
    first, last = (ledger.columns.get((m, name)) for m in (moments[0], moments[-1]))
    cells = [_percent(_median(first)), _percent(_median(last)), _spread(last)]
    numbers = "".join(f'<td class="num">{esc(cell)}</td>' for cell in cells)
    return f'<tr><td class="mono">{esc(name.removeprefix(LAYERS))}</td>{numbers}</tr>'


def _median(column: Column | None) -> float | None:
    if column is None or not column.usable.any():
        return None
    return float(np.median(column.values[column.usable]))


def _spread(column: Column | None) -> str:
    if column is None or not column.usable.any():
        words = set() if column is None else set(column.statuses)
        return "; ".join(sorted(words)) or "not measured"
    values = column.values[column.usable]
    return f"{_percent(float(values.min()))} to {_percent(float(values.max()))}"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"
