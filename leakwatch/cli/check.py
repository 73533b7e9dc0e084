"""``leakwatch check``: whether a recorded run holds limits, as an exit code."""

from __future__ import annotations

import argparse
import math
import sys
from typing import Final

from leakwatch.cli.report import find_run
from leakwatch.reporting import LedgerTable, RiskLedger, quantities_from_metadata
from leakwatch.reporting.quantities import class_names_from_metadata
from leakwatch.reporting.statistics.gate import Limits
from leakwatch.reporting.statistics.scalars import PREFIX

#: Exit status of a run that breaks a limit; 1 and 2 say that nothing was checked.
BROKEN: Final = 3


def check(argv: list[str]) -> None:
    """Check a run, print what it breaks, and end with a status for other programs.

    Args:
        argv: Command line after ``leakwatch check``.

    Raises:
        SystemExit: With `BROKEN`, if a limit is broken.
        FileNotFoundError: There is no run, or more than one.
        ValueError: Nothing was asked for.
    """
    parser = argparse.ArgumentParser(
        prog="leakwatch check",
        description="Check a recorded run against limits, at every probe step. Exit "
        f"status: 0 all hold, {BROKEN} one is broken, 1 or 2 nothing was checked. A "
        "value without a number breaks its limit and that of its class, and so does a "
        "damaged record: unknown is not safe.",
    )
    parser.add_argument("run", metavar="RUN", help="as for `leakwatch report`")
    parser.add_argument(
        "--max-psnr",
        type=_decibels,
        metavar="DB",
        help="that no sample exceeds, predicted or achieved by an attack",
    )
    parser.add_argument(
        "--share",
        type=_share,
        default=0.0,
        metavar="S",
        help="of samples that may exceed it all the same, from 0 to 1",
    )
    parser.add_argument(
        "--max-class-psnr",
        type=_decibels,
        metavar="DB",
        help="for the mean of each class",
    )
    for option, end in (("--at-most", "highest"), ("--at-least", "lowest")):
        parser.add_argument(
            option,
            type=_limit,
            action="append",
            default=[],
            metavar="KEY=VALUE",
            help=f"{end} value of a log key, such as {PREFIX}/time_fraction=0.1",
        )
    parser.add_argument("--last", action="store_true", help="only the last probe step")
    parser.add_argument(
        "--unknown-passes", action="store_true", help="values without a number hold"
    )
    asked = parser.parse_args(argv)
    limits = Limits(
        asked.max_psnr,
        asked.share,
        asked.max_class_psnr,
        dict(asked.at_most),
        dict(asked.at_least),
        asked.unknown_passes,
    )
    if not limits.any:
        raise ValueError("nothing to check; say what must hold, such as --max-psnr 25.")
    broken = _broken(find_run(asked.run), limits, last=asked.last)
    if broken:
        print("\n".join(broken), file=sys.stderr)
        raise SystemExit(BROKEN)
    print("all limits hold")


def _broken(run: object, limits: Limits, *, last: bool) -> list[str]:
    ledger = RiskLedger.open(str(run))
    metadata = ledger.read_metadata()
    quantities = quantities_from_metadata(metadata)
    names = class_names_from_metadata(metadata)
    config = metadata.get("config")
    prefix = config.get("name", PREFIX) if isinstance(config, dict) else PREFIX
    rows = ledger.rows()
    moments = LedgerTable.from_rows(rows).moments
    # Where nothing was recorded there is one step without rows.
    steps = [
        [row for row in rows if (row.epoch, row.step) == moment] for moment in moments
    ]
    # What they said that are lost is unknown.
    lost = [] if limits.unknown_passes else list(ledger.damage)
    return lost + [
        sentence
        for step in (steps[-1:] if last else steps) or [[]]
        for sentence in limits.broken(step, quantities, names, prefix=prefix)
    ]


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to below 1")
    return value


def _decibels(text: str) -> float:
    # Nothing is above a limit that is no number.
    if not math.isfinite(value := float(text)):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number")
    return value


def _limit(text: str) -> tuple[str, float]:
    key, mark, value = text.rpartition("=")
    try:
        return key, _decibels(value if mark and key else "none")
    except (ValueError, argparse.ArgumentTypeError):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not KEY=VALUE, such as {PREFIX}/time_fraction=0.1"
        ) from None
