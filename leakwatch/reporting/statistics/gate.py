"""Limits that a probe step has to hold; what has no number does not hold them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, final

import numpy as np
import numpy.typing as npt

from leakwatch.names import meant
from leakwatch.reporting.ledger.rows import Row, is_bound
from leakwatch.reporting.ledger.table import Column, LedgerTable, Moment
from leakwatch.reporting.quantities import Quantity, class_label, describe
from leakwatch.reporting.statistics.achieved import KINDS, conclusive_values
from leakwatch.reporting.statistics.aggregates import (
    count_excluded,
    describe_counts,
    summarize_classes,
)
from leakwatch.reporting.statistics.headline import find_headline
from leakwatch.reporting.statistics.scalars import PREFIX, log_scalars
from leakwatch.reporting.words import count, moment_words, number

__all__ = ["Limits"]

_EXACT: Final = "(precision='exact' has the number)"


@final
@dataclass(frozen=True)
class Limits:
    """What must hold at a probe step.

    Args:
        max_psnr: dB that no sample may exceed: neither the predicted PSNR nor what a
            conclusive attack achieved.
        share: of samples that may exceed it all the same, in [0, 1).
        max_class_psnr: dB that the mean predicted PSNR of no class may exceed.
        at_most: log key → the highest value allowed.
        at_least: log key → the lowest value allowed.
        unknown_passes: whether a value without a number counts as held. By default
            it counts as exceeding: unknown is not safe.
    """

    max_psnr: float | None = None
    share: float = 0.0
    max_class_psnr: float | None = None
    at_most: Mapping[str, float] = field(default_factory=dict)
    at_least: Mapping[str, float] = field(default_factory=dict)
    unknown_passes: bool = False

    @property
    def any(self) -> bool:
        """Whether there is anything to hold."""
        limits = (self.max_psnr, self.max_class_psnr)
        keys = self.at_most or self.at_least
        return bool(keys) or any(limit is not None for limit in limits)

    def broken(
        self,
        rows: Iterable[Row],
        quantities: Mapping[str, Quantity] | None = None,
        class_names: Sequence[str] | None = None,
        *,
        prefix: str = PREFIX,
    ) -> list[str]:
        """Return one sentence for each limit that the latest of some rows breaks.

        Args:
            rows: Of one probe step; of several, only the latest counts.
            quantities: Descriptions of what was measured.
            class_names: By label.
            prefix: Of log keys.

        Example:
            >>> found = Limits(max_psnr=25).broken([Row(1, 9, 7, 0, "i2f_psnr", 31.0)])
            >>> print(found[0].partition(',')[0])
            after epoch 1: 1 of 1 sample is above 25 dB
        """
        rows = list(rows)
        table = LedgerTable.from_rows(rows)
        if not table.moments:
            return [] if self.unknown_passes else ["nothing was measured"]
        moment = table.moments[-1]
        now = LedgerTable((moment,), table.quantities, table.columns)
        open_rows = [_left_open(row, quantities) for row in rows]
        more = LedgerTable.from_rows(open_rows)
        opened = LedgerTable((more.moments[-1],), more.quantities, more.columns)
        found = [
            *self._samples(now, class_names),
            *self._classes(now, opened, class_names),
        ]
        if self.at_most or self.at_least:
            scalars, furthest = (
                log_scalars(some, quantities, class_names, prefix=prefix)
                for some in (rows, open_rows)
            )
            found += self._keys(scalars, furthest)
        return [f"{moment_words(moment)}: {sentence}" for sentence in found]

    def _samples(self, now: LedgerTable, names: Sequence[str] | None) -> Iterable[str]:
        if self.max_psnr is None:
            return
        headline, moment = find_headline(now), now.moments[-1]
        if headline is None and not self.unknown_passes:
            yield "no predicted PSNR was recorded"
            return
        column = _attacked(now, moment) if headline is None else headline.column
        if column is None:
            return
        predicted = np.full(len(column.samples), math.nan)
        if headline is not None:
            predicted = column.usable_values
        exposed = np.fmax(predicted, _reached(column, now, moment))
        above = exposed > self.max_psnr
        # An attack that came to less shows no safety where nothing was predicted.
        # Nor does a bound: more may be exposed than it says.
        bound = np.array([at_most(s) > self.max_psnr for s in column.statuses])
        unknown = (np.isnan(predicted) | bound) & ~above & (not self.unknown_passes)
        if (above | unknown).mean() <= self.share:
            return
        said = []
        if above.any():
            worst = int(np.nanargmax(exposed))
            label = class_label(column.labels[worst], names)
            said.append(
                f"{_are(int(above.sum()), len(above))} above {self.max_psnr:g} dB, the "
                f"worst sample {column.samples[worst]} ({label}) at "
                f"{exposed[worst]:.1f} dB"
            )
        if unknown.any():
            said += self._unknown(column, predicted, unknown)
        yield " and ".join(said) + (f"; {self.share:.0%} may be" if self.share else "")

    def _unknown(
        self,
        column: Column,
        predicted: npt.NDArray[np.float64],
        unknown: npt.NDArray[np.bool_],
    ) -> Iterable[str]:
        nothing = unknown & np.isnan(predicted)
        if nothing.any():
            why = describe_counts(count_excluded(column.where(nothing)))
            yield f"{_are(int(nothing.sum()), len(nothing))} without a number ({why})"
        bounds = int((unknown & ~nothing).sum())
        if bounds:
            yield (
                f"{bounds} of {count(len(unknown), 'sample')} may be above "
                f"{self.max_psnr:g} dB: only a lower bound is known {_EXACT}"
            )

    def _classes(
        self, now: LedgerTable, opened: LedgerTable, names: Sequence[str] | None
    ) -> Iterable[str]:
        limit = self.max_class_psnr
        if limit is None:
            return
        headline, at_most_that = find_headline(now), find_headline(opened)
        most = (
            {
                row.label: row.mean
                for row in summarize_classes(at_most_that.column)
                if not self.unknown_passes
            }
            if at_most_that
            else {}
        )
        classes = [] if headline is None else summarize_classes(headline.column)
        if not classes and not self.unknown_passes:
            yield "no predicted PSNR of any class was recorded"
        for row in classes:
            label = class_label(row.label, names)
            if row.mean > limit:
                yield f"the mean of {label} is {row.mean:.1f} dB, above {limit:g}"
            elif math.isnan(row.mean) and not self.unknown_passes:
                yield f"the mean of {label} is not known: {row.reason}"
            elif most.get(row.label, row.mean) > limit:
                yield (
                    f"the mean of {label} may be above {limit:g} dB: only a lower "
                    f"bound, {row.mean:.1f} dB, is known {_EXACT}"
                )

    def _keys(
        self, scalars: Mapping[str, float], furthest: Mapping[str, float]
    ) -> Iterable[str]:
        for limits, sign, word in (
            (self.at_most, 1, "above"),
            (self.at_least, -1, "below"),
        ):
            for key, limit in limits.items():
                value = scalars.get(key, math.nan)
                if sign * value > sign * limit:
                    yield f"{key} is {number(value)}, {word} {limit:g}"
                elif math.isnan(value) and not self.unknown_passes:
                    near = "" if key in scalars else meant(key, scalars)
                    yield f"{key} has no number{near and '; ' + near.strip()}"
                elif (
                    not self.unknown_passes
                    and key in furthest
                    and not sign * furthest[key] <= sign * limit
                ):
                    yield (
                        f"{key} is {number(value)}, and may be {word} {limit:g}: only "
                        f"a bound is known {_EXACT}"
                    )


def _reached(
    column: Column, now: LedgerTable, moment: Moment
) -> npt.NDArray[np.float64]:
    """The most that conclusive attacks achieved on each sample, dB; NaN: nothing."""
    most = np.full(len(column.samples), math.nan)
    for kind in KINDS:
        reached = conclusive_values(now, moment, kind, "psnr")
        if reached is not None:
            at = dict(zip(reached.samples, reached.usable_values, strict=True))
            most = np.fmax(
                most, [at.get(sample, math.nan) for sample in column.samples]
            )
    return most


def _attacked(now: LedgerTable, moment: Moment) -> Column | None:
    """Those who were attacked, where nothing was predicted."""
    columns = (conclusive_values(now, moment, kind, "psnr") for kind in KINDS)
    return next((column for column in columns if column is not None), None)


def at_most(status: str) -> float:
    """The highest PSNR that a prediction leaves open, dB; −∞ where it is no bound.

    Args:
        status: of the prediction.

    Example:
        >>> at_most("estimated: exposure is at least that and at most 31.5 dB: …")
        31.5
        >>> at_most("ok"), at_most("estimated: exposure is at least that: …")
        (-inf, inf)
    """
    if not is_bound(status):
        return -math.inf
    found = re.search(r"at most (-?[\d.]+) dB", status)
    return math.inf if found is None else float(found[1])


def _left_open(row: Row, quantities: Mapping[str, Quantity] | None) -> Row:
    """The same with the most exposed value that a bound leaves open."""
    if not is_bound(row.status):
        return row
    about = describe(row.quantity, quantities)
    if about.sign < 0:
        return replace(row, value=0.0)
    most = at_most(row.status) if about.logarithmic else math.inf
    return replace(row, value=max(row.value, most))


def _are(some: int, of: int) -> str:
    return f"{some} of {count(of, 'sample')} {'is' if some == 1 else 'are'}"
