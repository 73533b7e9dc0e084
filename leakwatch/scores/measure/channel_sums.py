"""The Gaussian channel's scores where the spectrum is known through random starts."""

from __future__ import annotations

import math

import torch

from leakwatch.scores.measure.sample_spectrum import Evidence
from leakwatch.scores.measure.sampled import REMEDY, from_probes
from leakwatch.scores.result import Value
from leakwatch.scores.settings import Settings
from leakwatch.spectrum import Estimate


def sampled_error(evidence: Evidence, settings: Settings, noise_std: float) -> Value:
    """√Σ s²R²/(s² + λ_iR²), or the error for the δ at hand.

    Args:
        evidence: of the sample, with ``sums``.
        settings: the prior, isotropic.
        noise_std: s.
    """
    shift = (noise_std / settings.prior_std) ** 2
    if evidence.pulled is not None:
        if evidence.offset is None:
            return Value.without(
                "not computed",
                "the error for a given delta needs the offset x − μ too",
            )
        return evidence.of_solution(evidence.estimated, shift)
    return evidence.of_sums(
        lambda lam: noise_std**2 / (lam + shift), "i2f_bayes", transform=math.sqrt
    )


def sampled_bits(evidence: Evidence, settings: Settings, noise_std: float) -> Value:
    """½ Σ log₂(1 + λ_iR²/s²)."""
    shift = (noise_std / settings.prior_std) ** 2
    return evidence.of_sums(
        lambda lam: torch.log1p(lam / shift),
        "leaked_bits",
        transform=lambda total: total / (2 * math.log(2)),
    )


def sampled_noise(evidence: Evidence, settings: Settings, wanted: float) -> Value:
    """The s at which Σ s²R²/(s² + λ_iR²) is ``wanted``.

    Its errors are those of the sum there, over the slope of the sum.

    Args:
        evidence: of the sample, with ``sums``.
        settings: the prior, isotropic.
        wanted: a squared error below that of the prior alone.
    """
    sums, spread = evidence.sums, settings.prior_std**2
    if sums is None:
        return evidence.no_spectrum()
    if (evidence.d_x - evidence.rank) * spread >= wanted:
        return Value(0.0)

    def at(log_shift: float, *, rounded: bool = False) -> Estimate:
        shift = math.exp(log_shift)
        return sums.estimate(
            lambda lam: spread * shift / (lam + shift),
            spread=(lambda nodes: evidence.precision.bounds(nodes, len(nodes)))
            if rounded
            else None,
        )

    top = evidence.lambda_max.number
    if not top > 0:
        return Value(0.0)
    low, high = math.log(top) - 70.0, math.log(top) + 70.0
    if at(low).value >= wanted:
        return Value.without(
            "not converged",
            f"the random starts see too little of the directions that decide; {REMEDY}",
        )
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if at(middle).value < wanted else (low, middle)
    middle = (low + high) / 2
    number = settings.prior_std * math.exp(middle / 2)
    step = 1e-3
    slope = (at(middle + step).value - at(middle - step).value) / (2 * step)
    per_sum = number / (2 * slope) if slope > 0 else math.inf

    def moved(found: Estimate) -> Estimate:
        return Estimate(
            number,
            found.error * per_sum,
            max(number - (found.high - found.value) * per_sum, 0.0),
            number + (found.value - found.low) * per_sum,
        )

    return from_probes(
        moved(at(middle)), moved(at(middle, rounded=True)), "noise_std_for_psnr"
    )
