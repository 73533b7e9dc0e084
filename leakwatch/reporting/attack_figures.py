"""Figures of audits: what attacks achieved over epochs, and what was predicted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from leakwatch.reporting.plotting import (
    BLUE,
    GREY,
    ORANGE,
    VERMILION,
    drawable,
    moment_axis,
    new_figure,
    sample_name,
)
from leakwatch.reporting.quantities import HEADLINES
from leakwatch.reporting.table import LedgerTable, Moment

__all__ = ["achieved_over_epochs", "predicted_achieved"]

_LINES: Final = (
    ("audit/near/psnr", "worst-case attack", VERMILION),
    ("audit/random/psnr", "practical attack", ORANGE),
    ("audit/baseline/constant_psnr", "best image of one colour", GREY),
)


def achieved_over_epochs(ledger: LedgerTable) -> Any | None:
    """Median PSNR of attacks, baseline and prediction at each audit.

    Args:
        ledger: the run.

    Returns:
        A plotly figure, ``None`` with fewer than two audits.
    """
    moments = sorted({m for m, name in ledger.columns if name.startswith("audit/")})
    if len(moments) < 2:
        return None
    places, title = moment_axis(moments)
    figure = new_figure(
        "Attacks over training",
        "Median PSNR over the attacked samples, conclusive or not",
        380,
        xaxis={"title": {"text": title}},
        yaxis={"title": {"text": "PSNR [dB]"}},
    )
    predicted = next((n for n in HEADLINES if n in ledger.quantities), None)
    lines = list(_LINES)
    if predicted is not None:
        lines.insert(0, (predicted, f"predicted ({predicted})", BLUE))
    for name, words, colour in lines:
        columns = [ledger.columns.get((moment, name)) for moment in moments]
        if all(column is None for column in columns):
            continue
        medians = np.array(
            [
                np.nan
                if c is None or not np.isfinite(c.values).any()
                else np.median(c.values[np.isfinite(c.values)])
                for c in columns
            ]
        )
        figure.add_scatter(
            x=places,
            y=drawable(medians),
            name=words,
            mode="lines+markers",
            line={"color": colour, "dash": "dot" if colour == GREY else "solid"},
        )
    return figure


def predicted_achieved(
    ledger: LedgerTable, moment: Moment, class_names: Sequence[str] | None
) -> Any | None:
    """Predicted against achieved PSNR of each sample, with the diagonal.

    Args:
        ledger: the run.
        moment: of the audit.
        class_names: by label.

    Returns:
        A plotly figure, ``None`` where nothing was predicted.
    """
    name = next((n for n in HEADLINES if (moment, n) in ledger.columns), None)
    if name is None:
        return None
    score = ledger.columns[moment, name]
    figure = new_figure(
        "Did the score foresee it?",
        "On the diagonal an attack does exactly what was predicted; inconclusive "
        "attacks are hollow",
        380,
        xaxis={"title": {"text": f"predicted PSNR [dB] ({name})"}},
        yaxis={"title": {"text": "achieved PSNR [dB]"}},
    )
    seen: list[float] = []
    for quantity, words, colour in _LINES[:2]:
        column = ledger.columns.get((moment, quantity))
        if column is None:
            continue
        known = dict(zip(score.samples, score.values, strict=True))
        x = [float(known.get(s, np.nan)) for s in column.samples]
        y = column.values.tolist()
        seen += [v for v in (*x, *y) if np.isfinite(v)]
        figure.add_scatter(
            x=drawable(np.array(x)),
            y=drawable(column.values),
            name=words,
            mode="markers",
            text=[
                sample_name(s, label, class_names)
                for s, label in zip(column.samples, column.labels, strict=True)
            ],
            marker={
                "color": colour,
                "size": 8,
                "symbol": ["circle" if u else "circle-open" for u in column.usable],
            },
        )
    if not seen:
        return None
    ends = [min(seen), max(seen)]
    figure.add_scatter(
        x=ends,
        y=ends,
        mode="lines",
        name="achieved = predicted",
        line={"color": GREY, "dash": "dash"},
        hoverinfo="skip",
    )
    return figure
