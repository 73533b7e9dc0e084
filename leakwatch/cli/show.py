"""``leakwatch show`` and ``leakwatch compare``: recorded runs as text or tables."""

from __future__ import annotations

import argparse
import sys
import textwrap
from pathlib import Path

from leakwatch.cli.report import RUN, take_run
from leakwatch.cli.tables import WIDTH, run_table
from leakwatch.reporting import LedgerTable, RiskLedger, write_comparison
from leakwatch.reporting.html.conclusions import conclude
from leakwatch.reporting.run_facts import RunFacts
from leakwatch.reporting.statistics.headline import find_headline
from leakwatch.reporting.statistics.runs import audits_beside, incomparable, read_runs
from leakwatch.reporting.words import (
    CLEARLY_ABOVE,
    NO_RANKS,
    aligned,
    decibels,
    sign_of_bound,
)


def show(argv: list[str]) -> None:
    """Print what a run came to.

    Args:
        argv: Command line after ``leakwatch show``.

    Raises:
        argparse.ArgumentError: RUN is a file.
        FileNotFoundError: There is no run, or more than one.
    """
    parser = argparse.ArgumentParser(
        prog="leakwatch show",
        description="Print what a recorded run came to: a line for each probe step, "
        "and conclusions.",
    )
    parser.add_argument("run", metavar="RUN", help=RUN)
    run = take_run(parser.parse_args(argv).run, "shown", sys.stdout)
    print(run_table(run))
    ledger = RiskLedger.open(run)
    table, metadata = LedgerTable.from_rows(ledger.rows()), ledger.read_metadata()
    facts, beside = RunFacts.of(metadata), audits_beside(ledger)
    found = conclude(table, find_headline(table), facts, metadata, beside)
    for text in facts.training:
        print("\n" + textwrap.fill(f"read with care: {text}", WIDTH))
    for item in found:
        print(f"\n{item.question}")
        print(textwrap.indent(textwrap.fill(item.answer, WIDTH - 2), "  "))


def compare(argv: list[str]) -> None:
    """Print the last probe steps of several runs side by side.

    Args:
        argv: Command line after ``leakwatch compare``.

    Raises:
        argparse.ArgumentError: One of them is a file.
        FileNotFoundError: One of them is no run.
        ValueError: A page of fewer than two runs.
        ModuleNotFoundError: A page needs plotly and Jinja2.
    """
    parser = argparse.ArgumentParser(
        prog="leakwatch compare",
        description="Print the last predicted PSNR of several recorded runs, the most "
        "exposed first. Runs are comparable where quantity, noise and samples agree; "
        "what differs is said.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help=RUN)
    parser.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="write a page that shows them side by side, such as runs.html",
    )
    asked = parser.parse_args(argv)
    directories = [take_run(run) for run in asked.runs]
    runs = read_runs(directories)
    above = f"above {CLEARLY_ABOVE:g} dB"
    grid = [["run", "epoch", "median", "worst", above, "not known"]]
    for run in runs:
        if run.headline is None:
            grid.append([run.label, "–", "not known", "not known", "–", "all"])
            continue
        summary = run.headline.summary
        grid.append(
            [
                run.label,
                str(run.headline.moment.epoch),
                sign_of_bound(
                    decibels(summary.median),
                    run.bound,
                    estimated=summary.median_estimated,
                ),
                sign_of_bound(
                    decibels(summary.worst),
                    run.bound,
                    estimated=summary.worst_estimated,
                ),
                sign_of_bound(
                    f"{run.headline.clearly} of {summary.used}",
                    run.bound and run.headline.clearly < summary.used,
                ),
                str(summary.count - summary.used),
            ]
        )
    print(aligned(grid))
    if any(run.bound for run in runs):
        print(f"\n{NO_RANKS}")
    differ = incomparable(runs)
    if differ:
        print(f"\nread with care: these runs differ in {', '.join(differ)}")
    if asked.html is not None:
        print(f"\npage: {write_comparison(directories, asked.html)}")
