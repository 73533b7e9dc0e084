"""Top of the report: what the numbers mean, for a reader without the papers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from leakwatch.reporting.html.markup import card, esc
from leakwatch.reporting.ledger.rows import status_reason, status_word
from leakwatch.reporting.ledger.table import LedgerTable
from leakwatch.reporting.message import GRADIENT, Message
from leakwatch.reporting.quantities import class_label
from leakwatch.reporting.run_facts import noise_words
from leakwatch.reporting.statistics.headline import Headline
from leakwatch.reporting.words import (
    CLEARLY_ABOVE,
    HARDLY_BELOW,
    count,
    decibels,
    moment_words,
    number,
    psnr_level,
    psnr_words,
)


def lead(
    headline: Headline | None,
    noise_std: float | None = None,
    message: Message = GRADIENT,
) -> str:
    """Return the sentence that sums the run up, with the noise that it assumes.

    Args:
        headline: The predicted PSNR, if the run predicts one.
        noise_std: That predictions assume, gradient units; None where none is stated.
        message: What an attacker sees.
    """
    if headline is None:
        return (
            '<p class="lead">This run predicts no reconstruction quality: add the '
            "score <code>i2f</code> to the monitor for a headline in decibels.</p>"
        )
    summary, when = headline.summary, moment_words(headline.moment)
    if not summary.used:
        return (
            f'<p class="lead">At the last probe ({esc(when)}) <strong class="unknown">'
            "the exposure is not known</strong>, which does not mean that it is low: "
            f"{esc(summary.reason)}.</p>"
        )
    worst, median = summary.worst, summary.median
    words = noise_words(noise_std, message)
    assumed = f" assuming {words}," if words else ""
    return (
        f'<p class="lead">At the last probe ({esc(when)}),{esc(assumed)} an attacker '
        f"who sees {esc(message.exposing)} could rebuild that sample with a "
        "predicted PSNR of "
        f'<strong class="{psnr_level(worst)}">{decibels(worst)}: '
        f"{psnr_words(worst)}</strong>. For the typical sample it is "
        f'<strong class="{psnr_level(median)}">{decibels(median)}: '
        f"{psnr_words(median)}</strong>.</p>"
    )


def assumptions(texts: Sequence[str]) -> str:
    """Return what a reader must know beside the headline; empty for nothing.

    Args:
        texts: Without capital and full stop.
    """
    shown = [text for text in texts if text]
    if not shown:
        return ""
    words = " ".join(f"{text[0].upper()}{text[1:]}." for text in shown)
    return f'<div class="notice"><strong>Read with care.</strong> {esc(words)}</div>'


def cards(
    table: LedgerTable,
    headline: Headline | None,
    class_names: Sequence[str] | None,
    pictures: Mapping[int, str],
) -> str:
    """Return the row of cards."""
    found: list[str] = []
    if headline is not None:
        summary, column = headline.summary, headline.column
        sample = summary.worst_sample
        about = summary.reason
        if sample is not None:
            label = column.labels[column.samples.index(sample)]
            about = f"predicted PSNR of sample #{sample}"
            about += "" if label is None else f", {class_label(label, class_names)}"
        found.append(
            card(
                "Most exposed sample",
                decibels(summary.worst),
                about,
                level=psnr_level(summary.worst),
                picture=pictures.get(-1 if sample is None else sample, ""),
            )
        )
        change = "predicted PSNR; one probe so far"
        if headline.probes > 1:
            change = "predicted PSNR; no comparison with the first probe"
        if math.isfinite(headline.change):
            direction = "more" if headline.change > 0 else "less"
            change = (
                f"predicted PSNR; {abs(headline.change):.1f} dB {direction} than at "
                "the first probe"
            )
        found.append(
            card(
                "Typical sample (median)",
                decibels(summary.median),
                change,
                level=psnr_level(summary.median),
            )
        )
        unknown = summary.count - summary.used
        found.append(
            card(
                f"Predicted over {CLEARLY_ABOVE:.0f} dB",
                f"{headline.clearly} of {summary.used}"
                if summary.used
                else "not known",
                "samples clearly recognisable"
                + (f"; {unknown} not known" if unknown else ""),
                level="" if summary.used else "unknown",
            )
        )
        if headline.peak_moment is not None:
            found.append(
                card(
                    "Worst moment",
                    decibels(headline.peak),
                    f"highest predicted PSNR of any sample, "
                    f"{moment_words(headline.peak_moment)}",
                    level=psnr_level(headline.peak),
                )
            )
    found.extend(_time_card(table))
    return f'<div class="cards">{"".join(found)}</div>' if found else ""


def strip(
    headline: Headline | None,
    class_names: Sequence[str] | None,
    floor: float | None = None,
) -> str:
    """Return the strip on which every sample is a dot on the decibel scale.

    Args:
        headline: What to show.
        class_names: By label.
        floor: PSNR (dB) of a blind guess, the mean image, where it is known.
    """
    if headline is None or not headline.summary.used:
        return ""
    column = headline.column
    usable = column.usable
    finite = column.values[usable & np.isfinite(column.values)]
    low, high = 5.0, 35.0
    if finite.size:
        low = max(min(low, math.floor(float(finite.min()) / 5) * 5), -10.0)
        high = min(max(high, math.ceil(float(finite.max()) / 5) * 5), 80.0)

    def place(value: float) -> float:
        return 100.0 * (min(max(value, low), high) - low) / (high - low)

    dots = "".join(
        f'<i style="left:{place(float(value)):.2f}%;top:{12 + 11 * (turn % 3)}px" '
        f'title="#{sample}, {esc(class_label(label, class_names))}: '
        f'{decibels(float(value))}"></i>'
        for turn, (value, sample, label, ok) in enumerate(
            zip(column.values, column.samples, column.labels, usable, strict=True)
        )
        if ok
    )
    ends = [0.0, place(HARDLY_BELOW), place(CLEARLY_ABOVE), 100.0]
    zones = "".join(
        f'<span class="z-{level}" style="width:{right - left:.2f}%"></span>'
        for level, left, right in zip(
            ("low", "middle", "high"), ends[:-1], ends[1:], strict=True
        )
    )
    marks = "".join(
        f'<span style="left:{place(mark):.2f}%">{mark:.0f} dB</span>'
        for mark in (HARDLY_BELOW, CLEARLY_ABOVE)
    )
    median = place(headline.summary.median)
    guess = least = ""
    if floor is not None and low < floor < high:
        guess = (
            f'<b class="guess" style="left:{place(floor):.2f}%" '
            f'title="blind guess: {decibels(floor)}"></b>'
        )
        least = (
            f"<span>dashed line: {decibels(floor)}, a blind guess: the mean image"
            "</span>"
        )
    return (
        '<div class="panel"><div class="head"><div><h3>All watched samples on the '
        f'scale of predicted PSNR</h3><p class="sub">{low:.0f} to {high:.0f} dB, '
        "each dot is a sample, the bar is the median; further right = more exposed"
        '</p></div></div><div class="strip"><div class="band">'
        f'{zones}{dots}<b style="left:{median:.2f}%" title="median"></b>{guess}</div>'
        f'<div class="scale">{marks}</div></div><div class="legend">'
        f'<span>below {HARDLY_BELOW:.0f} dB: <em class="low">hardly recognisable</em>'
        f'</span><span>between: <em class="middle">partly recognisable</em></span>'
        f'<span>above {CLEARLY_ABOVE:.0f} dB: <em class="high">clearly recognisable'
        f"</em></span>{least}<span>rules of thumb for small natural pictures</span>"
        "</div></div>"
    )


def _time_card(table: LedgerTable) -> list[str]:
    seconds = [
        row.value
        for (_, name), row in table.run_level.items()
        if name == "seconds" and row.usable
    ]
    fractions = [
        row
        for (_, name), row in sorted(table.run_level.items())
        if name == "time_fraction"
    ]
    shares = [row.value for row in fractions if row.usable]
    if not seconds:
        return []
    total = f"{number(math.fsum(seconds))} s in {count(len(seconds), 'probe')}"
    if not shares:
        share = "share of training not recorded"
        if fractions and status_word(fractions[-1].status) == "undefined":
            reason = status_reason(fractions[-1].status) or "not defined yet"
            share = f"share of training: {reason}"
        return [card("Cost of watching", total, share)]
    return [card("Cost of watching", f"{shares[-1]:.1%}", f"of training time; {total}")]
