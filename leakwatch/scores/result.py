"""What scoring returns: values that never come without their status."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final, NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor

from leakwatch.spectrum import Estimate
from leakwatch.status import OK, Measured, Status

#: Up to this relative error, at worst, a number is "ok"; up to USABLE "estimated".
ACCURATE: Final = 0.1
USABLE: Final = 1.0
# The middle of [0, x] is within 100 % of itself whatever x is.
_WIDEST: Final = 0.5
_DOUBLE: Final = "compute in float64 (argument dtype)"
#: What to do about a number for which the products did not suffice.
REMEDY: Final = "raise products, or use solver='exact' if d_x allows"


class Value(NamedTuple):
    """One number about one sample, and what it is worth.

    Attributes:
        number: the number.
        status: what it is worth.
        ends: the least and the most that rounding may have made of it, where that is
            what the status says.
    """

    number: float
    status: Status = OK
    ends: tuple[float, float] | None = None

    @classmethod
    def without(cls, word: str, reason: str) -> Value:
        """No number, and why."""
        return cls(math.nan, Status(word, reason))

    def times(self, factor: float) -> Value:
        """The same value in other units."""
        return Value(self.number * factor, self.status)


# What statuses advise, and what is left to say in float64.
_IN_DOUBLE = {
    "compute in float64 (argument dtype), and if that says the same, the gradient does "
    "not show": "it is float64 already: the gradient does not show",
    "compute in float64 (argument dtype)": "it is float64 already",
    "; use float64 if it matters": "",
    " or use float64": "",
}


def columns(
    rows: Sequence[Mapping[str, Value]], dtype: torch.dtype = torch.float32
) -> tuple[dict[str, Float[Tensor, " rows"]], dict[str, tuple[Status, ...]]]:
    """Numbers, float64, and statuses by name, from one value per name in each row.

    Args:
        rows: of each sample.
        dtype: in which they were computed.
    """
    numbers = {
        name: torch.tensor([row[name].number for row in rows], dtype=torch.float64)
        for name in rows[0]
    }
    return numbers, {
        name: tuple(_advice(row[name].status, dtype) for row in rows)
        for name in rows[0]
    }


def _advice(status: Status, dtype: torch.dtype) -> Status:
    """The status, without the advice to compute as it was computed."""
    reason = status.reason
    for advice, double in _IN_DOUBLE.items() if dtype == torch.float64 else ():
        reason = reason.replace(advice, double)
    return status if reason == status.reason else status._replace(reason=reason)


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
    if gap <= USABLE * abs(number):
        percent = 100 * gap / abs(number)
        return Value(number, changed_by(f"{percent:.0f} %"), (low, high))
    return Value.without(
        "unresolved",
        f"{what} can't be told from zero in this arithmetic; {_DOUBLE}, and if that "
        f"says the same, the gradient does not show those directions at all",
    )


def changed_by(amount: str) -> Status:
    """What a number is worth that rounding may have changed by so much.

    Args:
        amount: with its unit, which is the number's own, or percent of the number.
    """
    reason = f"rounding may have changed it by up to {amount}; {_DOUBLE}"
    return Status("estimated", reason)


def _same(number: float) -> float:
    return number


def from_probes(
    plain: Estimate,
    rounded: Estimate,
    what: str,
    *,
    transform: Callable[[float], float] = _same,
) -> Value:
    """A number that random starts estimate, with the status that its errors give it.

    Args:
        plain: the estimate; its bounds are those of the quadrature.
        rounded: the same with bounds that contain what rounding can have done.
        what: the quantity of which the standard error is stated.
        transform: estimate ↦ number; monotone.

    Returns:
        ``estimated`` with the standard error, and the other errors where they matter;
        ``unresolved`` where rounding may have changed the number by more than its
        size; ``not converged`` where the quadrature, or chance, may have. ``ok`` only
        when there is no error to speak of.

    Example:
        >>> four = Estimate(4.0, 0.4, 4.0, 4.0)
        >>> value = from_probes(four, four, "Σλ", transform=lambda total: total**0.5)
        >>> value.number, value.status.reason[:40]
        (2.0, 'from random starts, standard error 5 % o')
    """
    if not math.isfinite(plain.value):
        return Value.without(
            "not converged", f"no finite value of {what} can be given; {REMEDY}"
        )
    number = transform(plain.value)
    ends = [transform(max(plain.value + d, 0.0)) for d in (-plain.error, plain.error)]
    chance = abs(ends[1] - ends[0]) / 2
    quadrature = _apart(number, plain, transform)
    rounding = max(_apart(number, rounded, transform) - quadrature, 0.0)
    size = abs(number)
    if size == 0 and chance == quadrature == rounding == 0:
        return Value(number)
    if rounding > USABLE * size:
        return Value.without(
            "unresolved",
            f"rounding may have changed {what} by more than its size; {_DOUBLE}",
        )
    if quadrature > _WIDEST * size or chance > _WIDEST * size:
        low, high = sorted(transform(bound) for bound in (plain.low, plain.high))
        return Value(
            number,
            Status(
                "not converged",
                f"between {low:.3g} and {high:.3g} as far as the products went, "
                f"standard error of the random starts {chance:.2g}; {REMEDY}",
            ),
        )
    if max(chance, quadrature, rounding) <= 1e-9 * size:
        return Value(number)
    parts = [f"standard error {100 * chance / size:.2g} % of {what}"]
    for name, error in (("quadrature", quadrature), ("rounding", rounding)):
        if error > 1e-3 * size:
            parts.append(f"{name} within {100 * error / size:.2g} %")
    reason = f"from random starts, {', '.join(parts)}; solver='exact' has no such error"
    return Value(number, Status("estimated", reason))


def _apart(
    number: float, bounds: Estimate, transform: Callable[[float], float]
) -> float:
    if not math.isfinite(bounds.low) or not math.isfinite(bounds.high):
        return math.inf
    return max(abs(transform(b) - number) for b in (bounds.low, bounds.high))


@final
@dataclass(frozen=True, eq=False, repr=False)
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
