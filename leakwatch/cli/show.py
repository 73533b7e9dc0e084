"""``leakwatch show`` and ``leakwatch compare``: recorded runs as text or tables."""

from __future__ import annotations

import argparse
import math
import textwrap
from pathlib import Path

from leakwatch.cli.report import find_run
from leakwatch.cli.tables import run_table
from leakwatch.reporting import LedgerTable, RiskLedger
from leakwatch.reporting.html.conclusions import conclude
from leakwatch.reporting.run_facts import RunFacts
from leakwatch.reporting.statistics.headline import Headline, find_headline
from leakwatch.reporting.words import CLEARLY_ABOVE, aligned, decibels

_WIDTH = 88


def show(argv: list[str]) -> None:
    """Print what a run came to, or write its ledger as one table.

    Args:
        argv: Command line after ``leakwatch show``.

    Raises:
        FileNotFoundError: There is no run, or more than one.
        ModuleNotFoundError: A table needs pandas, and Parquet pyarrow.
        ValueError: For a table of another kind.
    """
    parser = argparse.ArgumentParser(
        prog="leakwatch show",
        description="Print what a recorded run came to: a line for each probe step, "
        "and conclusions. With --to, write every value into one table instead.",
    )
    parser.add_argument("run", metavar="RUN", help="as for `leakwatch report`")
    parser.add_argument(
        "--to", type=Path, metavar="FILE", help="such as values.csv or values.parquet"
    )
    asked = parser.parse_args(argv)
    run = find_run(asked.run)
    if asked.to is not None:
        _write(run, asked.to)
        return
    print(run_table(run))
    ledger = RiskLedger.open(run)
    table, metadata = LedgerTable.from_rows(ledger.rows()), ledger.read_metadata()
    found = conclude(table, find_headline(table), RunFacts.of(metadata), metadata)
    for item in found:
        print(f"\n{item.question}")
        print(textwrap.indent(textwrap.fill(item.answer, _WIDTH - 2), "  "))


def compare(argv: list[str]) -> None:
    """Print the last probe steps of several runs side by side.

    Args:
        argv: Command line after ``leakwatch compare``.

    Raises:
        FileNotFoundError: One of them is no run.
    """
    parser = argparse.ArgumentParser(
        prog="leakwatch compare",
        description="Print the last predicted PSNR of several recorded runs, the most "
        "exposed first. Runs are comparable where quantity, noise and samples agree; "
        "what differs is said.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="as for `report`")
    runs = [find_run(run) for run in parser.parse_args(argv).runs]
    entries = []
    for run in runs:
        ledger = RiskLedger.open(run)
        headline = find_headline(LedgerTable.from_rows(ledger.rows()))
        entries.append((run, headline, ledger.read_metadata()))
    # What is not known is not safe: it goes on top.
    entries.sort(key=lambda entry: -_worst(entry[1]))
    grid = [
        ["run", "epoch", "median", "worst", f"above {CLEARLY_ABOVE:g} dB", "not known"]
    ]
    for run, headline, _ in entries:
        if headline is None:
            grid.append([str(run), "–", "not known", "not known", "–", "all"])
            continue
        summary = headline.summary
        grid.append(
            [
                str(run),
                str(headline.moment.epoch),
                decibels(summary.median),
                decibels(summary.worst),
                f"{headline.clearly} of {summary.used}",
                str(summary.count - summary.used),
            ]
        )
    print(aligned(grid))
    facts = [
        {
            "quantity": None if headline is None else headline.quantity,
            "noise_std": (metadata.get("config") or {}).get("noise_std"),
            "samples": metadata.get("probes_fingerprint"),
        }
        for _, headline, metadata in entries
    ]
    differ = [key for key in facts[0] if len({str(fact[key]) for fact in facts}) > 1]
    if differ:
        print(f"\nread with care: these runs differ in {', '.join(differ)}")


def _worst(headline: Headline | None) -> float:
    worst = math.nan if headline is None else headline.summary.worst
    return math.inf if math.isnan(worst) else worst


def _write(run: Path, file: Path) -> None:
    if file.suffix not in (".csv", ".parquet"):
        raise ValueError(f"--to takes a .csv or .parquet file, got {file}.")
    frame = RiskLedger.open(run).to_dataframe()
    if file.suffix == ".csv":
        frame.to_csv(file, index=False)
    else:
        try:
            frame.to_parquet(file, index=False)
        except ImportError as error:
            raise ModuleNotFoundError(
                "Parquet needs pyarrow, which is not installed: pip install pyarrow",
                name="pyarrow",
            ) from error
    print(f"{len(frame)} values: {file}")
