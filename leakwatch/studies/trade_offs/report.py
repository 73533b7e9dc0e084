"""Figure and page of a trade-off."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from leakwatch.reporting.extras import require
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
    graph = require("plotly.graph_objects", "The figure of a trade-off")
    rows = overview.rows
    groups: dict[str, list[Any]] = {}
    layouts: dict[str, dict[str, Any]] = {}
    about: dict[str, Quantity] = {}
    for quantity, values, partial in _quantities(overview):
        if all(math.isnan(value) for value in values):
            continue
        about[quantity.name] = quantity
        groups[quantity.name] = _lines(graph, overview, rows, values, partial)
        layouts[quantity.name] = {"yaxis.title.text": style.axis_title(quantity)}
    mixing = ", of mixtures one coefficient" if overview.mixes else ""
    hollow = any(missing for row in rows for missing in row.inconclusive.values())
    figure = style.new_figure(
        "Privacy against utility",
        f"a point is one budget ({overview.unit}){mixing}; star: no defense; "
        + ("hollow: of conclusive attacks only, others failed; " if hollow else "")
        + f"attacked by {overview.settings.get('attack', '')}",
        480,
    )
    figure.update_xaxes(title_text="accuracy", tickformat=".1%")
    if groups:
        style.add_menu(figure, groups, layouts, about)
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


def _quantities(
    overview: Overview,
) -> list[tuple[Quantity, list[float], list[bool]]]:
    """What the menu offers: values of all rows, and which leave some attacks out."""
    rows = overview.rows
    out: list[tuple[Quantity, list[float], list[bool]]] = []
    for who in reversed(overview.attackers):
        some = [row.inconclusive[who] > 0 for row in rows]
        exact = f"dB, drawn up to {EXACT:g}"
        out += [
            (
                Quantity(f"{who}_psnr", "dB", HIGHER_MORE, "Median PSNR of attacks."),
                [row.psnr[who] for row in rows],
                some,
            ),
            (
                Quantity(f"{who}_worst_psnr", "dB", HIGHER_MORE, "The largest PSNR."),
                [row.worst[who] for row in rows],
                some,
            ),
            (
                Quantity(
                    f"{who}_predicted_psnr", exact, HIGHER_MORE, "Predicted PSNR."
                ),
                # min() would take NaN for the smaller one or not, by the order.
                [
                    EXACT if row.predicted[who] > EXACT else row.predicted[who]
                    for row in rows
                ],
                [False] * len(rows),
            ),
            (
                Quantity(f"{who}_lpips", "", HIGHER_LESS, "Median LPIPS."),
                [row.lpips[who] for row in rows],
                some,
            ),
        ]
    return out


def _lines(
    graph: Any,
    overview: Overview,
    rows: Sequence[TradeOffRow],
    values: Sequence[float],
    partial: Sequence[bool],
) -> list[Any]:
    colours = [style.BLUE, *style.LINES, style.GREY]
    traces = []
    for i, name in enumerate(overview.defenses):
        mine = [
            (r, v, p)
            for r, v, p in zip(rows, values, partial, strict=True)
            if r.defense == name
        ]
        star = name == NONE
        shape = "star" if star else "circle"
        traces.append(
            graph.Scatter(
                x=style.drawable([r.accuracy for r, *_ in mine]),
                y=style.drawable([v for _, v, _ in mine]),
                mode="markers" if star else "lines+markers",
                name=style.short(name),
                marker={
                    "size": 15 if star else 9,
                    "symbol": [shape + ("-open" if p else "") for *_, p in mine],
                    "color": "#222222" if star else colours[(i - 1) % len(colours)],
                },
                customdata=[_hover(r, overview.unit) for r, *_ in mine],
                hovertemplate="%{customdata}<br>%{y:.4g}<extra></extra>",
            )
        )
    return traces


def _hover(row: TradeOffRow, unit: str) -> str:
    missing = sum(row.inconclusive.values())
    return (
        style.text(row.setting.words(unit))
        + f"<br>accuracy {row.accuracy:.3f}"
        + (f"<br>{missing} attacks inconclusive" if missing else "")
        + (f"<br>{row.failed} of {row.cells} runs failed" if row.failed else "")
    )
