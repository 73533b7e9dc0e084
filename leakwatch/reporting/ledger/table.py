"""Ledger rows sorted into columns: the form that aggregates and figures read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress
from typing import NamedTuple, Self, final

import numpy as np
import numpy.typing as npt

from leakwatch.reporting.ledger.rows import Row, is_bound, is_usable, status_word


class Moment(NamedTuple):
    """When a probe was taken: completed epochs and optimizer steps."""

    epoch: int
    step: int


class LedgerValue(NamedTuple):
    """What is recorded of one sample and quantity."""

    value: float
    status: str

    @property
    def usable(self) -> bool:
        """Whether the value may be read as a number."""
        return is_usable(self.value, self.status)

    @property
    def bound(self) -> bool:
        """Whether exposure is at least that, and maybe more."""
        return self.usable and is_bound(self.status)

    @property
    def estimated(self) -> bool:
        """Whether its status states an error to read it with; a bound is no such."""
        rough = status_word(self.status) == "estimated"
        return self.usable and rough and not self.bound

    @property
    def trouble(self) -> str:
        """The word for a value that is not usable.

        Example:
            >>> LedgerValue(float("nan"), "ok").trouble
            'not a number'
        """
        word = status_word(self.status)
        return "not a number" if word in ("ok", "estimated") else word or "no status"


@final
@dataclass(frozen=True)
class Column:
    """One quantity at one moment, one entry per sample.

    Args:
        samples: Data-set indices, in the order of the ledger.
        labels: Classes of the samples; None where there is none.
        values: Shape (n,), float64, as recorded.
        statuses: Status texts, as recorded.
    """

    samples: tuple[int, ...]
    labels: tuple[int | None, ...]
    values: npt.NDArray[np.float64]
    statuses: tuple[str, ...]

    @cached_property
    def usable(self) -> npt.NDArray[np.bool_]:
        """Which entries may be read as numbers, shape (n,)."""
        return np.array([value.usable for value in self], bool)

    @cached_property
    def usable_values(self) -> npt.NDArray[np.float64]:
        """The values, NaN where they may not be read as numbers, shape (n,)."""
        return np.where(self.usable, self.values, np.nan)

    @cached_property
    def bounds(self) -> npt.NDArray[np.bool_]:
        """At which entries exposure is at least that, and maybe more, shape (n,)."""
        return np.array([value.bound for value in self], bool)

    def __iter__(self) -> Iterator[LedgerValue]:
        return map(LedgerValue, self.values.tolist(), self.statuses)

    def at(self, sample: int) -> LedgerValue:
        """Return value and status of one sample, NaN and a reason if absent."""
        if sample not in self.samples:
            return LedgerValue(float("nan"), "not computed: no row for this sample")
        place = self.samples.index(sample)
        return LedgerValue(float(self.values[place]), self.statuses[place])

    def where(self, keep: npt.NDArray[np.bool_]) -> Column:
        """Return the samples at which ``keep``, shape (n,), is true."""
        return Column(
            samples=tuple(compress(self.samples, keep)),
            labels=tuple(compress(self.labels, keep)),
            values=self.values[keep],
            statuses=tuple(compress(self.statuses, keep)),
        )


@final
@dataclass(frozen=True)
class LedgerTable:
    """All rows of a run, by moment and quantity.

    A quantity recorded twice for one sample and moment counts once: the later
    row stands.

    Example:
        >>> table = LedgerTable.from_rows([Row(0, 0, 7, 1, "i2f", 2.0)])
        >>> table.moments, table.quantities
        ((Moment(epoch=0, step=0),), ('i2f',))
        >>> float(table.columns[table.moments[0], "i2f"].values[0])
        2.0
    """

    moments: tuple[Moment, ...] = ()
    quantities: tuple[str, ...] = ()
    columns: dict[tuple[Moment, str], Column] = field(default_factory=dict)
    run_level: dict[tuple[Moment, str], Row] = field(default_factory=dict)

    @classmethod
    def from_rows(cls, rows: Iterable[Row]) -> Self:
        """Sort rows into columns; rows without a sample become run-level."""
        cells: dict[tuple[Moment, str], dict[int, Row]] = {}
        run_level: dict[tuple[Moment, str], Row] = {}
        for row in rows:
            key = (Moment(row.epoch, row.step), row.quantity)
            if row.sample is None:
                run_level[key] = row
            else:
                cells.setdefault(key, {})[row.sample] = row
        columns = {
            key: Column(
                samples=tuple(by_sample),
                labels=tuple(row.label for row in by_sample.values()),
                values=np.array([row.value for row in by_sample.values()], np.float64),
                statuses=tuple(row.status for row in by_sample.values()),
            )
            for key, by_sample in cells.items()
        }
        return cls(
            moments=tuple(sorted({moment for moment, _ in (*cells, *run_level)})),
            quantities=tuple(dict.fromkeys(quantity for _, quantity in cells)),
            columns=columns,
            run_level=run_level,
        )

    @classmethod
    def of(cls, rows: Iterable[Row] | LedgerTable) -> LedgerTable:
        """Return a table as it is, and sort rows into one."""
        return rows if isinstance(rows, LedgerTable) else cls.from_rows(rows)

    def where(self, keep: Callable[[str], bool]) -> LedgerTable:
        """Return the quantities of whose names ``keep`` is true, at all moments."""
        return LedgerTable(
            moments=self.moments,
            quantities=tuple(filter(keep, self.quantities)),
            columns={key: c for key, c in self.columns.items() if keep(key[1])},
            run_level={key: r for key, r in self.run_level.items() if keep(key[1])},
        )

    def at(self, moment: Moment) -> dict[str, Column]:
        """Return the columns of one moment by quantity."""
        return {name: c for (when, name), c in self.columns.items() if when == moment}

    def of_run(self, quantity: str) -> dict[Moment, Row]:
        """Return what was recorded of the run itself, oldest first."""
        rows = sorted(self.run_level.items())
        return {when: row for (when, name), row in rows if name == quantity}

    def moments_of(self, quantity: str) -> tuple[Moment, ...]:
        """Return the moments at which a quantity was measured, oldest first."""
        return tuple(m for m in self.moments if (m, quantity) in self.columns)

    def last(self, quantity: str) -> tuple[Moment, Column] | None:
        """Return the latest column of a quantity."""
        moments = self.moments_of(quantity)
        if not moments:
            return None
        return moments[-1], self.columns[moments[-1], quantity]
