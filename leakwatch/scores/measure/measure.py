"""One pass over the samples that serves every score asked for."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from leakwatch.derivatives.jacobian import GradientJacobian
from leakwatch.scores.measure.dense import from_matrix
from leakwatch.scores.measure.found import (
    NO_DIRECTION,
    NOT_ASKED,
    NOT_FINITE,
    Found,
    rounding,
    times,
)
from leakwatch.scores.measure.influence_path import InfluencePath, follow
from leakwatch.scores.measure.matrix_free import estimated_traces, iterate
from leakwatch.scores.measure.plan import Plan
from leakwatch.scores.measure.sample_spectrum import Evidence
from leakwatch.scores.result import Value, judged
from leakwatch.scores.settings import Settings
from leakwatch.spectrum import Spectrum, power
from leakwatch.status import Status, describe_error

_log = logging.getLogger(__name__)

_POWER_ITERATIONS = 50


def measure(
    jacobian: GradientJacobian,
    plan: Plan,
    settings: Settings,
    *,
    losses: Float[Tensor, " batch"],
    delta: Float[Tensor, "batch d_theta"] | None = None,
    offset: Float[Tensor, "batch d_x"] | None = None,
) -> Iterator[Evidence]:
    """Evidence of each sample in turn.

    Args:
        jacobian: of the samples.
        plan: what to measure.
        settings: noise, damping and prior.
        losses: of the samples.
        delta: perturbations of the gradients, if any.
        offset: x − μ, float64, pixel units.

    Yields:
        One :class:`Evidence` per sample, in order. A sample that can't be measured has
        a ``failure``; the others are unaffected.
    """
    batch, d_theta, d_x = jacobian.shape
    # scale in float64: J itself may be below the range of float32.
    pulled = None
    if delta is not None:
        pulled = jacobian.normalized_rmatvec(delta).double() * jacobian.scale[:, None]
    largest = [0.0] * batch if delta is None else delta.abs().amax(1).tolist()
    finite = torch.isfinite(jacobian.norm)
    found: Iterator[Found]
    if plan.solver == "exact":
        found = (_exact(jacobian, i, plan, bool(finite[i])) for i in range(batch))
    elif plan.solver == "lanczos":
        found = iter(iterate(jacobian, plan, settings, delta=delta, offset=offset))
    else:
        found = iter(_power(jacobian, plan, finite))
    for i, known in enumerate(found):
        failure = known.failure
        if pulled is not None and not bool(torch.isfinite(pulled[i]).all()):
            failure = failure or NOT_FINITE
        yield Evidence(
            d_x=d_x,
            loss=_finite(float(losses[i]), "loss"),
            grad_norm=_finite(
                float(jacobian.norm[i]) if known.norm is None else known.norm,
                "gradient",
            ),
            lambda_max=known.lambda_max,
            lambda_min=known.lambda_min,
            cos_max=known.cos_max,
            cos_min=known.cos_min,
            trace=known.trace,
            traces=known.traces,
            eigenvalues=known.eigenvalues,
            precision=known.precision,
            rank=min(d_theta, d_x),
            eigenvectors=known.eigenvectors,
            pulled=None if pulled is None else pulled[i],
            # Entries of J err independently, so errors add up as if at random.
            pulled_error=known.precision.factor * largest[i],
            offset=None if offset is None else offset[i],
            why_no_spectrum=(
                f"needs the whole spectrum{_full_prior(plan, settings)}, but the "
                f"solver is {plan.solver} ({plan.reason})"
            ),
            failure=failure,
            sums=known.sums,
            lower=known.lower,
            inverted=known.inverted,
            estimated=known.estimated,
            scale=known.scale,
            path=_path(jacobian, i, plan, settings, known, delta, offset),
        )


def _path(
    jacobian: GradientJacobian,
    sample: int,
    plan: Plan,
    settings: Settings,
    known: Found,
    delta: Tensor | None,
    offset: Tensor | None,
) -> InfluencePath | Status | None:
    """The integrated error, where it was asked for and the sample can be measured."""
    wanted = settings.influence_steps > 1 and settings.noise_std is not None
    wanted &= plan.eigenvectors
    if not wanted or delta is None or offset is None or known.failure is not None:
        return None
    try:
        return follow(
            jacobian,
            sample,
            settings,
            delta=delta[sample],
            offset=offset[sample],
            max_memory=plan.max_memory,
        )
    except Exception as error:
        # Other scores of this sample don't need the images on the way.
        return Status("failed", describe_error(error))


def _full_prior(plan: Plan, settings: Settings) -> str:
    given = plan.solver == "lanczos" and settings.prior_covariance is not None
    return " for a full prior covariance" if given else ""


def _finite(number: float, what: str) -> Value:
    if math.isfinite(number):
        return Value(number)
    return Value.without("failed", f"the {what} of this sample is not finite")


# -- one Gram matrix -----------------------------------------------------------------


def _exact(jacobian: GradientJacobian, sample: int, plan: Plan, finite: bool) -> Found:
    if not finite:
        return Found.failed(NOT_FINITE)
    try:
        return _dense(jacobian, sample, plan)
    except Exception as error:
        _log.warning("leakwatch could not score a sample: %s", describe_error(error))
        return Found.failed(Status("failed", describe_error(error)))


def _dense(jacobian: GradientJacobian, sample: int, plan: Plan) -> Found:
    gram = jacobian.gram(sample, max_memory=plan.max_memory)
    scale = float(jacobian.scale[sample])
    return from_matrix(
        gram.h,
        scale=scale,
        d_theta=jacobian.shape[1],
        eps=torch.finfo(jacobian.dtype).eps,
        rounding=rounding(jacobian, sample),
        along=gram.along if plan.cosine else None,
        norm=gram.norm * scale,
        eigenvectors=plan.eigenvectors,
        traces=gram.traces,
    )


# -- power iteration -----------------------------------------------------------------


def _power(jacobian: GradientJacobian, plan: Plan, finite: Tensor) -> list[Found]:
    batch, d_theta, d_x = jacobian.shape
    nothing = [(NOT_ASKED, NOT_ASKED)] * batch
    plain = cosine = nothing
    if plan.largest:
        spectrum = _solve(jacobian, plan, cosine=False)
        measured = [rounding(jacobian, i) for i in range(batch)]
        off = spectrum.floor.new_tensor(measured)
        floor = spectrum.floor + off * (2 * spectrum.lambda_max.abs().sqrt() + off)
        plain = _judge(spectrum, plan, floor, d_theta < d_x)
        if plan.cosine:
            spectrum = _solve(jacobian, plan, cosine=True)
            # The products that it subtracts from are those of H.
            floor = torch.maximum(floor, spectrum.floor)
            cosine = _judge(spectrum, plan, floor, d_theta - 1 < d_x)
    traces = [NOT_ASKED] * batch
    if plan.trace:
        traces = estimated_traces(jacobian.normal())
    found = []
    for i in range(batch):
        squared, norm = float(jacobian.scale[i]) ** 2, float(jacobian.norm[i])
        values = [*plain[i], *cosine[i], traces[i]]
        failed = [v.status for v in values if v.status.word == "failed"]
        if not bool(finite[i]):
            failed.insert(0, NOT_FINITE)
        if failed:
            found.append(Found.failed(failed[0]))
            continue
        towards = (NO_DIRECTION, NO_DIRECTION)
        if norm > 0 or not plan.cosine:
            factor = squared / norm**2 if norm > 0 else 1.0
            towards = times(cosine[i][0], factor), times(cosine[i][1], factor)
        found.append(
            Found(
                lambda_max=times(plain[i][0], squared),
                lambda_min=times(plain[i][1], squared),
                cos_max=towards[0],
                cos_min=towards[1],
                trace=times(traces[i], squared),
            )
        )
    return found


def _solve(jacobian: GradientJacobian, plan: Plan, *, cosine: bool) -> Spectrum:
    operator = jacobian.normal(cosine=cosine)
    return power(operator, iterations=_POWER_ITERATIONS, smallest=plan.smallest)


def _judge(
    spectrum: Spectrum, plan: Plan, floor: Tensor, zero_by_dimension: bool
) -> list[tuple[Value, Value]]:
    """Largest and smallest eigenvalue of each sample."""
    bottoms = [NOT_ASKED] * len(spectrum)
    if plan.smallest:
        lower = "an upper bound, usually 20 to 100 times too large; use solver='exact'"
        bottoms = [
            _one(number, residual, converged, base, lower)
            for number, residual, converged, base in zip(
                spectrum.lambda_min.tolist(),
                spectrum.lambda_min_residual.tolist(),
                spectrum.lambda_min_converged.tolist(),
                floor.tolist(),
                strict=True,
            )
        ]
    tops = [
        _one(number, residual, converged, base, "a lower bound; use solver='exact'")
        for number, residual, converged, base in zip(
            spectrum.lambda_max.tolist(),
            spectrum.residuals[:, 0].tolist(),
            spectrum.converged[:, 0].tolist(),
            floor.tolist(),
            strict=True,
        )
    ]
    if zero_by_dimension and plan.smallest:
        bottoms = [Value(0.0)] * len(spectrum)
    return list(zip(tops, bottoms, strict=True))


def _one(
    number: float, residual: float, converged: bool, floor: float, bound: str
) -> Value:
    if not math.isfinite(number):
        return Value(math.nan, NOT_FINITE)
    if not converged:
        reason = f"residual {residual:.1e} ({residual / max(number, 1e-300):.0e} of it)"
        return Value(number, Status("not converged", f"{reason}; {bound}"))
    return judged(
        number, number - residual - floor, number + residual + floor, "this eigenvalue"
    )
