"""Scores in groups of samples that fit memory, one by one when a group fails."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from leakwatch.derivatives import GradientMap
from leakwatch.derivatives.jacobian import GradientJacobian
from leakwatch.scores.measure.measure import measure
from leakwatch.scores.measure.plan import Plan
from leakwatch.scores.measure.sample_spectrum import Evidence
from leakwatch.scores.registry import Score
from leakwatch.scores.result import Value
from leakwatch.scores.settings import Settings
from leakwatch.status import Status, describe_error

_log = logging.getLogger(__name__)

_GROUP_BYTES = 512 * 2**20


@final
@dataclass(frozen=True, eq=False)
class Row:
    """What is kept of one sample.

    Attributes:
        values: score name → value.
        eigenvalues: on the CPU; ``None`` when there are none.
        traces: name of a module → its part of Σλ; empty when that is not known.
    """

    values: dict[str, Value]
    eigenvalues: Float[Tensor, " d_x"] | None = None
    traces: dict[str, float] = field(default_factory=dict)


def collect(
    gradients: GradientMap,
    x: Float[Tensor, "batch ..."],
    y: Int[Tensor, " batch"],
    scores: Sequence[Score],
    settings: Settings,
    plan: Plan,
    *,
    input_scale: Float[Tensor, " d_x"] | None,
    offset: Float[Tensor, "batch d_x"] | None,
    delta: Float[Tensor, "batch d_theta"] | None,
) -> list[Row]:
    """One row per sample, in order.

    Args:
        gradients: the gradient map.
        x: network inputs.
        y: labels.
        scores: the scores.
        settings: noise, prior and pixels.
        plan: what to measure.
        input_scale: d(input)/d(pixel).
        offset: x − μ in pixel units.
        delta: perturbations.

    Raises:
        Exception: the first, when every sample failed with one: then it is the network
            or an argument that is at fault, not a sample.
    """

    def rows_of(part: slice) -> list[Row]:
        jacobian = GradientJacobian(
            gradients, x[part], y[part], input_scale=input_scale
        )
        evidence = measure(
            jacobian,
            plan,
            settings,
            losses=sample_losses(gradients, x[part], y[part]),
            delta=None if delta is None else delta[part],
            offset=None if offset is None else offset[part],
        )
        return [_row(e, scores, settings) for e in evidence]

    rows: list[Row] = []
    errors: list[Exception] = []
    group = max(1, _GROUP_BYTES // (8 * gradients.size))
    for start in range(0, len(x), group):
        part = slice(start, min(start + group, len(x)))
        try:
            rows += rows_of(part)
            continue
        except Exception as error:
            reason = describe_error(error)
            _log.info("leakwatch goes on sample by sample: %s", reason)
        for i in range(part.start, part.stop):
            try:
                rows += rows_of(slice(i, i + 1))
            except Exception as error:
                errors.append(error)
                failed = Value.without("failed", describe_error(error))
                rows.append(Row({s.name: failed for s in scores}))
    if len(errors) == len(x):
        raise errors[0]
    if errors:
        _log.warning(
            "leakwatch could not score %d of %d samples: %s",
            len(errors),
            len(x),
            describe_error(errors[0]),
        )
    return rows


def sample_losses(
    gradients: GradientMap, x: Float[Tensor, "batch ..."], y: Int[Tensor, " batch"]
) -> Float[Tensor, " batch"]:
    """The loss of each sample, whatever the rest of the batch."""
    # One by one: the last digit of a batched loss depends on the rest of the batch.
    return torch.cat(
        [gradients.losses(x[i : i + 1], y[i : i + 1]) for i in range(len(x))]
    )


def _row(evidence: Evidence, scores: Sequence[Score], settings: Settings) -> Row:
    lam = evidence.eigenvalues
    return Row(
        values={s.name: value_of(s, evidence, settings) for s in scores},
        eigenvalues=None if lam is None else lam.cpu(),
        traces=evidence.traces,
    )


def value_of(score: Score, evidence: Evidence, settings: Settings) -> Value:
    """A score's value and status, whatever the formula does.

    Args:
        score: the score.
        evidence: what is known.
        settings: noise, prior and pixels.
    """
    if evidence.failure is not None and score.needs:
        return Value(math.nan, evidence.failure)
    try:
        value = score.compute(evidence, settings)
    except Exception as error:
        _log.warning("leakwatch could not compute %s: %s", score.name, error)
        return Value.without("failed", describe_error(error))
    if not math.isfinite(value.number) and value.status.usable:
        why = f"the formula gave {value.number}, out of range of floating point"
        return Value(math.nan, Status("failed", why))
    if math.isinf(value.number):
        return Value(math.nan, value.status)
    return value
