"""The matrix-free way: products with J and Jᵀ alone, for a J that can't be formed.

Up to four tasks share what they find: the ends of the spectrum of H (whose leading
eigenvectors serve the next ones), those of the cosine Hessian, sums over the spectrum
by stochastic quadrature, and the two damped inverses when a perturbation is given. All
samples of a group advance together; none depends on which others are there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from leakwatch.scores.measure.components import (
    COUNTS,
    Components,
    leading_components,
)
from leakwatch.scores.measure.dense import SMALLEST
from leakwatch.scores.measure.inputs import ScoreInputs
from leakwatch.scores.measure.plan import Plan
from leakwatch.scores.measure.sample_spectrum import (
    NO_DIRECTION,
    NOT_ASKED,
    NOT_FINITE,
    Precision,
    SampleSpectrum,
)
from leakwatch.scores.measure.sampled import (
    estimated_traces,
    sampled_spectra,
    trace_of,
)
from leakwatch.scores.result import ACCURATE, REMEDY, Value, judged
from leakwatch.scores.settings import Settings
from leakwatch.spectrum import DampedSolution, Ends, SpectralMeasure, damped, ends
from leakwatch.status import Status

__all__ = ["end_values", "from_products"]

# The products' own rounding keeps float32 residuals above 1e-7 to 1e-5.
_TOL = {torch.float32: 1e-4, torch.float64: 1e-8}
# Where the products ran out before the tolerance: a residual good enough for a score.
_ENOUGH = 1e-4
# Along components of the prior; each is at most one product with J.
_TANGENTS = 3
# At worst all errors lie along one direction: a random one sees less than a thousandth
# of them once in 1,000 times.
_UNSEEN = 1e3


def from_products(
    inputs: ScoreInputs, plan: Plan, settings: Settings
) -> Iterator[SampleSpectrum]:
    """What products tell about each sample.

    Args:
        inputs: the samples.
        plan: what to measure, and how many products each task may take.
        settings: noise, damping and prior, which say how far quadrature has to go.
    """
    jacobian = inputs.jacobian
    batch, d_theta, d_x = jacobian.shape
    jacobian.products.most_held = min(plan.held, jacobian.products.most_held)
    plain = cosine = [(NOT_ASKED, NOT_ASKED)] * batch
    traces = [NOT_ASKED] * batch
    precision = [Precision()] * batch
    lower = [0.0] * batch
    sums: list[SpectralMeasure | None] = [None] * batch
    sampled = plan.spectrum
    leading = None
    if plan.largest or plan.spectrum:
        extremes = _ends(inputs, plan, settings)
        leading = [_usable(pair) for pair in extremes.leading]
        zero = d_theta < d_x
        one = _largest_alone(inputs, plan)
        precision = _precision(inputs, extremes, one=one)
        plain = end_values(extremes, precision, zero=zero)
        doubtful = [i for i, (top, _) in enumerate(plain) if top.status.word != "ok"]
        if one and doubtful:
            better = _precision(inputs, extremes, doubtful, one=False)
            for i, found in zip(doubtful, better, strict=True):
                precision[i] = found
            plain = end_values(extremes, precision, zero=zero)
        lower = _lower_bounds(extremes, precision)
        if plan.cosine:
            cosine = _cosine_ends(inputs, plan, precision, plain)
        if sampled:
            sums = sampled_spectra(jacobian, plan, settings, extremes, leading)
            traces = [trace_of(measure) for measure in sums]
    components: list[Components] | list[None] = [None] * batch
    if plan.spectrum and settings.prior is not None:
        components = leading_components(
            jacobian,
            settings.prior,
            None if plan.any_noise else settings.noise_std,
            max_memory=plan.max_memory,
            data_range=settings.data_range,
            counts=[min(n, _TANGENTS * plan.products) for n in COUNTS],
        )
    if plan.trace and not sampled:
        traces = estimated_traces(jacobian.normal(), leading)
    inverted, estimated = _inverses(inputs, plan, settings, lower)
    for i in range(batch):
        values = (*plain[i], *cosine[i], traces[i])
        scale, measure = float(jacobian.scale[i]), sums[i]
        finite = math.isfinite(float(jacobian.norm[i]))
        if not finite or any(value.status.word == "failed" for value in values):
            yield SampleSpectrum.failed(NOT_FINITE)
            continue
        yield SampleSpectrum(
            lambda_max=plain[i][0].times(scale**2),
            lambda_min=plain[i][1].times(scale**2),
            cos_max=cosine[i][0],
            cos_min=cosine[i][1],
            trace=traces[i].times(scale**2),
            precision=precision[i].scaled(scale**2),
            components=components[i],
            sums=None if measure is None else measure.scaled(scale**2),
            lower=lower[i] * scale**2,
            inverted=inverted[i],
            estimated=estimated[i],
            scale=scale,
        )


def _largest_alone(inputs: ScoreInputs, plan: Plan) -> bool:
    """Whether nothing is asked of the spectrum but λ_1, which rounding hardly moves."""
    others = plan.smallest or plan.cosine or plan.spectrum or plan.trace
    return not others and inputs.delta is None


def _precision(
    inputs: ScoreInputs,
    extremes: Ends,
    rows: Sequence[int] | None = None,
    *,
    one: bool,
) -> list[Precision]:
    """What rounding does to J̃ of each sample.

    Args:
        inputs: the samples.
        extremes: of their spectra.
        rows: positions of the samples; default: all.
        one: measured along one direction, at a third of the cost, which sees so little
            of an error that it has to count :data:`_UNSEEN` times.
    """
    jacobian = inputs.jacobian
    eps, d_x = torch.finfo(jacobian.dtype).eps, jacobian.shape[2]
    tops = extremes.lambda_max if rows is None else extremes.lambda_max[list(rows)]
    measured = inputs.rounding(rows, directions=1 if one else 3)
    return [
        Precision.of_products(top, d_x, eps, error * (_UNSEEN if one else 1.0))
        if math.isfinite(top)
        else Precision()
        for top, error in zip(tops.tolist(), measured, strict=True)
    ]


def _usable(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    values, vectors = pair
    if bool(torch.isfinite(values).all() and torch.isfinite(vectors).all()):
        return pair
    return values[:0], vectors[:, :0]


# -- ends ----------------------------------------------------------------------------


def _ends(inputs: ScoreInputs, plan: Plan, settings: Settings) -> Ends:
    # Σ 1/λ is bounded by λ_min, so an undamped sum needs it as well.
    undamped = plan.spectrum and settings.epsilon == 0
    return ends(
        inputs.jacobian.normal(),
        smallest=plan.smallest or undamped,
        tol=_TOL[inputs.jacobian.dtype],
        max_matvecs=plan.products,
    )


def _cosine_ends(
    inputs: ScoreInputs,
    plan: Plan,
    precision: Sequence[Precision],
    plain: Sequence[tuple[Value, Value]],
) -> list[tuple[Value, Value]]:
    jacobian = inputs.jacobian
    _, d_theta, d_x = jacobian.shape
    # The cosine Hessian lies below H, so where λ_min of H is out of reach, its own is.
    worth = [plan.smallest and low.status.usable for _, low in plain]
    extremes = ends(
        jacobian.normal(cosine=True),
        smallest=torch.tensor(worth, device=jacobian.device),
        tol=_TOL[jacobian.dtype],
        max_matvecs=plan.products,
    )
    values = []
    for i, (top, low) in enumerate(
        end_values(extremes, precision, zero=d_theta <= d_x)
    ):
        norm = float(jacobian.norm[i])
        if norm == 0:
            values.append((NO_DIRECTION, NO_DIRECTION))
            continue
        if plan.smallest and not worth[i] and d_theta > d_x:
            low = _below(plain[i][1], low)
        factor = (float(jacobian.scale[i]) / norm) ** 2
        values.append((top.times(factor), low.times(factor)))
    return values


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


def end_values(
    extremes: Ends, precision: Sequence[Precision], *, zero: bool
) -> list[tuple[Value, Value]]:
    """Largest and smallest eigenvalue of each sample, in the units of J̃.

    Args:
        extremes: what products said.
        precision: what rounding does to J̃ of each sample.
        zero: whether the smallest eigenvalue is zero because J̃ has too few rows.
    """
    return [
        (
            _largest(extremes, i, precision[i]),
            Value(0.0) if zero else _smallest(extremes, i, precision[i]),
        )
        for i in range(len(precision))
    ]


def _largest(extremes: Ends, i: int, precision: Precision) -> Value:
    number, residual = float(extremes.lambda_max[i]), float(extremes.residual[i])
    if not math.isfinite(number):
        return Value(math.nan, NOT_FINITE)
    if not bool(extremes.converged[i]) and residual > _ENOUGH * number:
        share = residual / max(number, 1e-300)
        reason = (
            f"residual {residual:.1e} ({share:.0e} of it) after "
            f"{int(extremes.matvecs[i])} products; a lower bound; {REMEDY}"
        )
        return Value(number, Status("not converged", reason))
    wide = residual + 2 * precision.factor * math.sqrt(number) + precision.factor**2
    return judged(number, number - wide, number + wide, "this eigenvalue")


def _smallest(extremes: Ends, i: int, precision: Precision) -> Value:
    number = float(extremes.smallest[i])
    if not math.isfinite(number):
        return Value(math.nan, NOT_FINITE)
    low, high = _rounded(float(extremes.lower[i]), float(extremes.upper[i]), precision)
    if max(high - number, number - low) <= ACCURATE * number:
        return Value(number)
    rounded = judged(number, *_rounded(number, number, precision), SMALLEST)
    if rounded.status.word == "unresolved":
        return rounded
    reason = (
        f"an upper bound: it is between {low / number:.2g} and {high / number:.3g} "
        f"times this after {int(extremes.matvecs[i])} products (Golub–Kahan; the lower "
        f"end holds with 99.9 % probability); {REMEDY}"
    )
    # An upper bound is within 100 % of itself whatever the truth is.
    word = "estimated" if 2 * low >= number else "not converged"
    return Value(number, Status(word, reason))


def _lower_bounds(extremes: Ends, precision: Sequence[Precision]) -> list[float]:
    """Lower bounds of λ_min of each sample, in the units of J̃."""
    return [
        _rounded(low, low, one)[0] if math.isfinite(low) else 0.0
        for low, one in zip(extremes.lower.tolist(), precision, strict=True)
    ]


def _rounded(low: float, high: float, precision: Precision) -> tuple[float, float]:
    """The interval of an eigenvalue with what rounding of J̃ may have done to it."""
    error = precision.factor
    if not math.isfinite(error):
        return 0.0, math.inf
    return max(math.sqrt(low) - error, 0.0) ** 2, (math.sqrt(high) + error) ** 2


# -- a given perturbation ------------------------------------------------------------


def _inverses(
    inputs: ScoreInputs, plan: Plan, settings: Settings, lower: Sequence[float]
) -> tuple[list[DampedSolution | None], list[DampedSolution | None]]:
    """(H + εI)⁻¹Jᵀδ, and the error of the best estimator as w − (x − μ).

    The latter minimises ‖J e − δ‖²/s² + ‖e + (x − μ)‖²/R². With w = e + (x − μ) that is
    the damped least-squares problem of J w = δ + J (x − μ), ε = s²/R².
    """
    jacobian, delta, offset = inputs.jacobian, inputs.delta, inputs.offset
    nothing: list[DampedSolution | None] = [None] * len(inputs)
    if delta is None or not plan.spectrum or settings.prior is not None:
        return nothing, nothing
    factor = jacobian.normal()
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
