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
    predicted = next((n for n in HEADLINES if n in ledger.quantities), None)
    lines: list[tuple[list[Column | None], str, str]] = []
    if predicted is not None:
        columns = [_of_attacked(ledger, moment, predicted) for moment in moments]
        lines.append((columns, f"predicted ({predicted})", BLUE))
    for kind, words, colour in _ATTACKS:
        found = [conclusive_values(ledger, m, kind, "psnr") for m in moments]
        lines.append((found, words, colour))
    constant = [ledger.columns.get((m, _CONSTANT)) for m in moments]
    lines.append((constant, "best image of one colour", GREY))
    for columns, words, colour in lines:
        if all(column is None for column in columns):
            continue
        known = [_known(column) for column in columns]
        figure.add_scatter(
            x=places,
            y=drawable([float(np.median(v)) if v.size else np.nan for v in known]),
            name=words,
            mode="lines+markers",
            line={"color": colour, "dash": "dot" if colour == GREY else "solid"},
            customdata=[
                f"{v.size} of {0 if c is None else len(c.samples)} samples"
                for v, c in zip(known, columns, strict=True)
            ],
            hovertemplate="%{y:.1f} dB<br>%{customdata}<extra>%{fullData.name}</extra>",
        )
    return figure


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
    name = next((n for n in HEADLINES if (moment, n) in ledger.columns), None)
    if name is None:
        return None
    score = ledger.columns[moment, name]
    usable = np.where(score.usable, score.values, np.nan)
    predicted = dict(zip(score.samples, usable.tolist(), strict=True))
    drawn: list[tuple[str, _Points, _Points]] = []
    for kind, *_ in _ATTACKS:
        column = ledger.columns.get((moment, f"audit/{kind}/psnr"))
        clear = conclusive_values(ledger, moment, kind, "psnr")
        if column is not None and clear is not None:
            rest = np.where(np.isnan(clear.values), column.values, np.nan)
            known = _points(clear, clear.values, predicted, class_names)
            drawn.append((kind, known, _points(clear, rest, predicted, class_names)))
    seen = [v for _, known, _ in drawn for x, y, _ in known for v in (x, y)]
    if not seen:
        return None
    subtitle = "on the diagonal an attack does exactly what was predicted"
    if any(failed for *_, failed in drawn):
        subtitle += (
            "; inconclusive attacks show nothing and are hidden, a click in the "
            "legend shows them"
        )
    figure = new_figure(
        "Did the score foresee it?",
        subtitle,
        380,
        xaxis={"title": {"text": f"predicted PSNR [dB] ({name})"}},
        yaxis={"title": {"text": "achieved PSNR [dB]"}},
    )
    for kind, known, failed in drawn:
        words, colour = next((w, c) for k, w, c in _ATTACKS if k == kind)
        _add_points(figure, known, words, colour, _SHAPES[kind])
        words += f", {len(failed)} inconclusive"
        _add_points(figure, failed, words, GREY, _SHAPES[kind], hidden=True)
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


_Points = list[tuple[float, float, str]]


def _points(
    column: Column,
    values: npt.NDArray[np.float64],
    predicted: Mapping[int, float],
    class_names: Sequence[str] | None,
) -> _Points:
    """Predicted, achieved and name of each sample that has both numbers."""
    found = [
        (predicted.get(sample, np.nan), value, sample_name(sample, label, class_names))
        for sample, label, value in zip(
            column.samples, column.labels, values.tolist(), strict=True
        )
    ]
    return [(x, y, words) for x, y, words in found if np.isfinite([x, y]).all()]


def _add_points(
    figure: Any,
    points: _Points,
    words: str,
    colour: str,
    shape: tuple[str, int],
    *,
    hidden: bool = False,
) -> None:
    if not points:
        return
    figure.add_scatter(
        x=[x for x, _, _ in points],
        y=[y for _, y, _ in points],
        name=words,
        mode="markers",
        visible="legendonly" if hidden else True,
        text=[name for _, _, name in points],
        hovertemplate="%{text}<br>predicted %{x:.1f} dB, achieved %{y:.1f} dB"
        "<extra>%{fullData.name}</extra>",
        marker={
            "color": colour,
            "size": shape[1],
            "symbol": shape[0] + ("-open" if hidden else ""),
        },
    )


def _known(column: Column | None) -> npt.NDArray[np.float64]:
    if column is None:
        return np.empty(0)
    values = np.where(column.usable, column.values, np.nan)
    known: npt.NDArray[np.float64] = values[np.isfinite(values)]
    return known


def _of_attacked(ledger: LedgerTable, moment: Moment, name: str) -> Column | None:
    """Return a column of those samples alone that were attacked then."""
    column = ledger.columns.get((moment, name))
    attacked = {
        sample
        for kind, *_ in _ATTACKS
        for sample in getattr(
            ledger.columns.get((moment, f"audit/{kind}/verdict")), "samples", ()
        )
    }
    if column is None:
        return None
    keep = [i for i, sample in enumerate(column.samples) if sample in attacked]
    return Column(
        samples=tuple(column.samples[i] for i in keep),
        labels=tuple(column.labels[i] for i in keep),
        values=column.values[keep],
        statuses=tuple(column.statuses[i] for i in keep),
    )
