"""The papers' way: both ends of the spectrum by 50 power iterations each."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from leakwatch.scores.measure.inputs import ScoreInputs
from leakwatch.scores.measure.plan import Plan
from leakwatch.scores.measure.sample_spectrum import (
    NO_DIRECTION,
    NOT_ASKED,
    NOT_FINITE,
    SampleSpectrum,
)
from leakwatch.scores.measure.sampled import estimated_traces
from leakwatch.scores.result import Value, judged
from leakwatch.spectrum import Spectrum, power
from leakwatch.status import Status

__all__ = ["from_power"]

ITERATIONS = 50


def from_power(inputs: ScoreInputs, plan: Plan) -> Iterator[SampleSpectrum]:
    """Ends of the spectra of H and of the cosine Hessian (LAVP, "Implementation").

    Args:
        inputs: the samples.
        plan: what to measure.
    """
    jacobian = inputs.jacobian
    batch, d_theta, d_x = jacobian.shape
    plain = cosine = [(NOT_ASKED, NOT_ASKED)] * batch
    if plan.largest:
        spectrum = _solve(inputs, plan, cosine=False)
        off = spectrum.floor.new_tensor(inputs.rounding())
        floor = spectrum.floor + off * (2 * spectrum.lambda_max.abs().sqrt() + off)
        plain = _ends(spectrum, plan, floor, d_theta < d_x)
        if plan.cosine:
            spectrum = _solve(inputs, plan, cosine=True)
            # The products that it subtracts from are those of H.
            floor = torch.maximum(floor, spectrum.floor)
            cosine = _ends(spectrum, plan, floor, d_theta - 1 < d_x)
    traces = [NOT_ASKED] * batch
    if plan.trace:
        traces = estimated_traces(jacobian.normal())
    for i in range(batch):
        squared, norm = float(jacobian.scale[i]) ** 2, float(jacobian.norm[i])
        failed = [
            value.status
            for value in (*plain[i], *cosine[i], traces[i])
            if value.status.word == "failed"
        ]
        if not math.isfinite(norm):
            failed.insert(0, NOT_FINITE)
        if failed:
            yield SampleSpectrum.failed(failed[0])
            continue
        towards = (NO_DIRECTION, NO_DIRECTION)
        if norm > 0 or not plan.cosine:
            factor = squared / norm**2 if norm > 0 else 1.0
            towards = cosine[i][0].times(factor), cosine[i][1].times(factor)
        yield SampleSpectrum(
            lambda_max=plain[i][0].times(squared),
            lambda_min=plain[i][1].times(squared),
            cos_max=towards[0],
            cos_min=towards[1],
            trace=traces[i].times(squared),
        )


def _solve(inputs: ScoreInputs, plan: Plan, *, cosine: bool) -> Spectrum:
    operator = inputs.jacobian.normal(cosine=cosine)
    return power(operator, iterations=ITERATIONS, smallest=plan.smallest)


def _ends(
    spectrum: Spectrum, plan: Plan, floor: Tensor, zero_by_dimension: bool
) -> list[tuple[Value, Value]]:
    """Largest and smallest eigenvalue of each sample."""
    tops = _judged(
        spectrum.lambda_max,
        spectrum.residuals[:, 0],
        spectrum.converged[:, 0],
        floor,
        "a lower bound; use solver='exact'",
    )
    bottoms = [NOT_ASKED] * len(spectrum)
    if plan.smallest and zero_by_dimension:
        bottoms = [Value(0.0)] * len(spectrum)
    elif plan.smallest:
        bottoms = _judged(
            spectrum.lambda_min,
            spectrum.lambda_min_residual,
            spectrum.lambda_min_converged,
            floor,
            "an upper bound, usually 20 to 100 times too large; use solver='exact'",
        )
    return list(zip(tops, bottoms, strict=True))


def _judged(
    numbers: Tensor, residuals: Tensor, converged: Tensor, floor: Tensor, bound: str
) -> list[Value]:
    return [
        _one(number, residual, settled, error, bound)
        for number, residual, settled, error in zip(
            numbers.tolist(),
            residuals.tolist(),
            converged.tolist(),
            floor.tolist(),
            strict=True,
        )
    ]


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
