"""Several recorded runs beside each other: what each came to, and where they differ."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from leakwatch.reporting.ledger.ledger import RiskLedger
from leakwatch.reporting.ledger.table import LedgerTable
from leakwatch.reporting.run_facts import RunFacts
from leakwatch.reporting.statistics.achieved import KINDS, Achieved, achieved, audits
from leakwatch.reporting.statistics.headline import Headline, find_headline

__all__ = ["RecordedRun", "audits_beside", "incomparable", "read_runs"]


@final
@dataclass(frozen=True, eq=False)
class RecordedRun:
    """A run as a comparison shows it.

    Attributes:
        label: What tells it from the others; all labels are different.
        ledger: Its record.
        table: All that was recorded.
        metadata: Content of its ``run.json``.
        facts: Of the run.
        headline: Its predicted PSNR, if it predicts one.
        attacks: What the latest audit achieved, by kind of start.
    """

    label: str
    ledger: RiskLedger
    table: LedgerTable
    metadata: Mapping[str, Any]
    facts: RunFacts
    headline: Headline | None
    attacks: Mapping[str, Achieved]

    @property
    def worst(self) -> float:
        """Predicted PSNR of the most exposed sample, dB; infinite where not known."""
        worst = math.nan if self.headline is None else self.headline.summary.worst
        return math.inf if math.isnan(worst) else worst

    @property
    def bound(self) -> bool:
        """Whether it exposes at least what is predicted, and maybe more."""
        return self.headline is not None and self.headline.summary.bounds > 0


def read_runs(directories: Sequence[str | Path]) -> list[RecordedRun]:
    """Read runs, the most exposed first; what is not known is not safe: on top.

    Args:
        directories: Of the runs; one that is named twice is read once.

    Raises:
        FileNotFoundError: If one of them is no run.
    """
    paths = list(dict.fromkeys(Path(directory) for directory in directories))
    runs = [
        _read(path, label) for path, label in zip(paths, _labels(paths), strict=True)
    ]
    return sorted(runs, key=lambda run: -run.worst)


def audits_beside(ledger: RiskLedger) -> list[str]:
    """Name the folders beside a record that hold attacks on the same network.

    Args:
        ledger: The record.
    """
    mine = _network(ledger)
    found = []
    for file in sorted(ledger.directory.absolute().parent.glob("*/run.json")):
        if file.parent == ledger.directory.absolute() or mine is None:
            continue
        try:
            with warnings.catch_warnings():
                # What is wrong with another record is no word on this one.
                warnings.simplefilter("ignore")
                other = RiskLedger.open(file.parent)
                described = other.read_metadata().get("quantities")
                same = _network(other) == mine
            attacks = isinstance(described, Mapping) and any(
                str(name).startswith("audit/") for name in described
            )
            if attacks and same:
                found.append(file.parent.name)
        except (OSError, ValueError):  # what can't be read names nothing
            continue
    return found


def _network(ledger: RiskLedger) -> tuple[str, ...] | None:
    metadata = ledger.read_metadata()
    keys = ("model", "model_name", "parameters", "input_shape")
    known = tuple(str(metadata.get(key)) for key in keys)
    return known if metadata.get("model_name") else None


def incomparable(runs: Sequence[RecordedRun]) -> list[str]:
    """Name what must agree for numbers of runs to be comparable, and does not.

    Args:
        runs: The runs.
    """
    facts = [
        {
            "quantity": None if run.headline is None else run.headline.quantity,
            "epoch": None if run.headline is None else run.headline.moment.epoch,
            "noise_std": run.facts.noise_std,
            "what attackers know": run.facts.prior,
            "samples": run.metadata.get("probes_fingerprint"),
        }
        for run in runs
    ]
    return [key for key in facts[0] if len({str(fact[key]) for fact in facts}) > 1]


def _read(path: Path, label: str) -> RecordedRun:
    ledger = RiskLedger.open(path)
    table = LedgerTable.from_rows(ledger.rows())
    metadata = ledger.read_metadata()
    moments = audits(table)
    latest = {
        kind: outcome
        for kind in KINDS
        if moments and (outcome := achieved(table, moments[-1], kind)) is not None
    }
    return RecordedRun(
        label=label,
        ledger=ledger,
        table=table,
        metadata=metadata,
        facts=RunFacts.of(metadata),
        headline=find_headline(table),
        attacks=latest,
    )


def _labels(paths: Sequence[Path]) -> list[str]:
    """The part of each path that tells it from the others.

    Example:
        >>> _labels([Path("runs/a/version_0/leakwatch-run"),
        ...          Path("runs/a/version_1/leakwatch-run")])
        ['version_0', 'version_1']
        >>> _labels([Path("runs"), Path("runs/b")])
        ['runs', 'runs/b']
    """
    parts = [path.parts for path in paths]
    shortest = min(map(len, parts))

    def alike(step: int) -> int:
        rows = [part[::step] for part in parts]
        same = (len({row[i] for row in rows}) == 1 for i in range(shortest))
        return next((i for i, equal in enumerate(same) if not equal), shortest)

    front, back = alike(1), alike(-1)
    cut = ["/".join(part[front : len(part) - back]) for part in parts]
    return cut if all(cut) and len(set(cut)) == len(cut) else list(map(str, paths))
