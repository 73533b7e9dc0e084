"""Which layer leaks: the parts of all layers in the trace of H = JᵀJ."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import numpy as np

from leakwatch.reporting.figures import style
from leakwatch.reporting.ledger.rows import Row
from leakwatch.reporting.ledger.table import Column, LedgerTable
from leakwatch.reporting.quantities import LAYERS
from leakwatch.reporting.words import moment_words

__all__ = ["layers_over_epochs", "without_layers"]

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
    figure = style.new_figure(
        "Which layer leaks",
        "share of each layer in Σλ of JᵀJ, median over the samples",
        150 + _LINE * len(names),
    )
    figure.add_heatmap(
        x=[moment_words(moment) for moment in ledger.moments],
        y=[style.text(name.removeprefix(LAYERS)) for name in names],
        z=shares,
        zmin=0.0,
        colorscale="Cividis",
        colorbar={"tickformat": ".0%", "thickness": 12},
        hovertemplate="%{y}, %{x}: %{z:.1%}<extra></extra>",
    )
    # From the input at the top to the logits at the bottom.
    figure.update_yaxes(autorange="reversed", type="category", showgrid=False)
    figure.update_xaxes(type="category", showgrid=False)
    return figure


def _median(column: Column | None) -> float | None:
    if column is None or np.isnan(column.usable_values).all():
        return None
    return float(np.nanmedian(column.usable_values))
