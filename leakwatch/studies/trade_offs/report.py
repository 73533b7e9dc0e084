"""Figure and page of a trade-off."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from leakwatch.reporting.figures import style
from leakwatch.reporting.html.markup import make_panel
from leakwatch.reporting.html.page import render_page
from leakwatch.reporting.quantities import HIGHER_LESS, HIGHER_MORE, Quantity
from leakwatch.reporting.words import count, number
from leakwatch.studies.trade_offs.grid import NONE
from leakwatch.studies.trade_offs.outcomes import Attacker
from leakwatch.studies.trade_offs.rows import Overview, TradeOffRow
from leakwatch.studies.trade_offs.table import EXACT, columns, headings, notes

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
    for exposure in _exposures(overview):
        if all(map(math.isnan, exposure.values)):
            continue
        name = exposure.about.name
        quantities[name] = exposure.about
        groups[name] = _lines(overview, exposure)
        layouts[name] = {"yaxis.title.text": style.axis_title(exposure.about)}
    mixing = ", of mixtures one coefficient" if overview.mixes else ""
    hollow = any(
        missing for row in overview.rows for missing in row.inconclusive.values()
    )
    figure = style.new_figure(
        "Privacy against utility",
        f"a point is one budget ({overview.unit}){mixing}; star: no defense; "
        + ("hollow: of conclusive attacks only, others failed; " if hollow else "")
        + f"attacked by {overview.settings.get('attack', '')}",
        480,
    )
    figure.update_xaxes(title_text="accuracy", tickformat=".1%")
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
    """An entry of the menu: its value in each row, and which leave attacks out."""

    about: Quantity
    values: list[float]
    partial: list[bool]


def _exposures(overview: Overview) -> Iterator[_Exposure]:
    rows = overview.rows
    for who in reversed(overview.attackers):
        partial = [row.inconclusive[who] > 0 for row in rows]
        about = Quantity(f"{who}_psnr", "dB", HIGHER_MORE, "Median PSNR of attacks.")
        yield _Exposure(about, [row.psnr[who] for row in rows], partial)
        about = Quantity(f"{who}_worst_psnr", "dB", HIGHER_MORE, "The largest PSNR.")
        yield _Exposure(about, [row.worst[who] for row in rows], partial)
        unit = f"dB, drawn up to {EXACT:g}"
        about = Quantity(f"{who}_predicted_psnr", unit, HIGHER_MORE, "Predicted PSNR.")
        predicted = [row.predicted[who] for row in rows]
        # min() would take NaN for the smaller one or not, by the order.
        capped = [EXACT if value > EXACT else value for value in predicted]
        yield _Exposure(about, capped, [False] * len(rows))
        about = Quantity(f"{who}_lpips", "", HIGHER_LESS, "Median LPIPS.")
        yield _Exposure(about, [row.lpips[who] for row in rows], partial)


def _lines(overview: Overview, exposure: _Exposure) -> list[dict[str, Any]]:
    colours = [style.BLUE, *style.LINES, style.GREY]
    traces = []
    for i, name in enumerate(overview.defenses):
        points = [
            (row, value, partial)
            for row, value, partial in zip(
                overview.rows, exposure.values, exposure.partial, strict=True
            )
            if row.defense == name
        ]
        star = name == NONE
        shape = "star" if star else "circle"
        traces.append(
            {
                "type": "scatter",
                "x": style.drawable([row.accuracy for row, *_ in points]),
                "y": style.drawable([value for _, value, _ in points]),
                "mode": "markers" if star else "lines+markers",
                "name": style.short(name),
                "marker": {
                    "size": 15 if star else 9,
                    "symbol": [shape + ("-open" if p else "") for *_, p in points],
                    "color": "#222222" if star else colours[(i - 1) % len(colours)],
                },
                "customdata": [_hover(row, overview.unit) for row, *_ in points],
                "hovertemplate": "%{customdata}<br>%{y:.4g}<extra></extra>",
            }
        )
    return traces


def _hover(row: TradeOffRow, unit: str) -> str:
    missing = sum(row.inconclusive.values())
    return (
        style.text(row.setting.words(unit))
        + f"<br>accuracy {row.accuracy:.3f}"
        + (f"<br>{missing} attacks inconclusive" if missing else "")
        + (f"<br>ε = {row.epsilon:.3g}" if math.isfinite(row.epsilon) else "")
        + (f"<br>{row.failed} of {row.cells} runs failed" if row.failed else "")
    )
