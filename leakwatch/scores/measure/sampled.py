"""Sums over the spectrum of a J that can't be formed, from random starts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from leakwatch.derivatives.jacobian import GradientJacobian, NormalOperator
from leakwatch.scores.measure.plan import Plan
from leakwatch.scores.measure.sample_spectrum import NOT_FINITE
from leakwatch.scores.result import Value, from_probes
from leakwatch.scores.settings import Settings
from leakwatch.spectrum import Ends, Estimate, SpectralMeasure, quadrature, trace
from leakwatch.spectrum.quadrature import Wanted

_STARTS = 5
_TRACE_STARTS = 20


def sampled_spectra(
    jacobian: GradientJacobian,
    plan: Plan,
    settings: Settings,
    ends: Ends,
    leading: Sequence[tuple[Tensor, Tensor]],
) -> list[SpectralMeasure | None]:
    """The spectrum of H̃ of each sample as random starts see it.

    Args:
        jacobian: of the samples.
        plan: how many products it may take.
        settings: noise, damping and prior, which say how far quadrature has to go.
        ends: of the spectra.
        leading: eigenvalues and eigenvectors known already.

    Returns:
        One for each sample, ``None`` where a product was not finite.
    """
    functions = None
    if not plan.any_noise:
        scales = jacobian.scale.tolist()
        functions = [_functions(settings, 1 / scale**2) for scale in scales]
    return quadrature(
        jacobian.normal(),
        probes=_STARTS,
        depth=max(plan.products // _STARTS, 2),
        known=leading,
        lower=torch.nan_to_num(ends.lower),
        functions=functions,
    )


def _functions(settings: Settings, unit: float) -> list[Wanted]:
    """What the scores integrate, in units of the eigenvalues of H̃."""
    eps = settings.epsilon * unit
    functions: list[Wanted] = []
    if settings.epsilon > 0:
        functions.append((1, lambda lam: (lam + eps).reciprocal().square()))
    elif settings.noise_std is not None:
        functions.append((0, torch.reciprocal))
    if settings.noise_std is not None:
        shift = (settings.noise_std / settings.prior_std) ** 2 * unit
        functions.append((0, lambda lam: shift / (lam + shift)))
        functions.append((0, lambda lam: torch.log1p(lam / shift)))
    return functions


def estimated_traces(
    factor: NormalOperator, leading: Sequence[tuple[Tensor, Tensor]] | None = None
) -> list[Value]:
    """Σλ of each sample in the units of J̃, when no other sum is asked for.

    Args:
        factor: J̃.
        leading: eigenvalues and eigenvectors of each sample known already.
    """
    values, errors = trace(factor, probes=_TRACE_STARTS, known=leading)
    both = zip(values.tolist(), errors.tolist(), strict=True)
    return [_trace(Estimate(value, error, value, value)) for value, error in both]


def trace_of(measure: SpectralMeasure | None) -> Value:
    """Σλ in the units of J̃."""
    return _LOST if measure is None else _trace(measure.trace())


def _trace(estimate: Estimate) -> Value:
    if not math.isfinite(estimate.value):
        return _LOST
    return from_probes(estimate, estimate, "Σλ")


_LOST = Value(math.nan, NOT_FINITE)
