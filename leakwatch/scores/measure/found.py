"""What a solver found about one sample, and how far rounding moved its Jacobian."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import final

from torch import Tensor

from leakwatch.derivatives.jacobian import GradientJacobian
from leakwatch.scores.measure.sample_spectrum import Precision
from leakwatch.scores.result import Value
from leakwatch.spectrum import DampedSolution, SpectralMeasure
from leakwatch.status import Status

SMALL = "the smallest eigenvalue"
NOT_ASKED = Value.without("not computed", "no score asked for it")
NO_DIRECTION = Value.without(
    "undefined", "the gradient vanishes, so it has no direction"
)
NOT_FINITE = Status(
    "failed", "gradient or Jacobian of this sample is not finite; look for overflow"
)


@final
@dataclass(frozen=True, eq=False)
class Found:
    """What a solver found about one sample, in pixel units and float64.

    Fields are those of :class:`leakwatch.scores.measure.sample_spectrum.Evidence`.
    """

    lambda_max: Value = NOT_ASKED
    lambda_min: Value = NOT_ASKED
    cos_max: Value = NOT_ASKED
    cos_min: Value = NOT_ASKED
    trace: Value = NOT_ASKED
    eigenvalues: Tensor | None = None
    precision: Precision = field(default_factory=Precision)
    eigenvectors: Tensor | None = None
    failure: Status | None = None
    norm: float | None = None
    traces: dict[str, float] = field(default_factory=dict)
    sums: SpectralMeasure | None = None
    lower: float = 0.0
    inverted: DampedSolution | None = None
    estimated: DampedSolution | None = None
    scale: float = 1.0

    @classmethod
    def failed(cls, status: Status) -> Found:
        """Nothing, and why."""
        none = Value(math.nan, status)
        return cls(none, none, none, none, none, failure=status)


def rounding(jacobian: GradientJacobian, sample: int) -> float:
    """‖ΔJ̃‖_F, or 0 where the network can't be evaluated in the other precision."""
    try:
        return jacobian.rounding(sample)
    except Exception as error:
        jacobian.gradients.note(
            "how much rounding changes its Jacobian is assumed, not measured: it can't "
            f"be evaluated in both float32 and float64 ({type(error).__name__})"
        )
        return 0.0


def times(value: Value, factor: float) -> Value:
    """A value in other units."""
    return Value(value.number * factor, value.status)
