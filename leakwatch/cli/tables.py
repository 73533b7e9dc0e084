"""What a run found, as a few lines of text."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from leakwatch.reporting import (
    Column,
    LedgerTable,
    Moment,
    RiskLedger,
    Summary,
    summarize,
)
from leakwatch.reporting.quantities import class_name, describe
from leakwatch.reporting.run_facts import RunFacts, held_for
from leakwatch.reporting.statistics.achieved import KINDS, achieved, audits
from leakwatch.reporting.statistics.aggregates import describe_counts
from leakwatch.reporting.statistics.headline import find_headline
from leakwatch.reporting.words import number, sign_of_bound

_MISSING = "–"
WIDTH = 88


def run_table(
    run: str | Path, accuracy: tuple[str, Mapping[int, float]] | None = None
) -> str:
    """Summarise a run: one line per probe step.

    Args:
        run: Run directory.
        accuracy: Name of a metric and its values by completed epochs.

    Returns:
        Text of several lines; of a run that predicts no PSNR, `score_table`.

    Raises:
        FileNotFoundError: There is no recorded run.
    """
    ledger = RiskLedger.open(run)
    table = LedgerTable.from_rows(ledger.rows())
    headline = find_headline(table)
    if headline is None:
        return score_table(run)
    facts = RunFacts.of(ledger.read_metadata())
    names, shared = facts.class_names, facts.message.noun
    header = ["epoch", "median", "worst", "worst sample"]
    attacks = [
        (kind, f"{kind} attack")
        for kind in KINDS
        if f"audit/{kind}/psnr" in table.quantities
    ]
    header += [words for _, words in attacks]
    if accuracy is not None:
        header.append(accuracy[0])
    lines, notes = [], []
    for moment in table.moments_of(headline.quantity):
        column = table.columns[moment, headline.quantity]
        summary = summarize(column, sign=1)
        cells = [
            str(moment.epoch),
            _decibels(summary.median, summary.bounds > 0, summary.median_estimated),
            _decibels(summary.worst, summary.bounds > 0, summary.worst_estimated),
            _worst(summary, column, names),
        ]
        cells += [_achieved(table, moment, kind) for kind, _ in attacks]
        if accuracy is not None:
            value = accuracy[1].get(moment.epoch, math.nan)
            cells.append(_MISSING if math.isnan(value) else f"{value:.3f}")
        lines.append(cells)
        if summary.bounds:
            notes.append(
                f"epoch {moment.epoch}: {summary.bounds} of {summary.used} are lower "
                "bounds; which sample is worst is not sure"
            )
        if summary.excluded:
            notes.append(f"epoch {moment.epoch}: {_excluded(summary)}")
    title = (
        f"Predicted PSNR of an attack on a shared {shared}, dB "
        f"(higher = more exposed; {headline.quantity}):"
    )
    if attacks:
        title = (
            f"PSNR of attacks on a shared {shared}, dB (higher = more exposed): "
            f"predicted ({headline.quantity}), and the median that conclusive attacks "
            "achieved:"
        )
        notes += _unclear(table, [kind for kind, _ in attacks])
    grid = [title, "", *_align(header, lines), *_indent(notes)]
    return "\n".join([*grid, *_held_for(facts, headline.quantity)])


def score_table(run: str | Path) -> str:
    """Summarise the last probe step of a run: one line per quantity.

    Args:
        run: Run directory.

    Raises:
        FileNotFoundError: There is no recorded run.
    """
    ledger = RiskLedger.open(run)
    facts = RunFacts.of(ledger.read_metadata())
    quantities, names = facts.quantities, facts.class_names
    table = LedgerTable.from_rows(ledger.rows())
    if not table.moments:
        return "Nothing has been recorded."
    moment: Moment = table.moments[-1]
    lines = []
    for quantity in table.quantities:
        column = table.columns.get((moment, quantity))
        if column is None:
            continue
        described = describe(quantity, quantities)
        summary = summarize(column, described.sign)
        lines.append(
            [
                quantity,
                *(
                    _number(value, summary.bounds > 0, described.sign, estimated)
                    for value, estimated in (
                        (summary.median, summary.median_estimated),
                        (summary.worst, summary.worst_estimated),
                    )
                ),
                _worst(summary, column, names),
                _excluded(summary) if summary.excluded else "",
            ]
        )
    header = ["score", "median", "worst", "worst sample", ""]
    headline = find_headline(table)
    held = _held_for(facts, None if headline is None else headline.quantity)
    return "\n".join([*_align(header, lines), *held])


def say_where(saved: Path) -> None:
    """Print where a study is: its report, or its tables where there is none.

    Args:
        saved: What saving the study returned.
    """
    if saved.suffix == ".html":
        print(f"report: {saved}")
    else:
        print(
            f"recorded in: {saved.parent}; no report: it needs plotly, "
            "pip install jinja2 plotly pandas"
        )


def _achieved(table: LedgerTable, moment: Moment, kind: str) -> str:
    outcome = achieved(table, moment, kind)
    return _decibels(math.nan if outcome is None else outcome.median)


def _unclear(table: LedgerTable, kinds: Sequence[str]) -> list[str]:
    """One note for each audit with attacks that say nothing."""
    return [
        f"epoch {moment.epoch}: the {kind} attack was inconclusive on "
        f"{outcome.inconclusive} of {outcome.attacked} samples, which shows no safety"
        for moment in audits(table)
        for kind in kinds
        if (outcome := achieved(table, moment, kind)) is not None
        and outcome.inconclusive
    ]


def _decibels(value: float, bound: bool = False, estimated: bool = False) -> str:
    if math.isnan(value):
        return _MISSING
    return sign_of_bound(f"{value:.1f}", bound, estimated=estimated)


def _number(value: float, bound: bool, sign: int, estimated: bool) -> str:
    if math.isnan(value):
        return _MISSING
    return sign_of_bound(number(value), bound, sign, estimated=estimated)


def _worst(summary: Summary, column: Column, names: Sequence[str] | None) -> str:
    if summary.worst_sample is None:
        return _MISSING
    label = column.labels[column.samples.index(summary.worst_sample)]
    of_class = "" if label is None else f" (class {class_name(label, names)})"
    return f"{summary.worst_sample}{of_class}"


def _excluded(summary: Summary) -> str:
    return f"{describe_counts(summary.excluded)} of {summary.count}"


def _held_for(facts: RunFacts, headline: str | None) -> list[str]:
    sentence = held_for(facts, headline)
    return ["", *textwrap.wrap(sentence, WIDTH)] if sentence else []


def _indent(notes: Sequence[str]) -> list[str]:
    return ["", *(f"  {note}" for note in notes)] if notes else []


def _align(header: list[str], lines: list[list[str]]) -> list[str]:
    rows = [header, *lines]
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    # Names to the left, numbers to the right.
    left = [i == 0 or name in ("worst sample", "") for i, name in enumerate(header)]
    return [
        "  "
        + "  ".join(
            cell.ljust(width) if flush else cell.rjust(width)
            for cell, width, flush in zip(row, widths, left, strict=True)
        ).rstrip()
        for row in rows
    ]
