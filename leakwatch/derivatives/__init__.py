"""The map from a sample to the gradient that it would share, and its derivatives.

Everything in leakwatch hangs off this object: its derivative gives every score,
matching its values gives every attack, perturbing them gives every defense.
"""

from __future__ import annotations

from leakwatch.derivatives.gradient_map import GradientMap
from leakwatch.derivatives.runtime import (
    Criterion,
    UnsupportedModuleError,
    Weights,
    underlying,
)
from leakwatch.derivatives.verification import Path

__all__ = [
    "Criterion",
    "GradientMap",
    "Path",
    "UnsupportedModuleError",
    "Weights",
    "underlying",
]
