"""What a checkpoint keeps of a monitor: plain values, no pixel of any probe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self, final

from leakwatch.callbacks._recording.run_metadata import PastRecord

__all__ = ["Progress"]

_DAMAGED = "the checkpoint's state of a callback can't be used"


@final
@dataclass
class Progress:
    """Schedule, record and latest values.

    Attributes:
        run: name of the run; empty before training.
        directory: of its ledger; empty if nothing could be recorded.
        position: parts in the ledger.
        epoch_asked: the last ended epoch that the schedule was asked about; −1: none.
        epoch_asked_at: the optimiser step at that time.
        step_asked: the last optimiser step that the schedule was asked about.
        spent: seconds that probing and recording have taken.
        elapsed: seconds of training.
        latest: log key → number of the last probe step.
        indices: data-set indices of the probes.
        fingerprint: of the probes.
        left_out: epochs whose probe step the budget left out.
        cost: seconds of the last probe step.
        factors: by which training multiplies the criterion's losses, see
            :class:`LossFactors`.
    """

    run: str = ""
    directory: str = ""
    position: int = 0
    epoch_asked: int = -1
    epoch_asked_at: int = -1
    step_asked: int = -1
    spent: float = 0.0
    elapsed: float = 0.0
    latest: dict[str, float] = field(default_factory=dict)
    indices: list[int] = field(default_factory=list)
    fingerprint: str = ""
    left_out: list[int] = field(default_factory=list)
    cost: float = 0.0
    factors: dict[str, float] = field(default_factory=dict)

    @property
    def past(self) -> PastRecord | None:
        """The record of the run so far; ``None`` before it began."""
        if not self.run:
            return None
        return PastRecord(self.run, self.directory, self.position)

    def is_new(self, step: int, epoch: int | None) -> bool:
        """Whether the schedule has not been asked about this moment; notes that it has.

        Args:
            step: optimiser steps taken.
            epoch: completed epochs where one has just ended, else ``None``.
        """
        if epoch is None:
            new = step != self.step_asked
        else:
            new = (epoch, step) != (self.epoch_asked, self.epoch_asked_at)
            self.epoch_asked, self.epoch_asked_at = epoch, step
        self.step_asked = step
        return new

    def state(self) -> dict[str, Any]:
        """Everything as plain values."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """The inverse of :meth:`state`; unknown entries are left out.

        Raises:
            ValueError: for entries of another type.
        """
        if not isinstance(state, Mapping):
            raise ValueError(f"{_DAMAGED}: it is {state!r}, expected a mapping.")
        known = {f.name: getattr(cls(), f.name) for f in fields(cls)}
        entries = {key: value for key, value in state.items() if key in known}
        for name, value in entries.items():
            kind = type(known[name])
            number = kind is float and type(value) is int
            if type(value) is not kind and not number:
                raise ValueError(
                    f"{_DAMAGED}: {name} is {value!r}, expected {kind.__name__}."
                )
        return cls(**entries)
