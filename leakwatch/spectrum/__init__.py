"""Eigenvalues of symmetric operators, each with a residual and a status.

On matrices or anything with ``matvec`` (`SymmetricOperator`): `exact` for all
eigenvalues, `lanczos` for the largest from about ten products, `power` to reproduce
published numbers. On a factor J of H = JᵀJ, with ``forward`` and ``backward``
(`FactorOperator`), where J is too large to form: `ends` for λ_1 and an interval of
λ_min, `quadrature` for sums over all eigenvalues with their errors, `damped` for
(H + εI)⁻¹Jᵀb at every ε, `trace` for Σλ alone. `box` minimises quadratics
between bounds. None of them knows of models.
"""

from __future__ import annotations

from leakwatch.spectrum.damped_least_squares import DampedSolution, damped
from leakwatch.spectrum.exact import exact
from leakwatch.spectrum.extreme_eigenvalues import Ends, ends
from leakwatch.spectrum.lanczos import lanczos
from leakwatch.spectrum.operators import (
    DenseFactor,
    DenseOperator,
    FactorOperator,
    SymmetricOperator,
    as_factor,
    as_operator,
)
from leakwatch.spectrum.power import power
from leakwatch.spectrum.quadrature import quadrature, trace
from leakwatch.spectrum.result import Spectrum, precision_floor
from leakwatch.spectrum.spectral_measure import Estimate, SpectralMeasure

__all__ = [
    "DampedSolution",
    "DenseFactor",
    "DenseOperator",
    "Ends",
    "Estimate",
    "FactorOperator",
    "SpectralMeasure",
    "Spectrum",
    "SymmetricOperator",
    "as_factor",
    "as_operator",
    "damped",
    "ends",
    "exact",
    "lanczos",
    "power",
    "precision_floor",
    "quadrature",
    "trace",
]
