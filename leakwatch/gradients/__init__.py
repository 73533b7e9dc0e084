"""The map from a sample to the gradient that it would share, and its derivatives.

Everything in leakwatch hangs off this object: its derivative gives every score,
matching its values gives every attack, perturbing them gives every defense.
"""

from __future__ import annotations

from leakwatch.evaluation import (
    Criterion,
    UnsupportedModuleError,
    Weights,
    underlying,
)
from leakwatch.examination import Path
from leakwatch.gradients.map import GradientMap

__all__ = [
    "Criterion",
    "GradientMap",
    "Path",
    "UnsupportedModuleError",
    "Weights",
    "underlying",
]
