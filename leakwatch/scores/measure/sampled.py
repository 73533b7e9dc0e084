"""Numbers from random starts, and what their errors make of them."""

from __future__ import annotations

import math
from collections.abc import Callable

from leakwatch.scores.result import USABLE, Value
from leakwatch.spectrum import Estimate
from leakwatch.status import Status

#: What to do about a number for which the products did not suffice.
REMEDY = "raise products, or use solver='exact' if d_x allows"
# The middle of [0, x] is within 100 % of itself whatever x is.
_WIDEST = 0.5


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
        >>> found = Estimate(4.0, 0.4, 4.0, 4.0)
        >>> value = from_probes(found, found, "Σλ", transform=lambda total: total**0.5)
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
            f"rounding may have changed {what} by more than its size; compute with "
            "dtype=torch.float64",
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
