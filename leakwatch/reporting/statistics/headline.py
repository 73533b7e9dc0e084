"""The one number on top of every view: predicted PSNR of the most exposed sample."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median
from typing import final

from leakwatch.reporting.ledger.table import Column, LedgerTable, LedgerValue, Moment
from leakwatch.reporting.quantities import HEADLINES
from leakwatch.reporting.statistics.aggregates import Summary, summarize
from leakwatch.reporting.words import CLEARLY_ABOVE


@final
@dataclass(frozen=True)
class Headline:
    """Predicted PSNR at the last probe of a run, and the run's worst moment.

    Args:
        quantity: one of :data:`leakwatch.reporting.quantities.HEADLINES`.
        moment: The last probe.
        probes: At how many moments it was recorded.
        column: Its values, in dB.
        summary: Their summary; NaN with a reason if none is usable.
        change: Median now minus median at the first probe, in dB, of the samples that
            have a number at both; NaN where none has, and for one probe.
        peak: Highest predicted PSNR of any sample at any probe, in dB.
        peak_moment: When that was.
        clearly: How many samples lie above the "clearly recognisable" line.
        peak_bound: Whether ``peak`` may be more.
        peak_estimated: Whether it is an estimate.
        change_of_bounds: Whether one of the medians of ``change`` may be more.
        compared: How many samples ``change`` is about.
        last_change: As ``change``, since the probe before; NaN for two probes.
        worst_before: What the sample that is most exposed now was at the first probe;
            None where there was one probe only, or no sample is.
    """

    quantity: str
    moment: Moment
    probes: int
    column: Column
    summary: Summary
    change: float
    peak: float
    peak_moment: Moment | None
    clearly: int
    peak_bound: bool = False
    peak_estimated: bool = False
    change_of_bounds: bool = False
    compared: int = 0
    last_change: float = math.nan
    worst_before: LedgerValue | None = None


def find_headline(table: LedgerTable) -> Headline | None:
    """Return the headline of a run, or None if it predicts no PSNR.

    The Bayesian prediction goes first; where it has no usable value at its last
    probe and the plain one has, the plain one stands in.
    """
    headlines = [h for name in HEADLINES if (h := _headline(table, name)) is not None]
    usable = [headline for headline in headlines if headline.summary.used]
    return next(iter([*usable, *headlines]), None)


def _headline(table: LedgerTable, name: str) -> Headline | None:
    last = table.last(name)
    if last is None:
        return None
    moment, column = last
    moments = table.moments_of(name)
    summaries = [summarize(table.columns[when, name], sign=1) for when in moments]
    peaks = [pair for pair in zip(summaries, moments, strict=True) if pair[0].used]
    highest, peak_moment = max(
        peaks, key=lambda pair: pair[0].worst, default=(summaries[-1], None)
    )
    change, compared, of_bounds = math.nan, 0, False
    if len(moments) > 1:
        change, compared, of_bounds = _change(column, table.columns[moments[0], name])
    worst, first = summaries[-1].worst_sample, table.columns[moments[0], name]
    return Headline(
        quantity=name,
        moment=moment,
        probes=len(moments),
        column=column,
        summary=summaries[-1],
        change=change,
        peak=highest.worst,
        peak_moment=peak_moment,
        clearly=int((column.values[column.usable] > CLEARLY_ABOVE).sum()),
        peak_bound=highest.bounds > 0,
        peak_estimated=highest.worst_estimated,
        change_of_bounds=of_bounds,
        compared=compared,
        last_change=(
            _change(column, table.columns[moments[-2], name])[0]
            if len(moments) > 2
            else math.nan
        ),
        worst_before=(
            None if worst is None or len(summaries) == 1 else first.at(worst)
        ),
    )


def _change(now: Column, before: Column) -> tuple[float, int, bool]:
    """Change of the median, how many samples it is about, whether some are bounds."""
    pairs = [(now.at(sample), before.at(sample)) for sample in now.samples]
    pairs = [(a, b) for a, b in pairs if a.usable and b.usable]
    if not pairs:
        return math.nan, 0, False
    change = median(a.value for a, _ in pairs) - median(b.value for _, b in pairs)
    return change, len(pairs), any(a.bound or b.bound for a, b in pairs)
