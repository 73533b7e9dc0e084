"""Figures over training, the same ones for W&B and for the HTML report.

Each function takes plain rows and returns a plotly figure, or None when there is
nothing to draw. Unusable values are gaps and are counted in words.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from leakwatch.reporting.figures import style
from leakwatch.reporting.figures.levels import (
    levels_of_psnr,
    lines_of_levels,
    names_of_levels,
)
from leakwatch.reporting.ledger.rows import Row, status_reason, status_word
from leakwatch.reporting.ledger.table import Column, LedgerTable
from leakwatch.reporting.quantities import (
    ACHIEVED,
    HEADLINES,
    Quantity,
    describe,
    ordered,
)
from leakwatch.reporting.statistics.aggregates import (
    Summary,
    describe_counts,
    summarize,
    worst_samples,
)
from leakwatch.reporting.words import count, moment_words, number


def risk_over_epochs(
    rows: Iterable[Row] | LedgerTable,
    quantities: Mapping[str, Quantity] | None = None,
    class_names: Sequence[str] | None = None,
    *,
    worst: int = 4,
    height: int = 420,
    noise_std: float | None = None,
    floor: float | None = None,
    lead: str = "",
) -> Any | None:
    """Draw each quantity over training: median, 5–95 % band, most exposed samples.

    Args:
        rows: Rows of the whole run.
        quantities: Descriptions, which give units and directions.
        class_names: Names of the classes, by label.
        worst: How many of the latest step's most exposed samples get a line.
        height: Height in pixels.
        noise_std: Noise that the predictions assume, for the subtitle.
        floor: PSNR (dB) of a blind guess, drawn as a line.
        lead: The quantity to start with. Default: the predicted PSNR.

    Returns:
        A plotly figure, with a menu when there is more than one quantity.
    """
    table = LedgerTable.of(rows)
    if not table.quantities:
        return None
    groups: dict[str, list[Any]] = {}
    layouts: dict[str, dict[str, Any]] = {}
    for name in ordered(table.quantities, lead):
        quantity = describe(name, quantities)
        groups[name], layouts[name] = _risk_traces(
            table, quantity, class_names, worst=worst, floor=floor
        )
    subtitle = "median and 5–95 % of the watched samples, most exposed samples as lines"
    if any(column.bounds.any() for column in table.columns.values()):
        subtitle += f"; {style.CARETS}"
    if noise_std is not None:
        subtitle += f"; predictions assume noise of std {noise_std:g}"
    figure = style.new_figure("Exposure during training", subtitle, height)
    style.add_menu(figure, groups, layouts, quantities)
    return figure


def time_spent(rows: Iterable[Row] | LedgerTable, *, height: int = 300) -> Any | None:
    """Draw the seconds that each probe took; hovering shows the share of training."""
    table = LedgerTable.of(rows)
    seconds = {m: row.value for m, row in table.of_run("seconds").items() if row.usable}
    if not seconds:
        return None
    x, x_title = style.moment_axis(list(seconds))
    shares = table.of_run("time_fraction")
    total = number(math.fsum(seconds.values()))
    figure = style.new_figure(
        "Time spent on probes",
        f"{total} s in {count(len(seconds), 'probe step')}",
        height,
        showlegend=False,
        bargap=0.4,
    )
    figure.add_bar(
        x=x,
        y=style.drawable(list(seconds.values())),
        marker_color=style.BLUE,
        # Plotly lets a lone bar fill the axis.
        width=0.25 if len(x) == 1 else None,
        customdata=[_share_words(shares.get(moment)) for moment in seconds],
        hovertemplate="%{x}: %{y:.3g} s<br>%{customdata}<extra></extra>",
    )
    figure.update_xaxes(title_text=x_title, showgrid=False, **style.whole_ticks(x))
    if len(x) == 1:
        figure.update_xaxes(range=[x[0] - 1, x[0] + 1])
    figure.update_yaxes(title_text="seconds per probe", rangemode="tozero")
    return figure


def _share_words(share: Row | None) -> str:
    if share is not None and share.usable:
        return f"{share.value:.1%} of training time so far"
    if share is not None and status_word(share.status) == "undefined":
        return style.text(status_reason(share.status) or "share not defined yet")
    return "share of training time not recorded"


def _risk_traces(
    table: LedgerTable,
    quantity: Quantity,
    class_names: Sequence[str] | None,
    *,
    worst: int,
    floor: float | None,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    moments = table.moments_of(quantity.name)
    columns = [table.columns[moment, quantity.name] for moment in moments]
    summaries = [summarize(column, quantity.sign) for column in columns]
    x, x_title = style.moment_axis(moments)
    median = [summary.median for summary in summaries]
    low = [summary.p05 for summary in summaries]
    high = [summary.p95 for summary in summaries]
    traces: list[dict[str, Any]] = []
    if len(moments) > 1:
        fill = style.translucent(style.BLUE, 0.2)
        traces += style.band(x, low, high, fillcolor=fill, name="5–95 %", legendrank=2)
    last = columns[-1]
    chosen = worst_samples(last, quantity.sign, worst)
    for colour, sample in zip(style.LINES * worst, chosen, strict=False):
        label = last.labels[last.samples.index(sample)]
        values = [column.at(sample) for column in columns]
        traces.append(
            {
                "type": "scatter",
                "x": x,
                "y": style.drawable(
                    [v.value if v.usable else math.nan for v in values]
                ),
                "mode": "lines+markers",
                "line": {"width": 1.3, "color": colour},
                "marker": {
                    "size": 8 if len(x) == 1 or any(v.bound for v in values) else 5,
                    "symbol": style.markers((v.bound for v in values), quantity.sign),
                },
                "name": style.sample_name(sample, label, class_names),
                "legendrank": 3,
                "customdata": [style.text(value.status) for value in values],
                "hovertemplate": (
                    "%{y:.4g}<br>%{customdata}<extra>%{fullData.name}</extra>"
                ),
            }
        )
    traces.append(
        {
            "type": "scatter",
            "x": x,
            "y": style.drawable(median),
            "mode": "lines+markers",
            "line": {"width": 3, "color": style.BLUE},
            "marker": {
                "size": 10 if any(s.bounds for s in summaries) else 7,
                "symbol": style.markers(
                    (summary.bounds > 0 for summary in summaries), quantity.sign
                ),
            },
            "name": "median",
            "legendrank": 1,
            "error_y": _bars_of_one(median, low, high),
            "customdata": [
                f"{moment_words(moment)}{_of_bounds(s)}"
                f"<br>5–95 %: {number(s.p05)} to {number(s.p95)}"
                f"<br>{s.used} of {s.count} samples usable"
                + (f" ({describe_counts(s.excluded)})" if s.excluded else "")
                for moment, s in zip(moments, summaries, strict=True)
            ],
            "hovertemplate": "median %{y:.4g}<br>%{customdata}<extra></extra>",
        }
    )
    drawn = np.concatenate([column.values[column.usable] for column in columns])
    predicts = quantity.name in (*HEADLINES, *ACHIEVED)
    levels = levels_of_psnr(floor) if predicts and drawn.size else []
    traces += names_of_levels(levels)
    layout = {
        "xaxis.title.text": x_title,
        **{f"xaxis.{key}": value for key, value in style.whole_ticks(x).items()},
        "yaxis.title.text": style.axis_title(quantity),
        "yaxis.type": style.axis_type(drawn, quantity),
        "yaxis.autorange": not quantity.logarithmic,
        "yaxis.range": style.decibel_range(
            [*drawn.tolist(), math.nan if floor is None else floor]
        )
        if quantity.logarithmic
        else None,
        "shapes": lines_of_levels(levels),
        "annotations": _excuse([s.reason for s in summaries if s.used == 0], columns),
    }
    return traces, layout


def _of_bounds(summary: Summary) -> str:
    if not summary.bounds:
        return ""
    return (
        f"<br>{summary.bounds} of {summary.used} are bounds: exposure is at least that"
    )


def _bars_of_one(
    median: list[float], low: list[float], high: list[float]
) -> dict[str, Any] | None:
    """Return error bars for a single probe, whose band would have no width."""
    if len(median) != 1 or not np.isfinite([*median, *low, *high]).all():
        return None
    return {
        "type": "data",
        "symmetric": False,
        "array": [high[0] - median[0]],
        "arrayminus": [median[0] - low[0]],
        "thickness": 2,
    }


def _excuse(reasons: list[str], columns: Sequence[Column]) -> list[dict[str, Any]]:
    if len(reasons) < len(columns):
        return []
    return [style.note(f"<b>Not known</b>, which is not safe:<br>{reasons[-1]}")]
