"""Figure and page of a comparison of initialisations."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from leakwatch.reporting.figures import style
from leakwatch.reporting.figures.extras import require
from leakwatch.reporting.html.frame import html_page
from leakwatch.reporting.html.markup import esc, figure_panel, section, table
from leakwatch.reporting.quantities import HEADLINES
from leakwatch.reporting.words import count, number
from leakwatch.studies.initializations.points import Moment, Point, logarithmic
from leakwatch.studies.initializations.ranking import Verdict

if TYPE_CHECKING:
    from leakwatch.studies.initializations.result import InitializationComparison

_WHEN: Final = {"initial": "at initialisation", "trained": "after training"}
_SPREAD: Final = 0.32


def comparison_figure(
    found: InitializationComparison, moment: Moment = "initial"
) -> Any:
    """Every value by initialisation, with mean and interval; a menu of quantities.

    Attack errors come first, as in I²F, Figure 7, but not of attacks that all failed.
    A hollow point is an attack that did not match its gradient.

    Raises:
        ModuleNotFoundError: plotly is not installed.
    """
    graph = require("plotly.graph_objects", "The figure of a comparison")
    names = [n for n in _ordered(found, moment) if found.quantities[n].sign]
    groups, layouts = {}, {}
    for name in names:
        verdict, points = found.verdict(name, moment), found.of(name, moment)
        place = {scheme: i for i, scheme in enumerate(found.schemes)}
        groups[name] = [
            _dots(graph, found, [p for p in points if p.usable], place),
            _means(graph, verdict, place),
        ]
        about = found.quantities[name]
        layouts[name] = {
            "yaxis.title.text": style.axis_title(about),
            "yaxis.type": "log" if logarithmic(about) else "linear",
            "xaxis.ticktext": [
                style.short(s)
                + ("<br>not known" if s in {u.scheme for u in verdict.unknown} else "")
                for s in found.schemes
            ],
        }
    figure = style.new_figure(
        f"What gradients give away {_WHEN[moment]}",
        f"noise of standard deviation {found.settings.get('noise_std')}; a point is "
        "one sample under one seed, hollow: the attack failed; black: mean and 95 % "
        "interval of all points, hollow ones included",
        460,
        showlegend=False,
    )
    figure.update_xaxes(
        tickmode="array",
        tickvals=list(range(len(found.schemes))),
        range=[-0.6, len(found.schemes) - 0.4],
        showgrid=False,
    )
    style.add_menu(figure, groups, layouts, found.quantities)
    return figure


def comparison_page(found: InitializationComparison) -> str:
    """The report: verdicts, figures and the table, one HTML file without network.

    Raises:
        ModuleNotFoundError: plotly is not installed.
    """
    body = ""
    for moment in found.moments:
        body += section(
            moment,
            f"Ranking {_WHEN[moment]}",
            _verdicts(found, moment),
            figure_panel(f"fig-{moment}", comparison_figure(found, moment)),
            _table(found, moment),
        )
    settings = "; ".join(f"{k} = {v}" for k, v in found.settings.items())
    body += section("about", "About", f'<p class="soft">{esc(settings)}</p>')
    return html_page(
        title="leakwatch: initialisations",
        heading="Which initialisation leaks least",
        about=", ".join(
            count(len(many), noun)
            for many, noun in (
                (found.schemes, "scheme"),
                (found.seeds, "seed"),
                (found.samples, "sample"),
            )
        ),
        body=body,
    )


def _ordered(found: InitializationComparison, moment: Moment) -> list[str]:
    """Attacks of which any matched, predictions, attacks that all failed, the rest."""
    shown = [name for name in found.attacks if found.matched(name, moment)]
    lead = [*shown, *_headlines(found), *found.attacks]
    return list(dict.fromkeys([*lead, *found.quantities]))


def _headlines(found: InitializationComparison) -> list[str]:
    return [name for name in HEADLINES if name in found.quantities]


def _dots(
    graph: Any,
    found: InitializationComparison,
    points: list[Point],
    place: dict[str, int],
) -> Any:
    """All values; each sample keeps its place within a column, so lines can be seen."""
    total = max(len(found.samples) - 1, 1)
    shift = {s: _SPREAD * (2 * i / total - 1) for i, s in enumerate(found.samples)}
    colours = [style.BLUE, *style.LINES]
    colour = {s: colours[i % len(colours)] for i, s in enumerate(found.seeds)}
    return graph.Scatter(
        x=[place[p.scheme] + shift[p.sample] for p in points],
        y=style.drawable([p.value for p in points]),
        mode="markers",
        marker={
            "size": 7,
            "opacity": 0.75,
            "color": [colour[p.seed] for p in points],
            "symbol": [
                "circle-open" if p.matched is False else "circle" for p in points
            ],
        },
        customdata=[
            f"{style.text(p.scheme)}, seed {p.seed}<br>"
            f"{style.sample_name(p.sample, p.label, found.class_names)}"
            + ("" if p.repeat is None else f"<br>run {p.repeat}")
            + ("<br>gradient not matched" if p.matched is False else "")
            for p in points
        ],
        hovertemplate="%{customdata}<br>%{y:.4g}<extra></extra>",
    )


def _means(graph: Any, verdict: Verdict, place: dict[str, int]) -> Any:
    known = verdict.ranked
    return graph.Scatter(
        x=[place[r.scheme] for r in known],
        y=[r.mean for r in known],
        error_y={
            "type": "data",
            "symmetric": False,
            "array": style.drawable([r.high - r.mean for r in known]),
            "arrayminus": style.drawable([r.mean - r.low for r in known]),
            "thickness": 2,
            "width": 9,
            "color": "#222222",
        },
        mode="markers",
        marker={"symbol": "line-ew-open", "size": 22, "color": "#222222"},
        customdata=[style.text(r.scheme) for r in known],
        hovertemplate="%{customdata}<br>mean %{y:.4g}<extra></extra>",
    )


def _verdicts(found: InitializationComparison, moment: Moment) -> str:
    lines = []
    leading = (*found.attacks, *_headlines(found))
    for name in (name for name in _ordered(found, moment) if name in leading):
        verdict = found.verdict(name, moment)
        unknown = ", ".join(u.scheme for u in verdict.unknown)
        notes = " ".join(verdict.notes)
        lines.append(
            f"<li><strong>{esc(name)}</strong>: {esc(verdict.order or '–')}"
            + (
                ' <span class="about">no attack matched</span>'
                if name in found.attacks and not found.matched(name, moment)
                else ""
            )
            + (f"; not known, which is not safe: {esc(unknown)}" if unknown else "")
            + (f' <span class="soft">{esc(notes)}</span>' if notes else "")
            + "</li>"
        )
    return (
        '<p class="soft">Most exposed first; ≈ joins neighbours that are not told '
        f'apart at 95 %.</p><ul class="limits">{"".join(lines)}</ul>'
    )


def _table(found: InitializationComparison, moment: Moment) -> str:
    head = ["<th>quantity</th>"] + [
        f'<th class="num">{esc(s)}</th>' for s in found.schemes
    ]
    rows = []
    for name in _ordered(found, moment):
        about = found.quantities[name]
        if not about.sign:
            continue
        verdict = found.verdict(name, moment)
        means = {r.scheme: r for r in verdict.ranked}
        cells = []
        for scheme in found.schemes:
            if scheme not in means:
                cells.append('<td class="num"><span class="bad">not known</span></td>')
                continue
            r = means[scheme]
            ends = "" if math.isnan(r.low) else f"{number(r.low)} – {number(r.high)}"
            cells.append(
                f'<td class="num">{number(r.mean)}<br><small>{ends}</small></td>'
            )
        rows.append(
            f'<tr><td class="name">{esc(name)}<br><small>{esc(about.unit)}; '
            f"{esc(about.direction)}</small></td>{''.join(cells)}</tr>"
        )
    return table(head, rows, "Means and intervals by initialisation")
