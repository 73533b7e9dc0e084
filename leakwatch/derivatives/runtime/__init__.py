"""How a network is evaluated: as at inference, eager, in one precision, traceless.

A measurement needs the network in another state than training left it in. Everything
that is changed for it here is put back when the evaluation ends, also by an exception.
"""

from __future__ import annotations

from leakwatch.derivatives.runtime.evaluation import as_evaluated, evaluating, watches
from leakwatch.derivatives.runtime.modules import (
    UnsupportedModuleError,
    check_module,
    underlying,
)
from leakwatch.derivatives.runtime.sample_loss import (
    Criterion,
    Prepare,
    SampleLoss,
    Weights,
)

__all__ = [
    "Criterion",
    "Prepare",
    "SampleLoss",
    "UnsupportedModuleError",
    "Weights",
    "as_evaluated",
    "check_module",
    "evaluating",
    "underlying",
    "watches",
]
