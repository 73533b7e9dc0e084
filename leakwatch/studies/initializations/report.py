"""Figure and page of a comparison of initialisations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, final

from leakwatch.reporting.figures import style
from leakwatch.reporting.figures.levels import (
    levels_of_psnr,
    lines_of_levels,
    names_of_levels,
)
from leakwatch.reporting.html.markup import Panel, make_panel
from leakwatch.reporting.html.page import render_page
from leakwatch.reporting.quantities import HEADLINES, Quantity
from leakwatch.reporting.words import count, number
from leakwatch.studies.initializations.points import Moment, Point, logarithmic
from leakwatch.studies.initializations.ranking import Ranked, Verdict

__all__ = ["RankedQuantity", "Ranking", "comparison_figure", "comparison_page"]

_WHEN: Final = {"initial": "at initialisation", "trained": "after training"}
_SPREAD: Final = 0.3
_BESIDE: Final = 0.42


@final
@dataclass(frozen=True)
class RankedQuantity:
    """A quantity that says which end is exposed, at one moment.

    Attributes:
        about: the quantity.
        verdict: its ranking.
        points: its values.
        leads: whether the page says its ranking in words: attacks and headlines.
        unmatched: whether it is the error of an attack that never matched.
    """

    about: Quantity
    verdict: Verdict
    points: tuple[Point, ...]
    leads: bool
    unmatched: bool


@final
@dataclass(frozen=True)
class Ranking:
    """What figure and table show of one moment of a comparison.

    Attributes:
        moment: ``"initial"`` or ``"trained"``.
        conclusion: what it comes to, in sentences.
        quantities: in the order of the page.
        schemes: names of the initialisations.
        seeds: of the weights.
        samples: data-set indices.
        noise_std: that scores and attacks assume.
        class_names: of the labels, where they are known.
    """

    moment: Moment
    conclusion: str
    quantities: tuple[RankedQuantity, ...]
    schemes: tuple[str, ...]
    seeds: tuple[int, ...]
    samples: tuple[int, ...]
    noise_std: object
    class_names: tuple[str, ...] | None


def comparison_figure(ranking: Ranking) -> Any:
    """Every value by initialisation, with mean and interval; a menu of quantities.

    The predicted PSNR comes first, the attack errors of I²F, Figure 7, in the menu.
    A hollow point is an attack that did not match its gradient.

    Raises:
        ModuleNotFoundError: plotly is not installed.
    """
    place = {scheme: i for i, scheme in enumerate(ranking.schemes)}
    groups, layouts = {}, {}
    for quantity in ranking.quantities:
        about, verdict = quantity.about, quantity.verdict
        unknown = {u.scheme for u in verdict.unknown}
        levels = levels_of_psnr() if about.name in HEADLINES else []
        ends = [end for r in verdict.ranked for end in (r.low, r.high)]
        groups[about.name] = [
            _dots(ranking, quantity, place),
            _means(verdict, place),
            *names_of_levels(levels),
        ]
        layouts[about.name] = {
            "yaxis.title.text": style.axis_title(about),
            "yaxis.type": "log" if logarithmic(about) else "linear",
            "yaxis.autorange": not about.logarithmic,
            "yaxis.range": style.decibel_range(
                [*(p.value for p in quantity.points), *ends]
            )
            if about.logarithmic
            else None,
            "shapes": lines_of_levels(levels),
            "xaxis.ticktext": [
                style.short(s) + ("<br>not known" if s in unknown else "")
                for s in ranking.schemes
            ],
        }
    bounds = any(p.bound for quantity in ranking.quantities for p in quantity.points)
    figure = style.new_figure(
        f"What gradients give away {_WHEN[ranking.moment]}",
        f"noise of standard deviation {ranking.noise_std}; a point is "
        "one sample, a colour one seed; hollow: the attack failed; diamond and bar: "
        "mean and 95 % interval of all points, hollow ones included"
        + (f"; {style.CARETS}" if bounds else ""),
        460,
        showlegend=True,
    )
    figure.update_xaxes(
        tickmode="array",
        tickvals=list(place.values()),
        range=[-0.6, len(place) - 0.3],
        showgrid=False,
    )
    described = {q.about.name: q.about for q in ranking.quantities}
    style.add_menu(figure, groups, layouts, described)
    return figure


def _dots(
    ranking: Ranking, quantity: RankedQuantity, place: Mapping[str, int]
) -> dict[str, Any]:
    """All values; each sample keeps its place within a column, so lines can be seen."""
    points = [p for p in quantity.points if p.usable]
    symbols = style.markers((p.bound for p in points), quantity.about.sign)
    total = max(len(ranking.samples) - 1, 1)
    shift = {s: _SPREAD * (2 * i / total - 1) for i, s in enumerate(ranking.samples)}
    colours = [style.BLUE, *style.LINES]
    colour = {s: colours[i % len(colours)] for i, s in enumerate(ranking.seeds)}
    return {
        "type": "scatter",
        "x": [place[p.scheme] + shift[p.sample] for p in points],
        "y": style.drawable([p.value for p in points]),
        "mode": "markers",
        "showlegend": False,
        "marker": {
            "size": 7,
            "opacity": 0.75,
            "color": [colour[p.seed] for p in points],
            "symbol": [
                "circle-open" if p.matched is False else symbol
                for p, symbol in zip(
                    points,
                    [symbols] * len(points) if isinstance(symbols, str) else symbols,
                    strict=True,
                )
            ],
        },
        "customdata": [
            f"{style.text(p.scheme)}, seed {p.seed}<br>"
            f"{style.sample_name(p.sample, p.label, ranking.class_names)}"
            + ("" if p.repeat is None else f"<br>run {p.repeat}")
            + ("<br>gradient not matched" if p.matched is False else "")
            + ("<br>exposed at least so much" if p.bound else "")
            for p in points
        ],
        "hovertemplate": "%{customdata}<br>%{y:.4g}<extra></extra>",
    }


def _means(verdict: Verdict, place: Mapping[str, int]) -> dict[str, Any]:
    ranked = verdict.ranked
    return {
        "type": "scatter",
        # Beside the points, which it would hide.
        "x": [place[r.scheme] + _BESIDE for r in ranked],
        "y": [r.mean for r in ranked],
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": style.drawable([r.high - r.mean for r in ranked]),
            "arrayminus": style.drawable([r.mean - r.low for r in ranked]),
            "thickness": 2,
            "width": 5,
            "color": style.INK,
        },
        "mode": "markers",
        "showlegend": False,
        "marker": {"symbol": "diamond", "size": 9, "color": style.INK},
        "customdata": [
            f"{style.text(r.scheme)}<br>mean {verdict.written(r)}" for r in ranked
        ],
        "hovertemplate": "%{customdata}<extra></extra>",
    }


class _Verdict(NamedTuple):
    """A ranking in words."""

    quantity: str
    order: str
    unmatched: bool
    unknown: str
    notes: str


class _Mean(NamedTuple):
    """A mean and its interval in words."""

    value: str
    interval: str


class _Row(NamedTuple):
    """A quantity with one mean for each scheme, None where it is not known."""

    quantity: str
    about: str
    means: tuple[_Mean | None, ...]


class _Section(NamedTuple):
    """One moment on the page."""

    anchor: str
    title: str
    conclusion: str
    schemes: tuple[str, ...]
    verdicts: tuple[_Verdict, ...]
    figure: Panel | None
    rows: tuple[_Row, ...]


def comparison_page(rankings: Sequence[Ranking], settings: Mapping[str, object]) -> str:
    """The report: verdicts, figures and the table, one HTML file without network.

    Args:
        rankings: one for each moment, at least one.
        settings: noise, attacks, and so on.

    Raises:
        ModuleNotFoundError: plotly is not installed.
    """
    first = rankings[0]
    return render_page(
        "comparison.html.j2",
        folder=Path(__file__).parent,
        title="leakwatch: initialisations",
        heading="Which initialisation leaks least",
        about=", ".join(
            count(len(many), noun)
            for many, noun in (
                (first.schemes, "scheme"),
                (first.seeds, "seed"),
                (first.samples, "sample"),
            )
        ),
        rankings=[_section(ranking) for ranking in rankings],
        settings="; ".join(f"{k} = {v}" for k, v in settings.items()),
    )


def _section(ranking: Ranking) -> _Section:
    return _Section(
        anchor=ranking.moment,
        title=f"Ranking {_WHEN[ranking.moment]}",
        conclusion=ranking.conclusion,
        schemes=ranking.schemes,
        verdicts=tuple(_verdict(q) for q in ranking.quantities if q.leads),
        figure=make_panel(f"fig-{ranking.moment}", comparison_figure(ranking)),
        rows=tuple(_row(q, ranking.schemes) for q in ranking.quantities),
    )


def _verdict(quantity: RankedQuantity) -> _Verdict:
    verdict = quantity.verdict
    return _Verdict(
        quantity.about.name,
        verdict.order or "–",
        quantity.unmatched,
        ", ".join(u.scheme for u in verdict.unknown),
        " ".join(verdict.notes),
    )


def _row(quantity: RankedQuantity, schemes: Sequence[str]) -> _Row:
    verdict = quantity.verdict
    means = {r.scheme: _mean(r, verdict) for r in verdict.ranked}
    about = quantity.about
    return _Row(
        about.name,
        f"{about.unit}; {about.direction}",
        tuple(means.get(scheme) for scheme in schemes),
    )


def _mean(ranked: Ranked, verdict: Verdict) -> _Mean:
    has_ends = not math.isnan(ranked.low)
    ends = f"{number(ranked.low)} – {number(ranked.high)}" if has_ends else ""
    return _Mean(verdict.written(ranked), ends)
