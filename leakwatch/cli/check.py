"""``leakwatch check``: whether a recorded run holds limits, as an exit code."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Final, Self, final

from leakwatch.cli.report import RUN, find_runs
from leakwatch.names import meant
from leakwatch.reporting import LedgerTable, RiskLedger, Row
from leakwatch.reporting.run_facts import RunFacts, held_for
from leakwatch.reporting.statistics.gate import Limits
from leakwatch.reporting.statistics.headline import find_headline
from leakwatch.reporting.statistics.scalars import PREFIX, log_scalars

#: Exit status of a run that breaks a limit; 1 and 2 say that nothing was checked.
BROKEN: Final = 3

# What follows the name of a callback in its log keys.
_GROUPS: Final = ("/", "-class/", "-detail/")


def check(argv: list[str]) -> None:
    """Check runs, print what they break, and end with a status for other programs.

    Args:
        argv: Command line after ``leakwatch check``.

    Raises:
        SystemExit: With `BROKEN`, if a limit is broken.
        argparse.ArgumentError: RUN is a file, or no record has a key.
        FileNotFoundError: There is no run.
        ValueError: Nothing was asked for.
    """
    parser = argparse.ArgumentParser(
        prog="leakwatch check",
        description="Check every record in a folder against limits, at every probe "
        f"step. Exit status: 0 all hold, {BROKEN} one is broken, 1 or 2 nothing was "
        "checked. A value without a number breaks its limit and that of its class, and "
        "so does a damaged record: unknown is not safe. A log key is looked up in the "
        "records of the callback whose name it begins with.",
    )
    parser.add_argument(
        "run", metavar="RUN", help=f"{RUN}; every record below it is judged"
    )
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
    records = [_Record.read(run) for run in find_runs(asked.run)]
    for key in (*limits.at_most, *limits.at_least):
        _check_key(key, records)
    broken = []
    for record in records:
        own = record.own(limits)
        print(f"{'judged' if own.any else 'no limit concerns'}: {record.directory}")
        if not own.any:
            continue
        if record.held_for:
            print(f"  {record.held_for}")
        for text in record.facts.training:
            print(f"  read with care: {text}")
        which = f"{record.directory}: " if len(records) > 1 else ""
        broken += [which + text for text in record.broken(own, last=asked.last)]
    if broken:
        # What was judged stands above what is wrong with it.
        sys.stdout.flush()
        print("\n".join(broken), file=sys.stderr)
        raise SystemExit(BROKEN)
    print("all limits hold")


@final
@dataclass(frozen=True)
class _Record:
    """A recorded run, and the log keys that it has.

    Attributes:
        directory: Where it is.
        rows: All that it holds.
        damage: What is lost of it.
        facts: Of the run.
        prefix: Of its log keys.
    """

    directory: Path
    rows: Sequence[Row]
    damage: Sequence[str]
    facts: RunFacts
    prefix: str

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Read a run directory."""
        ledger = RiskLedger.open(directory)
        metadata, rows = ledger.read_metadata(), ledger.rows()
        config = metadata.get("config")
        name = config.get("name", PREFIX) if isinstance(config, dict) else PREFIX
        facts = RunFacts.of(metadata)
        return cls(directory, rows, ledger.damage, facts, str(name))

    @property
    def held_for(self) -> str:
        """For which noise and attacker its predictions hold."""
        headline = find_headline(LedgerTable.from_rows(self.rows))
        return held_for(self.facts, None if headline is None else headline.quantity)

    @cached_property
    def recorded(self) -> Mapping[str, float]:
        """The log keys of all its steps; the numbers are those of none."""
        return self._keys([replace(row, epoch=0, step=0) for row in self.rows])

    def has(self, key: str) -> bool:
        """Whether it has a log key, or may have lost it, or failed to measure it."""
        if not self.rows or self.damage or key in self.recorded:
            return True
        nothing = [
            Row(0, 0, sample, None, quantity, math.nan, "failed: not recorded")
            for quantity in self.facts.quantities
            for sample in (0, None)
        ]
        return key in self._keys(nothing)

    def concerns(self, key: str) -> bool:
        """Whether the callback that recorded it would have logged a key."""
        return key.startswith(tuple(f"{self.prefix}{end}" for end in _GROUPS))

    def own(self, limits: Limits) -> Limits:
        """The limits without those on keys of other callbacks."""
        at_most, at_least = (
            {key: value for key, value in keys.items() if self.concerns(key)}
            for keys in (limits.at_most, limits.at_least)
        )
        return replace(limits, at_most=at_most, at_least=at_least)

    def broken(self, limits: Limits, *, last: bool) -> list[str]:
        """One sentence for each limit that it breaks."""
        # Where nothing was recorded there is one step without rows.
        steps = [
            [row for row in self.rows if (row.epoch, row.step) == moment]
            for moment in LedgerTable.from_rows(self.rows).moments
        ]
        facts = self.facts
        # What they said that are lost is unknown.
        lost = [] if limits.unknown_passes else list(self.damage)
        return lost + [
            sentence
            for step in (steps[-1:] if last else steps) or [[]]
            for sentence in limits.broken(
                step, facts.quantities, facts.class_names, prefix=self.prefix
            )
        ]

    def _keys(self, rows: Sequence[Row]) -> Mapping[str, float]:
        facts = self.facts
        return log_scalars(
            rows, facts.quantities, facts.class_names, prefix=self.prefix
        )


def _check_key(key: str, records: Sequence[_Record]) -> None:
    """Refuse a key that no record has: a slip must not look like a broken limit."""
    if any(record.concerns(key) and record.has(key) for record in records):
        return
    # A key may also lack the name of its callback.
    near = next(
        filter(
            None,
            (
                meant(name, record.recorded)
                for record in records
                for name in (key, f"{record.prefix}/{key}")
            ),
        ),
        "",
    )
    several = f"these {len(records)} records" if len(records) > 1 else "this record"
    has = [name for record in records for name in record.recorded]
    hint = near.strip() or f"there are {', '.join(has[:4])}, …"
    raise argparse.ArgumentError(None, f"no key {key!r} in {several}; {hint}")


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
