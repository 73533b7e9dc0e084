"""Figure and page of a trade-off."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from leakwatch.reporting.figures import style
from leakwatch.reporting.figures.levels import (
    levels_of_psnr,
    lines_of_levels,
    names_of_levels,
)
from leakwatch.reporting.html.markup import make_panel
from leakwatch.reporting.html.page import render_page
from leakwatch.reporting.quantities import HIGHER_LESS, HIGHER_MORE, Quantity
from leakwatch.reporting.words import count, number
from leakwatch.studies.trade_offs.conclusions import conclude, lead_of
from leakwatch.studies.trade_offs.grid import NONE
from leakwatch.studies.trade_offs.outcomes import Attacker
from leakwatch.studies.trade_offs.rows import Overview, Spread, TradeOffRow
from leakwatch.studies.trade_offs.table import columns, headings, notes

# Of accuracies; plotly shows a single one on an axis from 0 to 200 %.
_LEAST_WIDE: Final = 0.02
# dB; more is drawn as this much.
_DRAWN: Final = 60.0

_WHO: Final[dict[Attacker, str]] = {
    "adaptive": "who knows what the defense did to this message",
    "estimating": "who knows the defense and guesses what it did",
    "naive": "who takes all noise for isotropic",
}


def trade_off_figure(overview: Overview) -> Any:
    """Privacy against utility: a line for each defense, a point for each budget.

    Mixtures have a point for each coefficient.

    Accuracy to the right; a menu chooses what exposure is measured by. The star is
    training without a defense. What is not known is not drawn, and named below; hollow
    points leave out attacks that were not conclusive.

    Raises:
        ModuleNotFoundError: plotly is not installed.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    layouts: dict[str, dict[str, Any]] = {}
    quantities: dict[str, Quantity] = {}
    first = lead_of(overview).name
    for exposure in sorted(_exposures(overview), key=lambda e: e.about.name != first):
        if all(map(math.isnan, exposure.values)):
            continue
        name = exposure.about.name
        quantities[name] = exposure.about
        in_decibels = exposure.about.logarithmic
        levels = levels_of_psnr() if in_decibels else []
        groups[name] = [*_lines(overview, exposure), *names_of_levels(levels)]
        layouts[name] = {
            "yaxis.title.text": style.axis_title(exposure.about),
            "yaxis.autorange": not in_decibels,
            "shapes": lines_of_levels(levels),
            "yaxis.range": style.decibel_range(
                [*exposure.values, *(end for ends in exposure.spreads for end in ends)]
            )
            if in_decibels
            else None,
        }
    mixing = ", of mixtures one coefficient" if overview.mixes else ""
    hollow = any(
        missing for row in overview.rows for missing in row.inconclusive.values()
    )
    bounds = any(sum(row.predicted_bounds.values()) for row in overview.rows)
    figure = style.new_figure(
        "Privacy against utility",
        f"a point is one budget ({overview.unit}){mixing}; star: no defense; "
        f"{_DRAWN:g} dB: or more; bars: least to most exposed message"
        + (", lowest to highest seed" if overview.seeds > 1 else "")
        + "; "
        + ("hollow: of conclusive attacks only, others failed; " if hollow else "")
        + (f"{style.CARETS}; " if bounds else "")
        + f"attacked by {overview.settings.get('attack', '')}",
        480,
    )
    known = [row.accuracy for row in overview.rows if not math.isnan(row.accuracy)]
    figure.update_xaxes(title_text="accuracy", tickformat=".1%")
    if known and max(known) - min(known) < _LEAST_WIDE:
        middle = (max(known) + min(known)) / 2
        wide = [middle - _LEAST_WIDE, middle + _LEAST_WIDE]
        figure.update_xaxes(range=wide)
    if groups:
        style.add_menu(figure, groups, layouts, quantities)
    else:
        figure.add_annotation(**style.note("No cell of the grid could be measured."))
    return figure


def trade_off_page(overview: Overview) -> str:
    """The report: figure, table and what failed, one HTML file without network.

    Args:
        overview: of the trade-off.

    Raises:
        ModuleNotFoundError: plotly is not installed.
    """
    return render_page(
        "trade_off.html.j2",
        folder=Path(__file__).parent,
        title="leakwatch: trade-off",
        heading="What a defense costs, and what it buys",
        about=", ".join(
            (
                count(len(overview.defenses) - 1, "defense"),
                count(sum(row.cells for row in overview.rows), "training"),
                count(overview.seeds, "seed"),
            )
        ),
        conclusions=conclude(overview),
        figure=make_panel("fig-trade-off", trade_off_figure(overview)),
        headings=headings(overview),
        rows=columns(overview)[1],
        notes=notes(overview),
        attackers=[(name, _WHO[name]) for name in overview.attackers],
        queries=overview.queries,
        settings="; ".join(
            f"{k} = {number(v) if isinstance(v, float) else v}"
            for k, v in overview.settings.items()
        ),
    )


class _Exposure(NamedTuple):
    """An entry of the menu.

    Attributes:
        about: the quantity.
        values: in each row.
        spreads: over the messages of each row.
        partial: which rows leave attacks out.
        bounds: which rows are bounds.
    """

    about: Quantity
    values: list[float]
    spreads: list[Spread]
    partial: list[bool]
    bounds: list[bool]


def _exposures(overview: Overview) -> Iterator[_Exposure]:
    rows = overview.rows
    for who in reversed(overview.attackers):
        partial = [row.inconclusive[who] > 0 for row in rows]
        none = [False] * len(rows)
        about = Quantity(f"{who}_psnr", "dB", HIGHER_MORE, "Median PSNR of attacks.")
        spreads = [_capped(row.spread[who]) for row in rows]
        achieved = [_capped((row.psnr[who],))[0] for row in rows]
        yield _Exposure(about, achieved, spreads, partial, none)
        about = Quantity(
            f"{who}_predicted_psnr", "dB", HIGHER_MORE, "Median of predictions."
        )
        spreads = [_capped(row.predicted_spread[who]) for row in rows]
        predicted = [_capped((row.predicted[who],))[0] for row in rows]
        bounds = [row.predicted_bounds[who] > 0 for row in rows]
        yield _Exposure(about, predicted, spreads, none, bounds)
        about = Quantity(f"{who}_lpips", "", HIGHER_LESS, "Median LPIPS.")
        bare = [(math.nan, math.nan)] * len(rows)
        yield _Exposure(about, [row.lpips[who] for row in rows], bare, partial, none)


def _capped(values: Sequence[float]) -> Any:
    """Beyond the drawn scale all that counts is that nothing is missed."""
    return tuple(_DRAWN if value > _DRAWN else value for value in values)


def _lines(overview: Overview, exposure: _Exposure) -> list[dict[str, Any]]:
    colours = [style.BLUE, *style.LINES, style.GREY]
    traces = []
    for i, name in enumerate(overview.defenses):
        star = name == NONE
        points = [
            (row, value, ends, _symbol(star, partial, bound))
            for row, value, ends, partial, bound in zip(
                overview.rows,
                exposure.values,
                exposure.spreads,
                exposure.partial,
                exposure.bounds,
                strict=True,
            )
            if row.defense == name
        ]
        traces.append(
            {
                "type": "scatter",
                "x": style.drawable([row.accuracy for row, *_ in points]),
                "y": style.drawable([value for _, value, *_ in points]),
                "error_x": _bars([(r.accuracy, r.accuracy_spread) for r, *_ in points]),
                "error_y": _bars([(value, ends) for _, value, ends, _ in points]),
                "mode": "markers" if star else "lines+markers",
                "cliponaxis": False,  # what lies at the end of the scale is whole
                "name": style.short(name),
                "marker": {
                    "size": 15 if star else 9,
                    "symbol": [symbol for *_, symbol in points],
                    "color": style.INK if star else colours[(i - 1) % len(colours)],
                },
                "customdata": [_hover(row, overview.unit) for row, *_ in points],
                "hovertemplate": "%{customdata}<br>%{y:.4g}<extra></extra>",
            }
        )
    return traces


def _symbol(star: bool, partial: bool, bound: bool) -> str:
    shape = "star" if star else "circle"
    if bound:
        shape = "star-triangle-up" if star else "triangle-up"
    return shape + ("-open" if partial else "")


def _bars(values: Sequence[tuple[float, Spread]]) -> dict[str, Any]:
    """Error bars from the least to the largest of what a median or mean sums up."""
    return {
        "type": "data",
        "symmetric": False,
        "array": style.drawable([high - middle for middle, (_, high) in values]),
        "arrayminus": style.drawable([middle - low for middle, (low, _) in values]),
        "thickness": 1.2,
        "width": 4,
    }


def _hover(row: TradeOffRow, unit: str) -> str:
    missing = sum(row.inconclusive.values())
    return (
        style.text(row.setting.words(unit))
        + f"<br>accuracy {row.accuracy:.3f}"
        + (f"<br>{missing} attacks inconclusive" if missing else "")
        + (f"<br>ε = {row.epsilon:.3g}" if math.isfinite(row.epsilon) else "")
        + (f"<br>{row.failed} of {row.cells} runs failed" if row.failed else "")
    )
