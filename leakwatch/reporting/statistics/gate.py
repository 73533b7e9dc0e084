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
        max_class_psnr: dB that the mean predicted PSNR of no class may exceed. That of
            a class with a sample without a number is not known.
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
        rows = [row for row in rows if (row.epoch, row.step) == moment]
        now = LedgerTable.from_rows(rows)
        opened = [_left_open(row, quantities) for row in rows]
        found = [
            *self._samples(now, class_names),
            *self._classes(now, LedgerTable.from_rows(opened), class_names),
        ]
        for limits, sign in ((self.at_most, 1), (self.at_least, -1)):
            if limits:
                scalars, bounds, anything = (
                    log_scalars(some, quantities, class_names, prefix=prefix)
                    for some in (rows, opened, _filled(opened, sign * math.inf))
                )
                found += self._keys(limits, sign, scalars, bounds, anything)
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
            yield _missing(column.where(nothing), len(nothing))
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
        headline, furthest = find_headline(now), find_headline(opened)
        classes = [] if headline is None else summarize_classes(headline.column)
        if headline is None or not classes:
            if not self.unknown_passes:
                yield "no predicted PSNR of any class was recorded"
            return
        column = headline.column
        most = {
            row.label: row.mean
            for row in (summarize_classes(furthest.column) if furthest else ())
        }
        for row in classes:
            label = class_label(row.label, names)
            if row.mean > limit:
                yield f"the mean of {label} is {row.mean:.1f} dB, above {limit:g}"
            elif self.unknown_passes:
                continue
            elif row.used < row.count:
                # The mean is of the other samples: nobody knows that of the class.
                of_it = np.array([y == row.label for y in column.labels], bool)
                missing = _missing(column.where(of_it & ~column.usable), row.count)
                yield f"the mean of {label} is not known: {missing}"
            elif math.isnan(row.mean):
                yield f"the mean of {label} is not known: infinities of both signs"
            elif most.get(row.label, row.mean) > limit:
                yield (
                    f"the mean of {label} may be above {limit:g} dB: only a lower "
                    f"bound, {row.mean:.1f} dB, is known {_EXACT}"
                )

    def _keys(
        self,
        limits: Mapping[str, float],
        sign: int,
        scalars: Mapping[str, float],
        bounds: Mapping[str, float],
        anything: Mapping[str, float],
    ) -> Iterable[str]:
        """Keys beyond their limits, or that may be by what is only known in part.

        Args:
            limits: by key.
            sign: +1 for the highest values allowed, -1 for the lowest.
            scalars: by key.
            bounds: the same with bounds at their most exposed.
            anything: the same with what has no number as far beyond as can be.
        """
        word = "above" if sign > 0 else "below"
        for key, limit in limits.items():
            value = scalars.get(key, math.nan)
            if sign * value > sign * limit:
                yield f"{key} is {number(value)}, {word} {limit:g}"
            elif self.unknown_passes:
                continue
            elif math.isnan(value):
                near = "" if key in scalars else meant(key, scalars)
                yield f"{key} has no number{near and '; ' + near.strip()}"
            else:
                for most, why in (
                    (bounds, f"only a bound is known {_EXACT}"),
                    (anything, "samples are without a number"),
                ):
                    if not sign * most.get(key, value) <= sign * limit:
                        yield (
                            f"{key} is {number(value)}, and may be {word} {limit:g}: "
                            f"{why}"
                        )
                        break


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


def _filled(rows: Iterable[Row], value: float) -> list[Row]:
    """The same with a value for each sample that lacks what others have."""
    rows = list(rows)
    known = {row.quantity for row in rows if row.usable and row.sample is not None}
    return [
        row
        if row.usable or row.sample is None or row.quantity not in known
        else replace(row, value=value, status="ok")
        for row in rows
    ]


def _missing(column: Column, of: int) -> str:
    """How many of so many samples have no number, and why."""
    why = describe_counts(count_excluded(column))
    return f"{_are(len(column.samples), of)} without a number ({why})"


def _are(some: int, of: int) -> str:
    return f"{some} of {count(of, 'sample')} {'is' if some == 1 else 'are'}"
