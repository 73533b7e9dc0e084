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

from leakwatch.scores.i2f import psnr
from leakwatch.scores.measure.gaussian_channel import (
    channel,
    error_for_given,
    information,
    mean_error,
    noise_for_squared_error,
    sampled_noise_for,
)
from leakwatch.scores.measure.sample_spectrum import SampleSpectrum
from leakwatch.scores.norms import root
from leakwatch.scores.registry import scored
from leakwatch.scores.result import Value
from leakwatch.scores.settings import Settings
from leakwatch.status import Status

#: Of a noise that rounding leaves open.
AT_MOST = Status(
    "estimated",
    "at most: rounding hides whether less noise, or none, would do",
)
_NO_NOISE = Value.without(
    "not computed", "needs noise_std, also when a perturbation delta is given"
)


@scored(
    "i2f",
    "bayes",
    needs={"spectrum", "noise"},
    unit="dB",
    direction="higher = more exposed",
    meaning="Quality of the picture predicted for the best attacker who knows the "
    "statistics of images in the prior.",
    source="Bayesian form of I²F (linear Gaussian channel)",
)
def i2f_bayes_psnr(spectrum: SampleSpectrum, settings: Settings) -> Value:
    """Predicted PSNR of the best estimator with a Gaussian prior."""
    return psnr(i2f_bayes(spectrum, settings), spectrum.d_x, settings.data_range)


@scored(
    "i2f",
    "bayes",
    needs={"spectrum", "noise"},
    unit="pixel (norm over the image)",
    direction="higher = less exposed",
    meaning="Recovery error predicted for the best attacker who knows the "
    "statistics of images in the prior.",
    source="Bayesian form of I²F (linear Gaussian channel)",
)
def i2f_bayes(spectrum: SampleSpectrum, settings: Settings) -> Value:
    """√Σ s²R²/(s²+λ_iR²), the error of the best estimator, in pixel units.

    For one given δ its error vector is, along u_i,
    (R² u_iᵀJᵀδ − s² u_iᵀ(x−μ))/(s² + λ_iR²). With a full prior covariance C:
    √tr (C⁻¹ + H/s²)⁻¹.
    """
    if settings.noise_std is None:
        return _NO_NOISE
    if spectrum.pulled is not None:
        return error_for_given(spectrum, settings, settings.noise_std)
    return mean_error(spectrum, settings, settings.noise_std)


@scored(
    "bayes",
    needs={"spectrum", "noise"},
    unit="bit",
    direction="higher = more exposed",
    meaning="Information about the image that its noisy gradient carries.",
    source="mutual information of the linear Gaussian channel",
)
def leaked_bits(spectrum: SampleSpectrum, settings: Settings) -> Value:
    """½ Σ log₂(1 + λ_iR²/s²), information about the image in its noisy gradient.

    With a full prior covariance C: ½ log₂ det(I + CH/s²).
    """
    if settings.noise_std is None:
        return _NO_NOISE
    return information(spectrum, settings, settings.noise_std)


@scored(
    "bayes",
    needs={"lambda_max", "noise"},
    unit="1 / pixel",
    direction="higher = more exposed",
    meaning="Without knowledge of images (unbiased), no attacker finds any pixel with "
    "a variance below 1 over the square of this.",
    source="Hannun, Guo & van der Maaten, UAI 2021",
)
def fisher_information_loss(spectrum: SampleSpectrum, settings: Settings) -> Value:
    """√λ_1/s (Hannun, Guo & van der Maaten 2021)."""
    if settings.noise_std is None:
        return _NO_NOISE
    top = root(spectrum.lambda_max)
    return Value(top.number / settings.noise_std, top.status)


@scored(
    "bayes",
    needs={"spectrum"},
    unit="gradient",
    direction="higher = more exposed",
    meaning="Gaussian noise on the gradient that holds this sample to the target "
    "predicted PSNR; more is needed for a more exposed sample.",
    source="inverse of i2f_bayes",
)
def noise_std_for_psnr(spectrum: SampleSpectrum, settings: Settings) -> Value:
    """The s at which i2f_bayes, averaged over the noise, predicts ``target_psnr``.

    Zero when the sample is below the target without noise; undefined when the prior
    alone already gives a better picture than the target.
    """
    whole = channel(spectrum, settings)
    if whole is None and spectrum.sums is None:
        return spectrum.no_spectrum()
    wanted = squared_error_at_target(spectrum.d_x, settings)
    alone = spectrum.d_x * settings.prior_std**2
    if whole is not None:
        alone = float(whole.weight.sum())
    if wanted >= alone:
        best = 10 * math.log10(spectrum.d_x * settings.data_range**2 / alone)
        return Value.without(
            "undefined",
            f"no noise pushes the prediction below {best:.1f} dB, which the mean image "
            f"alone reaches; ask for a target_psnr above that",
        )
    if whole is None:
        return sampled_noise_for(spectrum, settings, wanted)
    if whole.unseen >= wanted:
        return Value.without("not converged", whole.left_out)
    return whole.judged(lambda gain: noise_for_squared_error(whole, gain, wanted))


def squared_error_at_target(d_x: int, settings: Settings) -> float:
    """The squared error, over all d_x pixels, that has the target PSNR."""
    return d_x * settings.data_range**2 * 10 ** (-settings.target_psnr / 10)


def safe_noise_for_psnr(spectrum: SampleSpectrum, settings: Settings) -> Value:
    """:func:`noise_std_for_psnr`, at the upper end of what rounding leaves open.

    Where rounding hides whether any noise is needed, that is a number that is safe,
    since a noise that is too small protects nobody. Pixels that the gradient does not
    show, such as those that a strided convolution skips, are such a case: whether
    they are all that is missing, or nearly all, no arithmetic can tell.

    Args:
        spectrum: of the sample.
        settings: the prior and the target, dB.

    Returns:
        s, gradient units, ``estimated`` and "at most" where it is that upper end;
        otherwise as :func:`noise_std_for_psnr`.
    """
    value = noise_std_for_psnr(spectrum, settings)
    whole = channel(spectrum, settings)
    if value.status.word != "unresolved" or whole is None:
        return value
    wanted = squared_error_at_target(spectrum.d_x, settings)
    return Value(noise_for_squared_error(whole, whole.most, wanted), AT_MOST)
