"""LAVP: eigenvalues of the gradient-matching Hessian at the true input.

Hong et al., "Foreseeing Reconstruction Quality of Gradient Inversion: An Optimization
Perspective", AAAI 2024. The paper's claim is that a large eigenvalue makes matching
ill-conditioned and the sample less exposed. It is a hypothesis about optimisers that
start far away; measure it with an attack before relying on it.
"""

from __future__ import annotations

import functools
import math

from leakwatch.scores.measure.sample_spectrum import SampleSpectrum
from leakwatch.scores.registry import scored
from leakwatch.scores.result import Value
from leakwatch.scores.settings import Settings
from leakwatch.status import OK

_lavp = functools.partial(scored, "lavp", direction="higher = less exposed")
_PAPER = "LAVP, Hong et al., AAAI 2024"


@_lavp(
    needs={"lambda_max"},
    unit="gradient² / pixel²",
    meaning="How steeply the gradient distance rises around the true image, at most; "
    "steeper is claimed to be harder to attack.",
    source=f"{_PAPER}, Theorem 3",
)
def lavp_l2_max(spectrum: SampleSpectrum, settings: Settings) -> Value:
    """λ_1 of H = JᵀJ (Theorem 3)."""
    return spectrum.lambda_max


@_lavp(
    needs={"lambda_min"},
    unit="gradient² / pixel²",
    meaning="How steeply the gradient distance rises around the true image, at least; "
    "steeper is claimed to be harder to attack.",
    source=f"{_PAPER}, Theorem 3",
)
def lavp_l2_min(spectrum: SampleSpectrum, settings: Settings) -> Value:
    """λ_{d_x} of H = JᵀJ (Theorem 3)."""
    return spectrum.lambda_min


@_lavp(
    needs={"lambda_max", "cosine"},
    unit="1 / pixel²",
    meaning="As lavp_l2_max, for attacks that match the direction of the gradient "
    "only.",
    source=f"{_PAPER}, Theorem 4",
)
def lavp_cos_max(spectrum: SampleSpectrum, settings: Settings) -> Value:
    """Largest eigenvalue of Jᵀ(I − ĝĝᵀ)J/‖g‖² (Theorem 4)."""
    return spectrum.cos_max


@_lavp(
    needs={"lambda_min", "cosine"},
    unit="1 / pixel²",
    meaning="As lavp_l2_min, for attacks that match the direction of the gradient "
    "only.",
    source=f"{_PAPER}, Theorem 4",
)
def lavp_cos_min(spectrum: SampleSpectrum, settings: Settings) -> Value:
    """Smallest eigenvalue of Jᵀ(I − ĝĝᵀ)J/‖g‖² (Theorem 4)."""
    return spectrum.cos_min


@_lavp(
    needs={"lambda_max", "lambda_min", "cosine"},
    unit="gradient / pixel²",
    meaning="Geometric mean of lavp_l2_max and lavp_cos_min, for an attack of unknown "
    "kind.",
    source=f"{_PAPER}, Table 3",
)
def lavp_fusion(spectrum: SampleSpectrum, settings: Settings) -> Value:
    """√(lavp_l2_max · lavp_cos_min), the loss-agnostic score (Table 3)."""
    parts = (spectrum.lambda_max, spectrum.cos_min)
    # Of two statuses the worse holds: first one without a number, then an estimate.
    status = OK
    for part in sorted(parts, key=lambda value: value.status.usable):
        if part.status != OK:
            status = part.status
            break
    first, second = (math.sqrt(max(p.number, 0.0)) for p in parts)
    return Value(first * second if status.usable else math.nan, status)
