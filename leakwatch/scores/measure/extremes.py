"""λ_1 and λ_min from products, and what their intervals are worth."""

from __future__ import annotations

import math

from leakwatch.scores.measure.found import NOT_ASKED, NOT_FINITE, SMALL
from leakwatch.scores.measure.sample_spectrum import Precision
from leakwatch.scores.measure.sampled import REMEDY
from leakwatch.scores.result import ACCURATE, Value, judged
from leakwatch.spectrum import Ends
from leakwatch.status import Status

# Where the products ran out before the tolerance: a residual good enough for a score.
_ENOUGH = 1e-4


def pairs(
    shape: tuple[int, int, int],
    found: Ends | None,
    precision: list[Precision],
    rank: int,
) -> list[tuple[Value, Value]]:
    """Largest and smallest eigenvalue of each sample, in the units of J̃.

    Args:
        shape: (batch, d_θ, d_x).
        found: what products said, if anything was asked.
        precision: what rounding does to J̃ of each sample.
        rank: most eigenvalues that can differ from zero.
    """
    batch, _, d_x = shape
    if found is None:
        return [(NOT_ASKED, NOT_ASKED)] * batch
    pairs = []
    for i in range(batch):
        low = Value(0.0) if rank < d_x else _smallest(found, i, precision[i])
        pairs.append((_largest(found, i, precision[i]), low))
    return pairs


def _largest(found: Ends, i: int, precision: Precision) -> Value:
    number, residual = float(found.lambda_max[i]), float(found.residual[i])
    if not math.isfinite(number):
        return Value(math.nan, NOT_FINITE)
    if not bool(found.converged[i]) and residual > _ENOUGH * number:
        share = residual / max(number, 1e-300)
        reason = (
            f"residual {residual:.1e} ({share:.0e} of it) after "
            f"{int(found.matvecs[i])} products; a lower bound; {REMEDY}"
        )
        return Value(number, Status("not converged", reason))
    wide = residual + 2 * precision.factor * math.sqrt(number) + precision.factor**2
    return judged(number, number - wide, number + wide, "this eigenvalue")


def _interval(
    low: float, number: float, high: float, precision: Precision
) -> tuple[float, float, float]:
    """The interval of an eigenvalue with what rounding of J̃ may have done to it."""
    err = precision.factor
    if not math.isfinite(err):
        return 0.0, number, math.inf
    return (
        max(math.sqrt(low) - err, 0.0) ** 2,
        number,
        (math.sqrt(high) + err) ** 2,
    )


def _smallest(found: Ends, i: int, precision: Precision) -> Value:
    raw = (float(found.lower[i]), float(found.smallest[i]), float(found.upper[i]))
    if not math.isfinite(raw[1]):
        return Value(math.nan, NOT_FINITE)
    low, number, high = _interval(*raw, precision)
    width = max(high - number, number - low)
    if width <= ACCURATE * number:
        return Value(number)
    alone = _interval(number, number, number, precision)
    rounded = judged(number, alone[0], alone[2], SMALL)
    if rounded.status.word == "unresolved":
        return rounded
    reason = (
        f"between {low / number:.2g} and {high / number:.3g} times this after "
        f"{int(found.matvecs[i])} products (Golub–Kahan; the lower end holds with "
        f"99.9 % probability); {REMEDY}"
    )
    # An upper bound is within 100 % of itself whatever the truth is.
    word = "estimated" if 2 * low >= number else "not converged"
    return Value(number, Status(word, reason))


def lowers(found: Ends, precision: list[Precision]) -> list[float]:
    """Lower bounds of λ_min of each sample, in the units of J̃."""
    return [
        _interval(float(low), 0.0, 0.0, p)[0] if math.isfinite(float(low)) else 0.0
        for low, p in zip(found.lower, precision, strict=True)
    ]
