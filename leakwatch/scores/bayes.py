r"""The same channel with a prior: the error of the best possible estimator.

Near x the shared gradient is a linear Gaussian channel, g + J(x' − x) + noise of
standard deviation s. With a Gaussian prior of standard deviation R per pixel around a
mean image, the best estimator's mean squared error is :math:`\sum_i s^2R^2/(s^2 +
\lambda_i R^2)`. It is at most R² d_x, where I²F runs off to infinity, and ε = s²/R² is
what I²F's damping means. An attacker with a sharper prior, a good generator say, can do
better than a Gaussian one.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from leakwatch.scores.i2f import psnr
from leakwatch.scores.measure.channel_sums import (
    sampled_bits,
    sampled_error,
    sampled_noise,
)
from leakwatch.scores.measure.gaussian_channel import (
    channel,
    error_for_given,
    noise_for_squared_error,
)
from leakwatch.scores.measure.sample_spectrum import Evidence
from leakwatch.scores.norms import root
from leakwatch.scores.registry import Direction, Need, Score, register
from leakwatch.scores.result import Value
from leakwatch.scores.settings import Settings


def i2f_bayes(evidence: Evidence, settings: Settings) -> Value:
    """√Σ s²R²/(s²+λ_iR²), the error of the best estimator, in pixel units.

    For one given δ its error vector is, along u_i,
    (R² u_iᵀJᵀδ − s² u_iᵀ(x−μ))/(s² + λ_iR²). With a full prior covariance C:
    √tr (C⁻¹ + H/s²)⁻¹.
    """
    found, s = channel(evidence, settings), settings.noise_std
    if s is not None and evidence.sums is not None:
        return sampled_error(evidence, settings, s)
    if found is None:
        return evidence.no_spectrum()
    if s is None:
        return _NO_NOISE
    if evidence.pulled is not None:
        return error_for_given(evidence, settings, found, s)
    return found.judged(lambda gain: math.sqrt(found.squared_error(gain, s)))


def i2f_bayes_psnr(evidence: Evidence, settings: Settings) -> Value:
    """Predicted PSNR of the best estimator with a Gaussian prior."""
    return psnr(i2f_bayes(evidence, settings), evidence.d_x, settings.data_range)


def leaked_bits(evidence: Evidence, settings: Settings) -> Value:
    """½ Σ log₂(1 + λ_iR²/s²), information about the image in its noisy gradient.

    With a full prior covariance C: ½ log₂ det(I + CH/s²).
    """
    found, s = channel(evidence, settings), settings.noise_std
    if s is not None and evidence.sums is not None:
        return sampled_bits(evidence, settings, s)
    if found is None:
        return evidence.no_spectrum()
    if s is None:
        return _NO_NOISE

    def bits(gain: Tensor) -> float:
        return float(torch.log1p(gain / s**2).sum()) / (2 * math.log(2))

    return found.judged(bits)


def fisher_information_loss(evidence: Evidence, settings: Settings) -> Value:
    """√λ_1/s (Hannun, Guo & van der Maaten 2021)."""
    if settings.noise_std is None:
        return _NO_NOISE
    top = root(evidence.lambda_max)
    return Value(top.number / settings.noise_std, top.status)


def noise_std_for_psnr(evidence: Evidence, settings: Settings) -> Value:
    """The s at which i2f_bayes, averaged over the noise, predicts ``target_psnr``.

    Zero when the sample is below the target without noise; undefined when the prior
    alone already gives a better picture than the target.
    """
    found = channel(evidence, settings)
    if found is None and evidence.sums is None:
        return evidence.no_spectrum()
    wanted = evidence.d_x * settings.data_range**2 * 10 ** (-settings.target_psnr / 10)
    alone = evidence.d_x * settings.prior_std**2
    if found is not None:
        alone = float(found.weight.sum())
    if wanted >= alone:
        best = 10 * math.log10(evidence.d_x * settings.data_range**2 / alone)
        return Value.without(
            "undefined",
            f"no noise pushes the prediction below {best:.1f} dB, which the mean image "
            f"alone reaches; ask for a target_psnr above that",
        )
    if found is None:
        return sampled_noise(evidence, settings, wanted)
    return found.judged(lambda gain: noise_for_squared_error(found, gain, wanted))


_NO_NOISE = Value.without(
    "not computed", "needs noise_std, also when a perturbation delta is given"
)


def _score(
    compute: Callable[[Evidence, Settings], Value],
    needs: set[Need],
    unit: str,
    meaning: str,
    source: str,
    direction: Direction,
    *groups: str,
) -> None:
    register(
        Score(
            name=compute.__name__,
            compute=compute,
            needs=frozenset(needs),
            unit=unit,
            direction=direction,
            meaning=meaning,
            source=source,
        ),
        *groups,
    )


_score(
    i2f_bayes_psnr,
    {"spectrum", "noise"},
    "dB",
    "Quality of the picture predicted for the best attacker who knows mean and spread "
    "of the pixels.",
    "Bayesian form of I²F (linear Gaussian channel)",
    "higher = more exposed",
    "i2f",
    "bayes",
)
_score(
    i2f_bayes,
    {"spectrum", "noise"},
    "pixel (norm over the image)",
    "Recovery error predicted for the best attacker who knows mean and spread of the "
    "pixels.",
    "Bayesian form of I²F (linear Gaussian channel)",
    "higher = less exposed",
    "i2f",
    "bayes",
)
_score(
    leaked_bits,
    {"spectrum", "noise"},
    "bit",
    "Information about the image that its noisy gradient carries.",
    "mutual information of the linear Gaussian channel",
    "higher = more exposed",
    "bayes",
)
_score(
    fisher_information_loss,
    {"lambda_max", "noise"},
    "1 / pixel",
    "Without knowledge of images (unbiased), no attacker finds any pixel with a "
    "variance below 1 over the square of this.",
    "Hannun, Guo & van der Maaten, UAI 2021",
    "higher = more exposed",
    "bayes",
)
_score(
    noise_std_for_psnr,
    {"spectrum"},
    "gradient",
    "Gaussian noise on the gradient that holds this sample to the target predicted "
    "PSNR; more is needed for a more exposed sample.",
    "inverse of i2f_bayes",
    "higher = more exposed",
    "bayes",
)
