"""Figures of audits: what attacks achieved over epochs, and what was predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from leakwatch.reporting.figures.style import (
    BLUE,
    GREY,
    ORANGE,
    VERMILION,
    decibel_range,
    drawable,
    moment_axis,
    new_figure,
    sample_name,
    whole_ticks,
)
from leakwatch.reporting.ledger.table import Column, LedgerTable, Moment
from leakwatch.reporting.quantities import HEADLINES
from leakwatch.reporting.statistics.achieved import audits, conclusive_values

__all__ = ["achieved_over_epochs", "predicted_achieved"]

_ATTACKS: Final = (
    ("near", "worst-case attack", VERMILION),
    ("random", "practical attack", ORANGE),
)
# Both may end at the same image, and one must not hide the other.
_SHAPES: Final = {"near": ("circle", 11), "random": ("diamond", 7)}
_CONSTANT: Final = "audit/baseline/constant_psnr"


def achieved_over_epochs(ledger: LedgerTable) -> Any | None:
    """Median PSNR of conclusive attacks, and of the same samples predicted.

    Args:
        ledger: the run.

    Returns:
        A plotly figure, ``None`` with fewer than two audits.
    """
    moments = audits(ledger)
    if len(moments) < 2:
        return None
    places, title = moment_axis(moments)
    figure = new_figure(
        "Attacks over training",
        "median PSNR of conclusive attacks, a gap where none was; prediction and best "
        "image of one colour: of all attacked samples",
        380,
        xaxis={"title": {"text": title}, **whole_ticks(places)},
        yaxis={"title": {"text": "PSNR [dB]"}},
    )
    lines: list[tuple[list[Column | None], str, str]] = []
    headline = _predicted(ledger, moments)
    if headline is not None:
        predicted = [_of_attacked(ledger, moment, headline) for moment in moments]
        lines.append((predicted, f"predicted ({headline})", BLUE))
    for kind, words, colour in _ATTACKS:
        reached = [conclusive_values(ledger, m, kind, "psnr") for m in moments]
        lines.append((reached, words, colour))
    constant = [ledger.columns.get((m, _CONSTANT)) for m in moments]
    lines.append((constant, "best image of one colour", GREY))
    medians: list[float] = []
    for columns, words, colour in lines:
        if all(column is None for column in columns):
            continue
        values = [np.empty(0) if c is None else c.usable_values for c in columns]
        finite = [v[np.isfinite(v)] for v in values]
        middle = [float(np.median(v)) if v.size else np.nan for v in finite]
        medians += middle
        figure.add_scatter(
            x=places,
            y=drawable(middle),
            name=words,
            mode="lines+markers",
            line={"color": colour, "dash": "dot" if colour == GREY else "solid"},
            customdata=[
                f"{drawn.size} of {every.size} samples"
                for drawn, every in zip(finite, values, strict=True)
            ],
            hovertemplate="%{y:.1f} dB<br>%{customdata}<extra>%{fullData.name}</extra>",
        )
    figure.update_yaxes(range=decibel_range(medians))
    return figure


def _predicted(ledger: LedgerTable, moments: Sequence[Moment]) -> str | None:
    """The first of the headlines of which anything is known."""
    for name in HEADLINES:
        columns = [ledger.columns.get((moment, name)) for moment in moments]
        if any(column is not None and column.usable.any() for column in columns):
            return name
    return None


def _of_attacked(ledger: LedgerTable, moment: Moment, name: str) -> Column | None:
    """Return a column of those samples alone that were attacked then."""
    columns = ledger.at(moment)
    if name not in columns:
        return None
    verdicts = [f"audit/{kind}/verdict" for kind, *_ in _ATTACKS]
    attacked = {s for v in verdicts if v in columns for s in columns[v].samples}
    column = columns[name]
    return column.where(np.array([s in attacked for s in column.samples], bool))


def predicted_achieved(
    ledger: LedgerTable, moment: Moment, class_names: Sequence[str] | None
) -> Any | None:
    """Predicted against achieved PSNR of each sample, with the diagonal.

    Inconclusive attacks are counted, and drawn only for who asks for them.

    Args:
        ledger: the run.
        moment: of the audit.
        class_names: by label.

    Returns:
        A plotly figure, ``None`` where no sample has both numbers.
    """
    name = _predicted(ledger, [moment])
    if name is None:
        return None
    score = ledger.columns[moment, name]
    predicted = dict(zip(score.samples, score.usable_values.tolist(), strict=True))
    drawn: list[tuple[str, str, str, _Points, _Points]] = []
    for kind, words, colour in _ATTACKS:
        column = ledger.columns.get((moment, f"audit/{kind}/psnr"))
        clear = conclusive_values(ledger, moment, kind, "psnr")
        if column is not None and clear is not None:
            rest = np.where(np.isnan(clear.values), column.values, np.nan)
            good = _points(clear, clear.values, predicted, class_names)
            failed = _points(clear, rest, predicted, class_names)
            drawn.append((kind, words, colour, good, failed))
    seen = [v for *_, good, _ in drawn for x, y, _ in good for v in (x, y)]
    if not seen:
        return None
    ends = decibel_range(seen)
    subtitle = "on the diagonal an attack does exactly what was predicted"
    if score.bounds.any():
        subtitle += (
            f"; {int(score.bounds.sum())} of {int(score.usable.sum())} predictions are "
            "bounds, and may belong further right"
        )
    if any(failed for *_, failed in drawn):
        subtitle += (
            "; inconclusive attacks show nothing and are hidden, a click in the "
            "legend shows them"
        )
    figure = new_figure(
        "Did the score foresee it?",
        subtitle,
        380,
        xaxis={"title": {"text": f"predicted PSNR [dB] ({name})"}, "range": ends},
        yaxis={"title": {"text": "achieved PSNR [dB]"}, "range": ends},
    )
    for kind, words, colour, good, failed in drawn:
        shape, size = _SHAPES[kind]
        _add_points(figure, good, words, color=colour, symbol=shape, size=size)
        words += f", {len(failed)} inconclusive"
        shape += "-open"
        _add_points(figure, failed, words, color=GREY, symbol=shape, size=size)
    figure.add_scatter(
        x=ends,
        y=ends,
        mode="lines",
        name="achieved = predicted",
        line={"color": GREY, "dash": "dash"},
        hoverinfo="skip",
    )
    return figure


_Points = list[tuple[float, float, str]]


def _points(
    column: Column,
    values: npt.NDArray[np.float64],
    predicted: Mapping[int, float],
    class_names: Sequence[str] | None,
) -> _Points:
    """Predicted, achieved and name of each sample that has both numbers."""
    points = [
        (predicted.get(sample, np.nan), value, sample_name(sample, label, class_names))
        for sample, label, value in zip(
            column.samples, column.labels, values.tolist(), strict=True
        )
    ]
    return [(x, y, words) for x, y, words in points if np.isfinite([x, y]).all()]


def _add_points(figure: Any, points: _Points, words: str, **marker: Any) -> None:
    if not points:
        return
    figure.add_scatter(
        x=[x for x, _, _ in points],
        y=[y for _, y, _ in points],
        name=words,
        mode="markers",
        visible="legendonly" if marker["symbol"].endswith("-open") else True,
        text=[name for _, _, name in points],
        hovertemplate="%{text}<br>predicted %{x:.1f} dB, achieved %{y:.1f} dB"
        "<extra>%{fullData.name}</extra>",
        marker=marker,
    )
