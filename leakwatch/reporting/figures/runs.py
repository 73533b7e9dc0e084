"""Figures of several runs beside each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from leakwatch.reporting.figures import style
from leakwatch.reporting.figures.class_heat import heat_map
from leakwatch.reporting.figures.levels import (
    levels_of_psnr,
    lines_of_levels,
    names_of_levels,
)
from leakwatch.reporting.statistics.aggregates import summarize, summarize_classes
from leakwatch.reporting.statistics.runs import RecordedRun

__all__ = ["classes_of_runs", "runs_over_epochs", "samples_of_runs"]

_COLOURS: Final = (style.BLUE, *style.LINES, style.GREY)
_DASHES: Final = ("solid", "dash", "dot")
_SPREAD: Final = 0.3


def runs_over_epochs(runs: Sequence[RecordedRun]) -> Any | None:
    """Draw the median predicted PSNR of each run over its training.

    Args:
        runs: The runs; those without a prediction are left out.

    Returns:
        A plotly figure; None if no run predicts a PSNR.
    """
    figure = style.new_figure(
        "Exposure during training",
        "predicted PSNR: median of each run, and its 5–95 % of samples as a band"
        + _carets(runs),
        440,
    )
    seen: list[float] = []
    for place, run in enumerate(runs):
        if run.headline is None:
            continue
        name = run.headline.quantity
        moments = run.table.moments_of(name)
        summaries = [summarize(run.table.columns[m, name], 1) for m in moments]
        epochs = [moment.epoch for moment in moments]
        colour = _COLOURS[place % len(_COLOURS)]
        low, high = [s.p05 for s in summaries], [s.p95 for s in summaries]
        seen += [*low, *high]
        if len(moments) > 1:
            figure.add_traces(
                style.band(
                    epochs,
                    low,
                    high,
                    fillcolor=style.translucent(colour, 0.12),
                    legendgroup=run.label,
                    showlegend=False,
                )
            )
        figure.add_scatter(
            x=epochs,
            y=style.drawable([s.median for s in summaries]),
            mode="lines+markers",
            name=style.short(run.label, 40),
            legendgroup=run.label,
            line={
                "color": colour,
                "width": 2.5,
                "dash": _DASHES[place // len(_COLOURS) % len(_DASHES)],
            },
            marker={"symbol": style.markers(s.bounds > 0 for s in summaries)},
            customdata=[
                f"{s.used} of {s.count} samples known"
                + (f", {s.bounds} of them at least so exposed" if s.bounds else "")
                for s in summaries
            ],
            hovertemplate=(
                "epoch %{x}: %{y:.1f} dB<br>%{customdata}"
                "<extra>%{fullData.name}</extra>"
            ),
        )
    if not figure.data:
        return None
    _add_levels(figure)
    figure.update_xaxes(title_text="completed epochs", tickformat="d")
    figure.update_yaxes(
        title_text="predicted PSNR [dB]<br><i>higher = more exposed</i>",
        range=style.decibel_range(seen),
    )
    return figure


def _add_levels(figure: Any) -> None:
    levels = levels_of_psnr()
    figure.update_layout(shapes=lines_of_levels(levels), showlegend=True)
    figure.add_traces(names_of_levels(levels))


def _carets(runs: Sequence[RecordedRun]) -> str:
    return f"; {style.CARETS}" if any(run.bound for run in runs) else ""


def samples_of_runs(runs: Sequence[RecordedRun]) -> Any | None:
    """Draw every sample at the last probe of each run.

    Args:
        runs: The runs.

    Returns:
        A plotly figure; None if nothing is known of any sample.
    """
    figure = style.new_figure(
        "Every sample at the last probe",
        "a dot is a sample, at the same place in each column; bar: median"
        + _carets(runs),
        440,
    )
    seen: list[float] = []
    for place, run in enumerate(runs):
        if run.headline is None or not run.headline.summary.used:
            continue
        column = run.headline.column
        values = column.usable_values
        seen += values.tolist()
        shift = np.linspace(-_SPREAD, _SPREAD, len(values)) if len(values) > 1 else [0]
        colour = _COLOURS[place % len(_COLOURS)]
        figure.add_scatter(
            x=[place + float(s) for s in shift],
            y=style.drawable(values),
            mode="markers",
            showlegend=False,
            marker={
                "size": 7,
                "opacity": 0.75,
                "color": colour,
                "symbol": style.markers(column.bounds.tolist()),
            },
            text=[
                style.sample_name(sample, label, run.facts.class_names)
                + (", at least" if bound else "")
                for sample, label, bound in zip(
                    column.samples, column.labels, column.bounds.tolist(), strict=True
                )
            ],
            hovertemplate="%{text}: %{y:.1f} dB<extra></extra>",
        )
        median = run.headline.summary.median
        figure.add_scatter(
            x=[place - 0.4, place + 0.4],
            y=style.drawable([median, median]),
            mode="lines",
            line={"color": style.INK, "width": 2.5},
            showlegend=False,
            hoverinfo="skip",
        )
    if not figure.data:
        return None
    _add_levels(figure)
    figure.update_xaxes(
        tickmode="array",
        tickvals=list(range(len(runs))),
        ticktext=[style.short(run.label, 24) for run in runs],
        range=[-0.6, len(runs) - 0.4],
        showgrid=False,
    )
    figure.update_yaxes(
        title_text="predicted PSNR [dB]<br><i>higher = more exposed</i>",
        range=style.decibel_range(seen),
    )
    return figure


def classes_of_runs(runs: Sequence[RecordedRun]) -> Any | None:
    """Draw the mean predicted PSNR of each class in each run, at its last probe.

    Args:
        runs: The runs.

    Returns:
        A plotly figure; None with fewer than two classes.
    """
    means = [
        {}
        if run.headline is None
        else {
            (row.label, run.facts.class_label(row.label)): row.mean
            for row in summarize_classes(run.headline.column)
        }
        for run in runs
    ]
    names = sorted({pair for row in means for pair in row})
    if len(names) < 2:
        return None
    return heat_map(
        "Classes by run",
        "mean predicted PSNR of each class at the last probe; brighter = more exposed, "
        "gaps are not known"
        + ("; of bounds: exposure is at least that" if _carets(runs) else ""),
        [style.short(run.label, 24) for run in runs],
        [style.short(name, 30) for _, name in names],
        [[row.get(name, math.nan) for row in means] for name in names],
    )
