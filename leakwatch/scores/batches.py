"""Scores in groups of samples that fit memory, one by one when a group fails."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

from jaxtyping import Float
from torch import Tensor

from leakwatch.progress import SCORES, tell
from leakwatch.scores.measure.inputs import ScoreInputs
from leakwatch.scores.measure.measure import measure
from leakwatch.scores.measure.plan import Plan
from leakwatch.scores.measure.sample_spectrum import SampleSpectrum
from leakwatch.scores.registry import Score
from leakwatch.scores.result import Value
from leakwatch.scores.settings import Settings
from leakwatch.status import OK, Status, describe_error

_log = logging.getLogger(__name__)

_GROUP_BYTES = 512 * 2**20


@final
@dataclass(frozen=True, eq=False)
class ScoredSample:
    """What is kept of one sample.

    Attributes:
        values: score name → value.
        eigenvalues: on the CPU; ``None`` when there are none.
        traces: name of a module → its part of Σλ; empty when that is not known.
    """

    values: dict[str, Value]
    eigenvalues: Float[Tensor, " d_x"] | None = None
    traces: dict[str, float] = field(default_factory=dict)


def score_samples(
    inputs: ScoreInputs, scores: Sequence[Score], settings: Settings, plan: Plan
) -> list[ScoredSample]:
    """The scores of each sample, in order.

    Args:
        inputs: the samples.
        scores: the scores.
        settings: noise, prior and pixels.
        plan: what to measure.

    Raises:
        Exception: the first, when every sample failed with one: then it is the network
            or an argument that is at fault, not a sample.
    """

    def scored(which: slice) -> list[ScoredSample]:
        part = inputs.part(which)
        kept = []
        for i, spectrum in enumerate(measure(part, plan, settings)):
            # Later than the first products, which may have settled it.
            doubt = part.jacobian.doubts[i]
            values = {s.name: value_of(s, spectrum, settings) for s in scores}
            for s in scores:
                vanished = s.name == "grad_norm" and spectrum.grad_norm.number == 0
                if s.needs or vanished:
                    values[s.name] = doubted(values[s.name], doubt)
            eigenvalues = spectrum.eigenvalues if doubt.usable else None
            kept.append(
                ScoredSample(
                    values,
                    None if eigenvalues is None else eigenvalues.cpu(),
                    spectrum.traces if doubt.usable else {},
                )
            )
            tell(SCORES, which.start + len(kept), len(inputs))
        return kept

    samples: list[ScoredSample] = []
    errors: list[Exception] = []
    group = max(1, min(plan.group, _GROUP_BYTES // (8 * inputs.gradients.size)))
    for start in range(0, len(inputs), group):
        stop = min(start + group, len(inputs))
        try:
            samples += scored(slice(start, stop))
            continue
        except Exception as error:
            reason = describe_error(error)
            _log.info("leakwatch goes on sample by sample: %s", reason)
        for i in range(start, stop):
            try:
                samples += scored(slice(i, i + 1))
            except Exception as error:
                errors.append(error)
                failed = Value.without("failed", describe_error(error))
                samples.append(ScoredSample({s.name: failed for s in scores}))
    if len(errors) == len(inputs):
        raise errors[0]
    if errors:
        _log.warning(
            "leakwatch could not score %d of %d samples: %s",
            len(errors),
            len(inputs),
            describe_error(errors[0]),
        )
    return samples


def doubted(value: Value, doubt: Status) -> Value:
    """A value that is worth no more than what is known about its derivatives.

    Args:
        value: as computed.
        doubt: what results are worth at most.
    """
    if not doubt.usable and value.status.word != "not computed":
        return Value(math.nan, doubt)
    return Value(value.number, doubt) if value.status == OK else value


def value_of(score: Score, spectrum: SampleSpectrum, settings: Settings) -> Value:
    """A score's value and status, whatever the formula does.

    Args:
        score: the score.
        spectrum: what was measured.
        settings: noise, prior and pixels.
    """
    if spectrum.failure is not None and score.needs:
        return Value(math.nan, spectrum.failure)
    try:
        value = score.compute(spectrum, settings)
    except Exception as error:
        _log.warning("leakwatch could not compute %s: %s", score.name, error)
        return Value.without("failed", describe_error(error))
    if not math.isfinite(value.number) and value.status.usable:
        why = f"the formula gave {value.number}, out of range of floating point"
        return Value(math.nan, Status("failed", why))
    if math.isinf(value.number):
        return Value(math.nan, value.status)
    return value
