"""Loss and norms: the baselines that every other score should beat."""

from __future__ import annotations

import functools
import math

from leakwatch.scores.measure.sample_spectrum import SampleSpectrum
from leakwatch.scores.registry import scored
from leakwatch.scores.result import Value, judged
from leakwatch.scores.settings import Settings

_norm = functools.partial(scored, "norms", direction="higher = more exposed")


@_norm(
    unit="gradient",
    meaning="Norm of the shared gradient; near zero, any noise hides the image.",
    source="common heuristic, e.g. Geiping et al. 2020; a baseline",
)
def grad_norm(spectrum: SampleSpectrum, settings: Settings) -> Value:
    """‖g‖, the norm of the sample's gradient."""
    return spectrum.grad_norm


@_norm(
    needs={"trace"},
    unit="gradient / pixel",
    meaning="How strongly the gradient reacts to the image, over all directions.",
    source="Mo et al. 2021 (EuroS&P), sensitivity; a baseline",
)
def jacobian_norm(spectrum: SampleSpectrum, settings: Settings) -> Value:
    """‖J‖_F = √Σλ_i (Mo et al. 2021)."""
    return root(spectrum.trace)


@_norm(
    unit="nat",
    meaning="Loss of the sample; where it vanishes, so does the shared gradient.",
    source="a baseline",
)
def loss(spectrum: SampleSpectrum, settings: Settings) -> Value:
    """The sample's own loss; a confident sample shares a small gradient."""
    return spectrum.loss


def root(value: Value) -> Value:
    """√ of a value that can't be negative; what rounding did to it shrinks too.

    Example:
        >>> value = judged(4.0, 2.56, 5.76, "Σλ")
        >>> value.status.reason.split("; ")[0]
        'rounding may have changed it by up to 44 %'
        >>> root(value).status.reason.split("; ")[0]
        'rounding may have changed it by up to 20 %'
    """
    if math.isnan(value.number):
        return value
    number = _root(value.number)
    if value.ends is None:
        return Value(number, value.status)
    low, high = map(_root, value.ends)
    return judged(number, low, high, "it")


def _root(number: float) -> float:
    return math.sqrt(max(number, 0.0))
