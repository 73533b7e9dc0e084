"""Top of the report: what the numbers mean, for a reader without the papers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, final

import numpy as np

from leakwatch.reporting.html.markup import Card
from leakwatch.reporting.ledger.rows import status_reason, status_word
from leakwatch.reporting.ledger.table import LedgerTable
from leakwatch.reporting.quantities import knows
from leakwatch.reporting.run_facts import RunFacts, noise_words
from leakwatch.reporting.statistics.headline import Headline
from leakwatch.reporting.words import (
    CLEARLY_ABOVE,
    HARDLY_BELOW,
    count,
    decibels,
    least,
    moment_words,
    number,
    psnr_level,
    psnr_words,
)

__all__ = ["Lead", "Strip", "make_cards", "make_lead", "make_strip"]


class Rated(NamedTuple):
    """A PSNR in words, and its level of exposure."""

    text: str
    level: str


@final
@dataclass(frozen=True)
class Lead:
    """The sentence that sums the run up.

    Attributes:
        recorded: Whether anything was.
        when: Of the last probe; empty where the run predicts no PSNR.
        unknown: Why nothing is known; empty where something is.
        assumed: Noise that the prediction assumes, in words.
        exposing: The message that an attacker sees.
        worst: Most exposed sample.
        median: Typical sample.
    """

    recorded: bool
    when: str = ""
    unknown: str = ""
    assumed: str = ""
    exposing: str = ""
    knows: str = ""
    worst: Rated | None = None
    median: Rated | None = None


def make_lead(table: LedgerTable, headline: Headline | None, facts: RunFacts) -> Lead:
    """Return the sentence that sums the run up, with the noise that it assumes.

    Args:
        table: The run.
        headline: The predicted PSNR, if the run predicts one.
        facts: Of the run.
    """
    if headline is None:
        return Lead(recorded=bool(table.moments))
    summary = headline.summary
    return Lead(
        recorded=True,
        when=moment_words(headline.moment),
        unknown="" if summary.used else summary.reason,
        assumed=noise_words(facts.noise_std, facts.message),
        exposing=facts.message.exposing,
        knows=knows(headline.quantity, facts.prior),
        worst=_rated(summary.worst, summary.bounds > 0, summary.worst_estimated),
        median=_rated(summary.median, summary.bounds > 0, summary.median_estimated),
    )


def _rated(psnr: float, bound: bool, estimated: bool) -> Rated:
    text = f"{least(decibels(psnr), bound, estimated)}: {psnr_words(psnr, bound)}"
    return Rated(text, psnr_level(psnr))


def make_cards(
    table: LedgerTable,
    headline: Headline | None,
    facts: RunFacts,
    pictures: Mapping[int, str],
) -> list[Card]:
    """Return the row of cards: the headline's numbers, then the cost."""
    cards = [] if headline is None else _predicted(headline, facts, pictures)
    return [*cards, *_cost(table)]


def _predicted(
    headline: Headline, facts: RunFacts, pictures: Mapping[int, str]
) -> list[Card]:
    summary, column = headline.summary, headline.column
    about, picture = summary.reason, ""
    if summary.worst_sample is not None:
        sample = summary.worst_sample
        picture = pictures.get(sample, "")
        label = column.labels[column.samples.index(sample)]
        about = f"predicted PSNR of sample #{sample}"
        about += "" if label is None else f", {facts.class_label(label)}"
    change = "one probe so far"
    if math.isfinite(headline.change):
        direction = "more" if headline.change > 0 else "less"
        change = f"{abs(headline.change):.1f} dB {direction} than at the first probe"
        if headline.compared < summary.count:
            change += f", of {count(headline.compared, 'sample')}"
        if headline.change_of_bounds:
            change += ", by bounds, which may hide another change"
    elif headline.probes > 1:
        change = "no comparison with the first probe"
    unknown, bound = summary.count - summary.used, summary.bounds > 0
    clearly = f"{headline.clearly} of {summary.used}"
    if headline.clearly < summary.used:
        clearly = least(clearly, bound)
    cards = [
        Card(
            "Most exposed sample",
            least(decibels(summary.worst), bound, summary.worst_estimated),
            about,
            psnr_level(summary.worst),
            picture,
        ),
        Card(
            "Typical sample (median)",
            least(decibels(summary.median), bound, summary.median_estimated),
            f"predicted PSNR; {change}",
            psnr_level(summary.median),
        ),
        Card(
            f"Predicted over {CLEARLY_ABOVE:.0f} dB",
            clearly if summary.used else "not known",
            "samples clearly recognisable"
            + (f"; {unknown} not known" if unknown else ""),
            "" if summary.used else "unknown",
        ),
    ]
    if headline.peak_moment is not None:
        when = moment_words(headline.peak_moment)
        words = f"highest predicted PSNR of any sample, {when}"
        level = psnr_level(headline.peak)
        peak = least(
            decibels(headline.peak), headline.peak_bound, headline.peak_estimated
        )
        cards.append(Card("Worst moment", peak, words, level))
    return cards


def _cost(table: LedgerTable) -> list[Card]:
    seconds = [row.value for row in table.of_run("seconds").values() if row.usable]
    if not seconds:
        return []
    fractions = list(table.of_run("time_fraction").values())
    shares = [row.value for row in fractions if row.usable]
    total = f"{number(math.fsum(seconds))} s in {count(len(seconds), 'probe step')}"
    if shares:
        total = f"of all time from the start of training to this probe; {total}"
        return [Card("Cost of watching", f"{shares[-1]:.1%}", total)]
    share = "share of training not recorded"
    if fractions and status_word(fractions[-1].status) == "undefined":
        reason = status_reason(fractions[-1].status) or "not defined yet"
        share = f"share of training: {reason}"
    return [Card("Cost of watching", total, share)]


class Zone(NamedTuple):
    """A part of the scale: its level of exposure and its width in percent."""

    level: str
    width: float


class Mark(NamedTuple):
    """A place on the scale in percent, with its words."""

    left: float
    text: str


class Dot(NamedTuple):
    """A sample on the scale: percent from the left, pixels from the top."""

    left: float
    top: int
    text: str


@final
@dataclass(frozen=True)
class Strip:
    """The scale of decibels on which every sample is a dot.

    Attributes:
        range: Of the scale, in words.
        zones: From hardly to clearly recognisable.
        marks: The two borders between them.
        dots: One for each sample with a usable value.
        median: Percent from the left.
        bounds: How many dots may belong further to the right.
        guess: A blind guess, where it is known and on the scale.
    """

    range: str
    zones: tuple[Zone, ...]
    marks: tuple[Mark, Mark]
    dots: tuple[Dot, ...]
    median: float
    bounds: int
    guess: Mark | None


def make_strip(headline: Headline | None, facts: RunFacts) -> Strip | None:
    """Return the strip on which every sample is a dot on the decibel scale.

    Args:
        headline: What to show; None, or nothing usable in it, gives None.
        facts: Of the run: the floor is drawn where it is known.
    """
    if headline is None or not headline.summary.used:
        return None
    column, values = headline.column, headline.column.usable_values
    finite = values[np.isfinite(values)]
    low, high, more = 5.0, 35.0, ""
    if finite.size:
        low = max(min(low, math.floor(float(finite.min()) / 5) * 5), -10.0)
        high = min(max(high, math.ceil(float(finite.max()) / 5) * 5), 80.0)
        more = " and more" if float(finite.max()) > high else ""

    def place(value: float) -> float:
        return 100.0 * (min(max(value, low), high) - low) / (high - low)

    guess = None
    if facts.floor is not None and low < facts.floor < high:
        guess = Mark(place(facts.floor), decibels(facts.floor))
    first, second = place(HARDLY_BELOW), place(CLEARLY_ABOVE)
    return Strip(
        range=f"{low:.0f} to {high:.0f} dB{more}",
        zones=(
            Zone("low", first),
            Zone("middle", second - first),
            Zone("high", 100.0 - second),
        ),
        marks=(
            Mark(first, f"{HARDLY_BELOW:.0f} dB"),
            Mark(second, f"{CLEARLY_ABOVE:.0f} dB"),
        ),
        dots=tuple(
            Dot(
                place(one.value),
                12 + 11 * (turn % 3),
                f"#{sample}, {facts.class_label(label)}: "
                f"{least(decibels(one.value), one.bound, one.estimated)}",
            )
            for turn, (one, sample, label) in enumerate(
                zip(column, column.samples, column.labels, strict=True)
            )
            if one.usable
        ),
        median=place(headline.summary.median),
        bounds=headline.summary.bounds,
        guess=guess,
    )
