"""One pass over the samples that serves every score asked for."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import replace

from leakwatch.scores.measure.dashboard import from_components
from leakwatch.scores.measure.dense import from_gram
from leakwatch.scores.measure.influence_path import InfluencePath, follow
from leakwatch.scores.measure.inputs import ScoreInputs
from leakwatch.scores.measure.matrix_free import from_products
from leakwatch.scores.measure.plan import Plan
from leakwatch.scores.measure.power_iteration import from_power
from leakwatch.scores.measure.sample_spectrum import SampleSpectrum
from leakwatch.scores.result import Value
from leakwatch.scores.settings import Settings
from leakwatch.status import Status, describe_error


def measure(
    inputs: ScoreInputs, plan: Plan, settings: Settings
) -> Iterator[SampleSpectrum]:
    """What the plan asks for, of each sample in turn.

    Args:
        inputs: the samples.
        plan: what to measure.
        settings: noise, damping and prior.

    Yields:
        One :class:`SampleSpectrum` per sample, in order. A sample that can't be
        measured has a ``failure``; the others are unaffected.
    """
    jacobian, delta = inputs.jacobian, inputs.delta
    _, d_theta, d_x = jacobian.shape
    if delta is not None:
        # scale in float64: J itself may be below the range of float32.
        pulled = jacobian.normalized_rmatvec(delta).double() * jacobian.scale[:, None]
        largest = delta.abs().amax(1).tolist()
    why = (
        f"needs the whole spectrum{_full_prior(plan, settings)}, but the "
        f"solver is {plan.solver} ({plan.reason})"
    )
    for i, spectrum in enumerate(_solved(inputs, plan, settings)):
        if delta is not None:
            offset = None if inputs.offset is None else inputs.offset[i]
            path = _path(inputs, i, plan, settings, spectrum)
            spectrum = spectrum.perturbed(pulled[i], offset, largest[i])
            spectrum = replace(spectrum, path=path)
        norm = spectrum.grad_norm
        # What the layers say is not g where a hook changes gradients between them.
        if not norm.status.usable or not jacobian.doubts[i].usable:
            norm = Value(float(jacobian.norm[i]))
        yield replace(
            spectrum,
            d_x=d_x,
            rank=min(d_theta, d_x),
            loss_of=functools.partial(_loss, inputs, i),
            grad_norm=_finite(norm.number, "gradient"),
            why_no_spectrum=why,
        )


def _solved(
    inputs: ScoreInputs, plan: Plan, settings: Settings
) -> Iterator[SampleSpectrum]:
    if plan.solver == "exact":
        return from_gram(inputs, plan)
    if plan.solver == "components":
        return from_components(inputs, plan, settings)
    if plan.solver == "lanczos":
        return from_products(inputs, plan, settings)
    return from_power(inputs, plan)


def _path(
    inputs: ScoreInputs,
    sample: int,
    plan: Plan,
    settings: Settings,
    spectrum: SampleSpectrum,
) -> InfluencePath | Status | None:
    """The integrated error, where it was asked for and the sample can be measured."""
    wanted = settings.influence_steps > 1 and settings.noise_std is not None
    if not (wanted and plan.eigenvectors) or spectrum.failure is not None:
        return None
    if inputs.delta is None or inputs.offset is None:
        return None
    try:
        return follow(
            inputs.jacobian,
            sample,
            settings,
            delta=inputs.delta[sample],
            offset=inputs.offset[sample],
            max_memory=plan.max_memory,
        )
    except Exception as error:
        # Other scores of this sample don't need the images on the way.
        return Status("failed", describe_error(error))


def _full_prior(plan: Plan, settings: Settings) -> str:
    correlated = plan.solver == "lanczos" and settings.prior is not None
    return " for a full prior covariance" if correlated else ""


def _loss(inputs: ScoreInputs, sample: int) -> Value:
    return _finite(float(inputs.losses[sample]), "loss")


def _finite(number: float, what: str) -> Value:
    if math.isfinite(number):
        return Value(number)
    return Value.without("failed", f"the {what} of this sample is not finite")
