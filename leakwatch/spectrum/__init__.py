"""Eigenvalues of symmetric operators, each with a residual and a status.

Three solvers on one interface: `exact` for all eigenvalues, `lanczos` for the largest
from about ten products, `power` to reproduce published numbers. They take matrices or
anything with ``matvec`` (`SymmetricOperator`), and know nothing of models.
"""

from __future__ import annotations

from leakwatch.spectrum.exact import exact
from leakwatch.spectrum.lanczos import lanczos
from leakwatch.spectrum.operators import (
    DenseOperator,
    SymmetricOperator,
    as_operator,
)
from leakwatch.spectrum.power import power
from leakwatch.spectrum.result import Spectrum, precision_floor

__all__ = [
    "DenseOperator",
    "Spectrum",
    "SymmetricOperator",
    "as_operator",
    "exact",
    "lanczos",
    "power",
    "precision_floor",
]
