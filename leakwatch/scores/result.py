"""What scoring returns: values that never come without their status."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Final, NamedTuple, final

from jaxtyping import Float
from torch import Tensor

from leakwatch.status import OK, Measured, Status

#: Up to this relative error, at worst, a number is "ok"; up to USABLE "estimated".
ACCURATE: Final = 0.1
USABLE: Final = 1.0


class Value(NamedTuple):
    """One number about one sample, and what it is worth."""

    number: float
    status: Status = OK

    @classmethod
    def without(cls, word: str, reason: str) -> Value:
        """No number, and why."""
        return cls(math.nan, Status(word, reason))


def judged(number: float, low: float, high: float, what: str) -> Value:
    """A number with the status that its error bounds give it.

    Args:
        number: as computed.
        low: the least that it can be, given what rounding did to its ingredients.
        high: the most.
        what: what the smallest eigenvalues do to it, for the reason.

    Returns:
        ``ok`` when number and bounds are within 10 %, ``estimated`` when they are
        within 100 %; beyond that NaN and ``unresolved``.

    Example:
        >>> [judged(2.0, 2.0 - e, 2.0 + e, "x").status.word for e in (0.1, 1.0, 3.0)]
        ['ok', 'estimated', 'unresolved']
    """
    gap = max(high - number, number - low)
    if gap <= ACCURATE * abs(number):
        return Value(number)
    remedy = "compute with dtype=torch.float64"
    if gap <= USABLE * abs(number):
        percent = 100 * gap / abs(number)
        return Value(
            number,
            Status(
                "estimated",
                f"rounding may have changed it by up to {percent:.0f} %; {remedy}",
            ),
        )
    return Value.without(
        "unresolved",
        f"{what} can't be told from zero in this arithmetic; {remedy}, and if that "
        f"says the same, the gradient does not show those directions at all",
    )


@final
@dataclass(frozen=True, eq=False)
class ScoreResult(Measured):
    """Scores of a batch: ``result["lavp_l2_max"]`` is a ``(batch,)`` float64 tensor.

    Attributes:
        numbers: score name → ``(batch,)`` float64; NaN where there is no number, never
            infinite.
        status: score name → one :class:`Status` per sample.
        solver: ``"exact"``, ``"lanczos"`` or ``"power"``, as used.
        eigenvalues: the whole spectrum of H in pixel units, descending,
            ``(batch, d_x)``, float64, NaN rows for failed samples; ``None`` unless the
            solver was exact.
        reason: why that solver.
        traces: name of a module → its part of Σλ of each sample, ``(batch,)`` float64,
            NaN for failed samples; empty unless the solver was exact.
        seconds: wall-clock time.
    """

    kind: ClassVar[str] = "score"
    numbers: dict[str, Float[Tensor, " batch"]]
    status: dict[str, tuple[Status, ...]]
    solver: str
    eigenvalues: Float[Tensor, "batch d_x"] | None = None
    reason: str = ""
    seconds: float = 0.0
    traces: dict[str, Float[Tensor, " batch"]] = field(default_factory=dict)
