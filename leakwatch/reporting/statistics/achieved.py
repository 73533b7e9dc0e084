"""What attacks achieved: the one place that says which of their numbers count.

An attack that failed says nothing about its sample. Its reconstruction is kept, but
no summary, card or figure takes a number from it; they say how many these are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final, final

import numpy as np

from leakwatch.reporting.ledger.table import Column, LedgerTable, Moment
from leakwatch.reporting.statistics.aggregates import quantile
from leakwatch.reporting.words import count, decibels

__all__ = [
    "FEWEST_ATTACKS",
    "KINDS",
    "Achieved",
    "achieved",
    "audits",
    "conclusive_values",
]

#: So many conclusive attacks make a correlation worth a number.
FEWEST_ATTACKS: Final = 8

#: Kind of start, as in the names of quantities → what readers call it.
KINDS: Final = {
    "near": "worst case (starts beside the sample)",
    "random": "practical (starts at noise)",
}


@final
@dataclass(frozen=True)
class Achieved:
    """The attacks of one kind at one moment; only conclusive ones give numbers.

    Attributes:
        attacked: samples.
        conclusive: of them, those whose attack has a verdict.
        recovered: of the conclusive ones.
        partly: of the conclusive ones.
        median: PSNR over the conclusive ones, dB; NaN if there are none or PSNR was
            not measured.
        best: the same of each sample's nearest try, which only an auditor can choose;
            NaN where there was one try.
    """

    attacked: int
    conclusive: int
    recovered: int
    partly: int
    median: float
    best: float = math.nan

    @property
    def inconclusive(self) -> int:
        """Samples whose attack says nothing."""
        return self.attacked - self.conclusive

    def __str__(self) -> str:
        """A few words for a line of text.

        Example:
            >>> print(Achieved(6, 0, 0, 0, math.nan))
            no attack on 6 samples was conclusive, which shows no safety
            >>> print(Achieved(6, 5, 1, 3, 24.2))
            24.2 dB median PSNR, 1 of 5 recovered, 3 partly, 1 more inconclusive
            >>> print(Achieved(4, 4, 1, 3, 24.2, best=25.6))  # doctest: +ELLIPSIS
            24.2 dB median PSNR (25.6 dB for the nearest of all tries), 1 of ...
        """
        if not self.conclusive:
            samples = count(self.attacked, "sample")
            return f"no attack on {samples} was conclusive, which shows no safety"
        parts = [f"{self.recovered} of {self.conclusive} recovered"]
        if not math.isnan(self.median):
            nearest = f"{decibels(self.best)} for the nearest of all tries"
            beside = "" if math.isnan(self.best) else f" ({nearest})"
            parts.insert(0, f"{decibels(self.median)} median PSNR{beside}")
        if self.partly:
            parts.append(f"{self.partly} partly")
        if self.inconclusive:
            parts.append(f"{self.inconclusive} more inconclusive")
        return ", ".join(parts)

    def note(self) -> str:
        """What stands below the median on a card.

        Example:
            >>> Achieved(6, 5, 1, 4, 24.2).note()
            'of 5 samples, 1 more inconclusive: 1 recovered, 4 partly, 0 not'
        """
        if not self.conclusive:
            return (
                f"no attack on {count(self.attacked, 'sample')} was conclusive: that "
                "it failed says nothing about them"
            )
        missed = self.conclusive - self.recovered - self.partly
        whose = f"of {count(self.conclusive, 'sample')}"
        if self.inconclusive:
            whose += f", {self.inconclusive} more inconclusive"
        text = (
            f"{whose}: {self.recovered} recovered, {self.partly} partly, {missed} not"
        )
        if not math.isnan(self.best):
            text += f"; {decibels(self.best)} for the nearest of all tries"
        return text


def audits(ledger: LedgerTable) -> tuple[Moment, ...]:
    """Return the moments at which probes were attacked, oldest first."""
    return tuple(sorted({m for m, name in ledger.columns if name.startswith("audit/")}))


def achieved(ledger: LedgerTable, moment: Moment, kind: str) -> Achieved | None:
    """Return what attacks of one kind came to, or None if none of it was run.

    Args:
        ledger: The run.
        moment: Of the audit.
        kind: Of start, one of `KINDS`.

    Example:
        >>> from leakwatch.reporting.ledger.rows import Row
        >>> name = "audit/random/"
        >>> rows = [Row(1, 5, 7, 0, name + "psnr", 31.0),
        ...         Row(1, 5, 7, 0, name + "verdict", 1.0),
        ...         Row(1, 5, 8, 0, name + "psnr", 9.0, "not converged"),
        ...         Row(1, 5, 8, 0, name + "verdict", math.nan, "not converged")]
        >>> print(achieved(LedgerTable.from_rows(rows), Moment(1, 5), "random"))
        31.0 dB median PSNR, 1 of 1 recovered, 1 more inconclusive
    """
    verdict = ledger.columns.get((moment, f"audit/{kind}/verdict"))
    if verdict is None:
        return None
    verdicts = verdict.usable_values

    def median(metric: str) -> float:
        column = conclusive_values(ledger, moment, kind, metric)
        reached = np.empty(0) if column is None else column.usable_values
        reached = reached[~np.isnan(reached)]
        return quantile(reached, 0.5) if reached.size else math.nan

    return Achieved(
        attacked=len(verdicts),
        conclusive=int((~np.isnan(verdicts)).sum()),
        recovered=int((verdicts >= 1.0).sum()),
        partly=int((verdicts == 0.5).sum()),
        median=median("psnr"),
        best=median("best_psnr"),
    )


def conclusive_values(
    ledger: LedgerTable, moment: Moment, kind: str, metric: str
) -> Column | None:
    """Return a quality of reconstructions, NaN where the attack was not conclusive.

    Args:
        ledger: The run.
        moment: Of the audit.
        kind: Of start.
        metric: Of the quality, such as ``psnr``.

    Returns:
        The column with the same samples; None where it was not recorded.
    """
    quality = ledger.columns.get((moment, f"audit/{kind}/{metric}"))
    verdict = ledger.columns.get((moment, f"audit/{kind}/verdict"))
    if quality is None or verdict is None:
        return None
    conclusive = {
        sample
        for sample, value in zip(verdict.samples, verdict, strict=True)
        if value.usable
    }
    clear = np.array([sample in conclusive for sample in quality.samples], bool)
    return replace(quality, values=np.where(clear, quality.usable_values, math.nan))
