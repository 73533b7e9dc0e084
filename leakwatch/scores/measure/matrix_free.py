"""Evidence from products with J and Jᵀ alone, for inputs whose J can't be formed.

Up to four tasks share what they find: the ends of the spectrum of H (whose leading
eigenvectors serve the next ones), those of the cosine Hessian, sums over the spectrum
by stochastic quadrature, and the two damped inverses when a perturbation is given. All
samples of a group advance together; none depends on which others are there.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from leakwatch.derivatives.jacobian import GradientJacobian, NormalOperator
from leakwatch.scores.measure.extremes import lowers, pairs
from leakwatch.scores.measure.found import (
    NO_DIRECTION,
    NOT_ASKED,
    NOT_FINITE,
    Found,
    rounding,
    times,
)
from leakwatch.scores.measure.plan import Plan
from leakwatch.scores.measure.sample_spectrum import Precision
from leakwatch.scores.measure.sampled import REMEDY, from_probes
from leakwatch.scores.result import Value
from leakwatch.scores.settings import Settings
from leakwatch.spectrum import (
    DampedSolution,
    Ends,
    Estimate,
    SpectralMeasure,
    damped,
    ends,
    quadrature,
    trace,
)
from leakwatch.spectrum.quadrature import Wanted
from leakwatch.status import Status

PROBES = 5
TRACE_PROBES = 20
# The products' own rounding keeps float32 residuals above 1e-7 to 1e-5.
_TOL = {torch.float32: 1e-4, torch.float64: 1e-8}


def iterate(
    jacobian: GradientJacobian,
    plan: Plan,
    settings: Settings,
    *,
    delta: Float[Tensor, "batch d_theta"] | None = None,
    offset: Float[Tensor, "batch d_x"] | None = None,
) -> list[Found]:
    """What products tell about each sample.

    Args:
        jacobian: of the samples.
        plan: what to measure, and how many products each task may take.
        settings: noise, damping and prior, which say how far quadrature has to go.
        delta: perturbations of the gradients, if any.
        offset: x − μ, float64, pixel units.

    Returns:
        One per sample. A sample with a product that is not finite has a ``failure``.
    """
    batch = jacobian.shape[0]
    finite = torch.isfinite(jacobian.norm).tolist()
    if not (plan.largest or plan.spectrum or plan.trace):
        return [Found() if good else Found.failed(NOT_FINITE) for good in finite]
    factor = jacobian.normal()
    found = _ends(factor, plan, settings) if plan.largest or plan.spectrum else None
    precision = _precisions(jacobian, found)
    plain = pairs(jacobian.shape, found, precision, jacobian.shape[1])
    cosine = _cosine(jacobian, plan, precision, plain)
    known = None if found is None else [_usable(pair) for pair in found.leading]
    sums: list[SpectralMeasure | None] = [None] * batch
    traces = [NOT_ASKED] * batch
    sampled = plan.spectrum and settings.prior_covariance is None
    if sampled and found is not None:
        sums = _sums(jacobian, factor, plan, settings, found, known)
        failed = Value(math.nan, NOT_FINITE)
        traces = [failed if s is None else _trace(s.trace()) for s in sums]
    elif plan.trace:
        traces = estimated_traces(factor, known)
    lower = [0.0] * batch if found is None else lowers(found, precision)
    inverted, estimated = _given(jacobian, factor, plan, settings, delta, offset, lower)
    results = []
    for i in range(batch):
        parts = (*plain[i], *cosine[i], traces[i])
        if not finite[i] or any(p.status.word == "failed" for p in parts):
            results.append(Found.failed(NOT_FINITE))
            continue
        scale, measure = float(jacobian.scale[i]), sums[i]
        results.append(
            Found(
                lambda_max=times(plain[i][0], scale**2),
                lambda_min=times(plain[i][1], scale**2),
                cos_max=cosine[i][0],
                cos_min=cosine[i][1],
                trace=times(traces[i], scale**2),
                precision=precision[i].scaled(scale**2),
                sums=None if measure is None else measure.scaled(scale**2),
                lower=lower[i] * scale**2,
                inverted=inverted[i],
                estimated=estimated[i],
                scale=scale,
            )
        )
    return results


def _usable(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    values, vectors = pair
    if bool(torch.isfinite(values).all() and torch.isfinite(vectors).all()):
        return pair
    return values[:0], vectors[:, :0]


def _precisions(jacobian: GradientJacobian, found: Ends | None) -> list[Precision]:
    """What rounding of J̃ does; no H is formed that would add to it."""
    batch, _, d_x = jacobian.shape
    if found is None:
        return [Precision()] * batch
    eps = torch.finfo(jacobian.dtype).eps
    tops = found.lambda_max.tolist()
    return [
        Precision(
            factor=max(eps * math.sqrt(d_x * max(top, 0.0)), rounding(jacobian, i))
            if math.isfinite(top)
            else 0.0
        )
        for i, top in enumerate(tops)
    ]


# -- ends ----------------------------------------------------------------------------


def _ends(factor: NormalOperator, plan: Plan, settings: Settings) -> Ends:
    # Σ 1/λ is bounded by λ_min, so an undamped sum needs it as well.
    undamped = plan.spectrum and settings.epsilon == 0
    return ends(
        factor,
        smallest=plan.smallest or undamped,
        tol=_TOL[factor.dtype],
        max_matvecs=plan.products,
    )


def _cosine(
    jacobian: GradientJacobian,
    plan: Plan,
    precision: list[Precision],
    plain: list[tuple[Value, Value]],
) -> list[tuple[Value, Value]]:
    batch, d_theta, d_x = jacobian.shape
    if not plan.cosine:
        return [(NOT_ASKED, NOT_ASKED)] * batch
    # The cosine Hessian lies below H, so where λ_min of H is out of reach, its own is.
    worth = [plan.smallest and low.status.usable for _, low in plain]
    found = ends(
        jacobian.normal(cosine=True),
        smallest=torch.tensor(worth, device=jacobian.device),
        tol=_TOL[jacobian.dtype],
        max_matvecs=plan.products,
    )
    results = []
    for i, (top, low) in enumerate(
        pairs(jacobian.shape, found, precision, d_theta - 1)
    ):
        norm = float(jacobian.norm[i])
        if norm == 0:
            results.append((NO_DIRECTION, NO_DIRECTION))
            continue
        if plan.smallest and not worth[i] and d_theta > d_x:
            low = _below(plain[i][1], low)
        factor = (float(jacobian.scale[i]) / norm) ** 2
        results.append((times(top, factor), times(low, factor)))
    return results


def _below(plain: Value, own: Value) -> Value:
    """λ_min of the cosine Hessian where that of H, which is at least that, isn't known.

    Args:
        plain: of H.
        own: of the cosine Hessian, as far as it is known.
    """
    if plain.status.word != "not converged":
        return plain
    number = min(n for n in (plain.number, own.number) if math.isfinite(n))
    why = "an upper bound: not even the smallest eigenvalue of H is resolved, which is "
    return Value(number, Status("not converged", f"{why}at least that; {REMEDY}"))


# -- sums ----------------------------------------------------------------------------


def estimated_traces(
    factor: NormalOperator, known: list[tuple[Tensor, Tensor]] | None = None
) -> list[Value]:
    """Σλ of each sample in the units of J̃, when no other sum is asked for.

    Args:
        factor: J̃.
        known: leading eigenpairs of each sample.
    """
    values, errors = trace(factor, probes=TRACE_PROBES, known=known)
    pairs = zip(values.tolist(), errors.tolist(), strict=True)
    return [_trace(Estimate(v, e, v, v)) for v, e in pairs]


def _sums(
    jacobian: GradientJacobian,
    factor: NormalOperator,
    plan: Plan,
    settings: Settings,
    found: Ends,
    known: list[tuple[Tensor, Tensor]] | None,
) -> list[SpectralMeasure | None]:
    functions = None
    if not plan.any_noise:
        scales = jacobian.scale.tolist()
        functions = [_functions(settings, 1 / scale**2) for scale in scales]
    return quadrature(
        factor,
        probes=PROBES,
        depth=max(plan.products // PROBES, 2),
        known=known,
        lower=torch.nan_to_num(found.lower),
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


def _trace(found: Estimate) -> Value:
    if not math.isfinite(found.value):
        return Value(math.nan, NOT_FINITE)
    return from_probes(found, found, "Σλ")


# -- a given perturbation ------------------------------------------------------------


def _given(
    jacobian: GradientJacobian,
    factor: NormalOperator,
    plan: Plan,
    settings: Settings,
    delta: Tensor | None,
    offset: Tensor | None,
    lower: list[float],
) -> tuple[list[DampedSolution | None], list[DampedSolution | None]]:
    """(H + εI)⁻¹Jᵀδ, and the error of the best estimator as w − (x − μ).

    The latter minimises ‖J e − δ‖²/s² + ‖e + (x − μ)‖²/R². With w = e + (x − μ) that is
    the damped least-squares problem of J w = δ + J (x − μ), ε = s²/R².
    """
    batch = jacobian.shape[0]
    nothing: list[DampedSolution | None] = [None] * batch
    if delta is None or not plan.spectrum or settings.prior_covariance is not None:
        return nothing, nothing
    unit = 1 / jacobian.scale[:, None]
    b = delta.double() * unit
    least = torch.tensor(lower, dtype=torch.float64)
    inverted = damped(
        factor,
        b,
        epsilons=settings.epsilon * unit**2,
        lower=least,
        max_matvecs=plan.products,
    )
    if offset is None or settings.noise_std is None:
        return inverted, nothing
    estimated = damped(
        factor,
        b + factor.forward(offset.to(jacobian.dtype)).double(),
        epsilons=(settings.noise_std / settings.prior_std * unit) ** 2,
        centre=offset,
        lower=least,
        max_matvecs=plan.products,
    )
    return inverted, estimated
