"""Figure and page of a trade-off."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from leakwatch.reporting.figures import style
from leakwatch.reporting.figures.extras import require
from leakwatch.reporting.html.frame import html_page
from leakwatch.reporting.html.markup import esc, figure_panel, section, table
from leakwatch.reporting.quantities import HIGHER_LESS, HIGHER_MORE, Quantity
from leakwatch.reporting.words import count, number
from leakwatch.studies.trade_offs.grid import NONE
from leakwatch.studies.trade_offs.outcomes import Attacker
from leakwatch.studies.trade_offs.rows import TradeOffRow
from leakwatch.studies.trade_offs.table import EXACT, columns, headings, notes

if TYPE_CHECKING:
    from leakwatch.studies.trade_offs.result import TradeOff

_WHO: Final[dict[Attacker, str]] = {
    "adaptive": "who knows what the defense did to this message",
    "estimating": "who knows the defense and guesses what it did",
    "naive": "who takes all noise for isotropic",
}


def trade_off_figure(found: TradeOff) -> Any:
    """Privacy against utility: a line for each defense, a point for each budget.

    Mixtures have a point for each coefficient.

    Accuracy to the right; a menu chooses what exposure is measured by. The star is
    training without a defense. What is not known is not drawn, and named below; hollow
    points leave out attacks that were not conclusive.

    Raises:
        ModuleNotFoundError: plotly is not installed.
    """
    graph = require("plotly.graph_objects", "The figure of a trade-off")
    rows = found.summary
    groups: dict[str, list[Any]] = {}
    layouts: dict[str, dict[str, Any]] = {}
    about: dict[str, Quantity] = {}
    for quantity, values, partial in _quantities(found):
        if all(math.isnan(value) for value in values):
            continue
        about[quantity.name] = quantity
        groups[quantity.name] = _lines(graph, found, rows, values, partial)
        layouts[quantity.name] = {"yaxis.title.text": style.axis_title(quantity)}
    hollow = any(missing for row in rows for missing in row.inconclusive.values())
    figure = style.new_figure(
        "Privacy against utility",
        f"a point is one budget ({found.unit}){_mixing(found)}; star: no defense; "
        + ("hollow: of conclusive attacks only, others failed; " if hollow else "")
        + f"attacked by {found.settings.get('attack', '')}",
        480,
    )
    figure.update_xaxes(title_text="accuracy", tickformat=".1%")
    if groups:
        style.add_menu(figure, groups, layouts, about)
    else:
        figure.add_annotation(**style.note("No cell of the grid could be measured."))
    return figure


def trade_off_page(found: TradeOff) -> str:
    """The report: figure, table and what failed, one HTML file without network.

    Raises:
        ModuleNotFoundError: plotly is not installed.
    """
    remarks = "".join(f"<li>{esc(note)}</li>" for note in notes(found))
    who = "".join(
        f"<li><strong>{esc(name)}</strong>: {esc(_WHO[name])}</li>"
        for name in found.attackers
    )
    settings = "; ".join(
        f"{k} = {number(v) if isinstance(v, float) else v}"
        for k, v in found.settings.items()
    )
    body = section(
        "trade-off",
        "Attacks against accuracy",
        figure_panel("fig-trade-off", trade_off_figure(found)),
        _table(found),
        f'<ul class="limits">{remarks}</ul>' if remarks else "",
    )
    body += section(
        "about",
        "About",
        f'<p class="soft">Attackers:</p><ul class="limits">{who}</ul>',
        '<p class="soft">PSNR: higher = more exposed; medians over samples, and the '
        "most exposed one. Not known is not safe. Every message that is attacked is "
        f"the gradient of one sample.{_asked(found)}</p>",
        f'<p class="soft">{esc(settings)}</p>',
    )
    seeds = len({cell.seed for cell in found.cells})
    return html_page(
        title="leakwatch: trade-off",
        heading="What a defense costs, and what it buys",
        about=", ".join(
            count(size, noun)
            for size, noun in (
                (len(found.defenses) - 1, "defense"),
                (len(found.cells), "training"),
                (seeds, "seed"),
            )
        ),
        body=body,
    )


def _mixing(found: TradeOff) -> str:
    """What the points of mixtures are, where there are any."""
    mixed = any(cell.coefficient is not None for cell in found.cells)
    return ", of mixtures one coefficient" if mixed else ""


def _asked(found: TradeOff) -> str:
    """How many of them there are of each sample, where these are several."""
    queries = found.settings.get("queries", 1)
    return f" Each was asked for {queries} times." if queries != 1 else ""


def _quantities(
    found: TradeOff,
) -> list[tuple[Quantity, list[float], list[bool]]]:
    """What the menu offers: values of all rows, and which leave some attacks out."""
    rows = found.summary
    out: list[tuple[Quantity, list[float], list[bool]]] = []
    for who in reversed(found.attackers):
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
    found: TradeOff,
    rows: Sequence[TradeOffRow],
    values: Sequence[float],
    partial: Sequence[bool],
) -> list[Any]:
    colours = [style.BLUE, *style.LINES, style.GREY]
    traces = []
    for i, name in enumerate(found.defenses):
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
                customdata=[_hover(r, found.unit) for r, *_ in mine],
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


def _table(found: TradeOff) -> str:
    _, lines = columns(found)
    head = [
        f'<th scope="col"{" class=num" if i else ""}>{esc(title)}'
        + (f"<small>{esc(unit)}</small>" if unit else "")
        + "</th>"
        for i, (title, unit) in enumerate(headings(found))
    ]
    return table(
        head,
        [
            "<tr>"
            + "".join(
                f'<td class="name">{esc(cell)}</td>'
                if i == 0
                else f'<td class="num">{esc(cell)}</td>'
                for i, cell in enumerate(line)
            )
            + "</tr>"
            for line in lines
        ],
        "Accuracy and attacks by defense and budget",
        sticky=True,
    )
