"""What scoring returns: values that never come without their status."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor

#: The words that a status may have.
STATUS_WORDS: Final = (
    "ok",
    "estimated",
    "unresolved",
    "not converged",
    "not computed",
    "undefined",
    "failed",
)


class Status(NamedTuple):
    """What a value is worth.

    Attributes:
        word: ``ok``; ``estimated``: from random probes, with its standard error;
            ``unresolved``: below what the arithmetic can tell from zero, don't read
            the number; ``not converged``: the solver stopped early, the number is a
            bound at best; ``not computed``: this solver can't give it; ``undefined``:
            there is no such number for this sample; ``failed``: an error.
        reason: one sentence: why, and what to do.
    """

    word: str
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.word}: {self.reason}" if self.reason else self.word

    @property
    def usable(self) -> bool:
        """Whether the value is a number to be read, averaged or plotted."""
        return self.word in ("ok", "estimated")


OK: Final = Status("ok")


class Value(NamedTuple):
    """One number about one sample, and what it is worth."""

    number: float
    status: Status = OK


@final
@dataclass(frozen=True, eq=False)
class ScoreResult(Mapping[str, Tensor]):
    """Scores of a batch: ``result["lavp_l2_max"]`` is a ``(batch,)`` float64 tensor.

    Attributes:
        numbers: score name → ``(batch,)`` float64; NaN where there is no number.
        status: score name → one :class:`Status` per sample.
        solver: ``"exact"``, ``"lanczos"`` or ``"power"``, as used.
        eigenvalues: the whole spectrum of H in pixel units, descending,
            ``(batch, d_x)``, float64, NaN rows for failed samples; ``None`` unless the
            solver was exact.
        reason: why that solver.
        seconds: wall-clock time.
    """

    numbers: dict[str, Float[Tensor, " batch"]]
    status: dict[str, tuple[Status, ...]]
    solver: str
    eigenvalues: Float[Tensor, "batch d_x"] | None = None
    reason: str = ""
    seconds: float = 0.0

    def __getitem__(self, name: str) -> Tensor:
        try:
            return self.numbers[name]
        except KeyError:
            raise KeyError(
                f"no score {name!r} in this result; it holds {', '.join(self.numbers)}"
            ) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.numbers)

    def __len__(self) -> int:
        return len(self.numbers)

    def usable(self, name: str) -> Tensor:
        """Which samples have a number worth reading, ``(batch,)`` bool."""
        return torch.tensor([s.usable for s in self.status[name]])
