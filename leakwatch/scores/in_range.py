r"""The same channel for attackers who know the range of pixels too.

Attacks keep images in their range. Where many pixels lie at its ends, as in digits,
that tells far more than mean and spread of the pixels do: predictions without it were
4 to 14 dB too low. See :mod:`leakwatch.scores.measure.pixel_range`.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace

from scipy.optimize import brentq
from torch import Tensor

from leakwatch.scores.bayes import i2f_bayes, i2f_bayes_psnr, noise_std_for_psnr
from leakwatch.scores.i2f import psnr
from leakwatch.scores.measure.components import Components
from leakwatch.scores.measure.gaussian_channel import in_components
from leakwatch.scores.measure.pixel_range import InRange, PixelRange
from leakwatch.scores.measure.sample_spectrum import SampleSpectrum
from leakwatch.scores.registry import scored
from leakwatch.scores.result import Value
from leakwatch.scores.settings import Settings
from leakwatch.status import Status

# Of a PSNR, twice its standard error: an error off by a tenth.
_SURE_DB = 1.0
_DOUBLINGS = 60
# Predictions above this are those of a linear network: the image hardly moves.
_STRAIGHT_DB = 25.0
# Rounds between the noise that a linear network needs and what it gains where it bends,
# and when they end.
_ROUNDS = 6
_SAME_DB = 0.1
# Of log s: a thousandth of a decibel.
_LOG_NOISE = 1e-4
_NO_NOISE = Value.without("not computed", "needs noise_std, also when a delta is given")
_AT_LEAST = Status(
    "estimated",
    "without the range of pixels, which exposes more: under so little noise rounding "
    "hides what it tells; give a larger noise_std",
)
_PERFECT = Value.without(
    "undefined", "infinite: all pixels lie at the ends of the range and are found"
)

_scored = functools.partial(
    scored,
    source="maximum of the posterior in the range of pixels (linear Gaussian channel, "
    "truncated prior)",
)


@_scored(
    "i2f",
    "bayes",
    "range",
    needs={"spectrum", "range", "noise"},
    unit="dB",
    direction="higher = more exposed",
    meaning="Quality of the picture predicted for the best attacker who knows the "
    "range of pixels, and the statistics of images in the prior.",
)
def i2f_range_psnr(spectrum: SampleSpectrum, settings: Settings) -> Value:
    """Predicted PSNR of the best attacker who knows the range of pixels.

    The mean over draws of the noise; for one given δ, that of δ. Below 25 dB, where
    noise moves the image far, the Jacobian half way counts. With a prior of
    independent pixels it is at least `i2f_bayes_psnr`: the attacker takes the better of
    two estimates, the most probable image in the range and the posterior's mean without
    it. With the statistics of images it is the former: `i2f_bayes_psnr` then averages
    over images of the prior, this one holds for the image at hand.

    From leading components of the prior alone: the posterior's mean, each pixel moved
    into the range, of a linear network.
    """
    without = i2f_bayes_psnr(spectrum, settings)
    if spectrum.in_components:
        return _in_components(spectrum, settings, without)
    errors = _errors(spectrum, settings, without)
    if isinstance(errors, Value):
        return errors
    if float(errors.squared.min()) <= 0:
        return _PERFECT
    peak = spectrum.d_x * settings.data_range**2
    decibels = 10 * (peak / errors.squared).log10()
    number = float(decibels.mean())
    if settings.prior is None and number <= without.number:
        return without
    return _judged(number, decibels.tolist(), errors, without.status)


@_scored(
    "range",
    needs={"spectrum", "range", "noise"},
    unit="pixel (norm over the image)",
    direction="higher = less exposed",
    meaning="Recovery error predicted for the best attacker who knows the "
    "range of pixels, and the statistics of images in the prior.",
)
def i2f_range(spectrum: SampleSpectrum, settings: Settings) -> Value:
    """‖z − x‖ of that attacker, in pixel units: √ of the mean square over draws."""
    without = i2f_bayes(spectrum, settings)
    if spectrum.in_components:
        return _error_in_components(spectrum, settings, without)
    errors = _errors(spectrum, settings, without)
    if isinstance(errors, Value):
        return errors
    number = math.sqrt(float(errors.squared.mean()))
    if settings.prior is None and number >= without.number:
        return without
    return Value(number, _exact_or_not(errors, without.status))


@_scored(
    "range",
    needs={"spectrum", "range", "noise"},
    unit="dB",
    direction="higher = more exposed",
    meaning="Bound of i2f_range_psnr: the attacker is told which pixels lie at the "
    "ends of the range.",
)
def i2f_told_psnr(spectrum: SampleSpectrum, settings: Settings) -> Value:
    """Predicted PSNR of an attacker who is told which pixels lie at the range's ends.

    √(s² tr (H + s²C⁻¹)⁻¹) over the other pixels: no attacker who has to find out does
    better in the linear model. For one given δ it stays the mean over the noise.
    """
    inside, s = _inside(spectrum, settings), settings.noise_std
    if isinstance(inside, Status):
        return Value(math.nan, inside)
    if s is None:
        return _NO_NOISE
    bayes = i2f_bayes(spectrum, settings)
    if not bayes.status.usable:
        return bayes
    squared = inside.told(settings, s)
    if squared == 0:
        return _PERFECT
    return psnr(
        Value(math.sqrt(squared), bayes.status), spectrum.d_x, settings.data_range
    )


@_scored(
    "range",
    needs={"spectrum", "range"},
    unit="share",
    direction="higher = more exposed",
    meaning="Share of the sample's pixels at the ends of their range, which an "
    "attacker who knows the range finds exactly.",
)
def pixels_at_ends(spectrum: SampleSpectrum, settings: Settings) -> Value:
    """Share of the pixels that lie at an end of the range, in [0, 1]."""
    inside = _pixels(spectrum, settings)
    if isinstance(inside, Status):
        return Value(math.nan, inside)
    return Value(float(inside.ends(settings.data_range).double().mean()))


@_scored(
    "range",
    needs={"spectrum", "range"},
    unit="gradient",
    direction="higher = more exposed",
    meaning="Gaussian noise on the gradient that holds this sample to the target "
    "predicted PSNR, also against attackers who know the range of pixels.",
)
def noise_std_for_range_psnr(spectrum: SampleSpectrum, settings: Settings) -> Value:
    """The s at which i2f_range_psnr is ``target_psnr``, or at most 0.2 dB below it.

    A root in log s (Brent 1973): with the same draws at every s, the prediction falls
    with the noise. With a prior of independent pixels it is at least
    noise_std_for_psnr. The mean over the noise counts, also when a δ is given.
    """
    inside, least = _inside(spectrum, settings), noise_std_for_psnr(spectrum, settings)
    if isinstance(inside, Status):
        return Value(math.nan, inside)
    if not least.status.usable:
        return least
    # With an image of its own: only the end of a search looks elsewhere.
    averaged = replace(spectrum, pulled=None, path=None, memo={})
    here = replace(inside, elsewhere=None)
    straight = replace(averaged, pixel_range=here, memo={})
    gain, value = 0.0, least
    for _ in range(_ROUNDS):
        aim = replace(settings, target_psnr=settings.target_psnr - gain)
        value = _straight_noise(straight, aim, inside, least)
        if not value.status.usable or value.number <= 0:
            return value
        at = replace(settings, noise_std=value.number)
        both = (i2f_range_psnr(one, at).number for one in (averaged, straight))
        change = next(both) - next(both) - gain
        # Half of it: the noise changes what is gained, and would swing back and forth.
        gain += change / 2
        if not abs(change) > _SAME_DB:
            break
    return _held(averaged, settings, value)


def _in_components(
    spectrum: SampleSpectrum, settings: Settings, without: Value
) -> Value:
    """PSNR of who models the leading components of the prior and knows the range."""
    errors = _clipped(spectrum, settings, without)
    if isinstance(errors, Value):
        return errors
    squared, parts, s = errors
    if float(squared.min()) <= 0:
        return _PERFECT
    peak = spectrum.d_x * settings.data_range**2
    number = float(10 * (peak / squared).log10().mean())
    status = in_components(parts, s, settings.data_range, number - without.number)
    return Value(number, status)


def _error_in_components(
    spectrum: SampleSpectrum, settings: Settings, without: Value
) -> Value:
    errors = _clipped(spectrum, settings, without)
    if isinstance(errors, Value):
        return errors
    squared, parts, s = errors
    number = math.sqrt(float(squared.mean()))
    return Value(number, in_components(parts, s, settings.data_range))


def _clipped(
    spectrum: SampleSpectrum, settings: Settings, without: Value
) -> tuple[Tensor, Components, float] | Value:
    """Squared errors, what they come from, and the noise; or the answer without them.

    Args:
        spectrum: what was measured along components.
        settings: noise and prior.
        without: the score of an attacker who doesn't know the range.
    """
    inside, parts, s = (
        _pixels(spectrum, settings),
        spectrum.components,
        settings.noise_std,
    )
    if isinstance(inside, Status):
        return Value(math.nan, inside)
    if s is None:
        return _NO_NOISE
    if not without.status.usable or parts is None:
        return without
    squared = parts.squared_errors(s, settings.data_range)
    return without if squared is None else (squared, parts, s)


def _held(spectrum: SampleSpectrum, settings: Settings, value: Value) -> Value:
    """A little more noise, where the prediction is a little above the target."""
    number = value.number
    for _ in range(_ROUNDS):
        at = replace(settings, noise_std=number)
        reached = i2f_range_psnr(spectrum, at)
        if not reached.status.usable:
            return Value(math.nan, reached.status)
        over = reached.number - settings.target_psnr
        if over <= 0:
            break
        # Noise of ten times the size costs 10 dB or more of most predictions.
        number *= 10 ** ((over + _SAME_DB / 10) / 10)
    return Value(number, value.status)


def _straight_noise(
    spectrum: SampleSpectrum, settings: Settings, inside: PixelRange, least: Value
) -> Value:
    """The noise at which a linear network is held to ``target_psnr``.

    Args:
        spectrum: of the sample, without a way to look elsewhere.
        settings: target and prior.
        inside: what is known of the range.
        least: the noise for an attacker who doesn't know it.
    """

    def predicted(s: float) -> float:
        value = i2f_range_psnr(spectrum, replace(settings, noise_std=s))
        return value.number if value.status.usable else math.inf

    floor = inside.least_noise(settings)
    low = max(least.number, floor)
    if settings.prior is not None:
        # It may take less than for the average image of the prior.
        while low > 2 * floor > 0 and predicted(low) <= settings.target_psnr:
            low /= 2
    if low == 0:
        return least
    high = 2 * low
    if predicted(low) <= settings.target_psnr:
        # Then it is less than what rounding may hide, or what they need who don't know
        # the range.
        low, high = least.number, low
        if not 0 < low < high or predicted(low) <= settings.target_psnr:
            return least
    for _ in range(_DOUBLINGS):
        if predicted(high) <= settings.target_psnr:
            break
        low, high = high, 2 * high
    else:
        return Value.without(
            "undefined",
            f"no noise was found that holds the prediction to {settings.target_psnr:g} "
            f"dB; ask for a higher target_psnr",
        )
    root = brentq(
        lambda log: predicted(math.exp(log)) - settings.target_psnr,
        math.log(low),
        math.log(high),
        xtol=_LOG_NOISE,
    )
    # On the side where the prediction is not above the target.
    return Value(math.exp(root + 2 * _LOG_NOISE), least.status)


def _errors(
    spectrum: SampleSpectrum, settings: Settings, without: Value
) -> InRange | Value:
    """Errors of the most probable image in the range, or the answer without them.

    Args:
        spectrum: what was measured.
        settings: noise and prior.
        without: the score of an attacker who doesn't know the range.
    """
    inside, s = _inside(spectrum, settings), settings.noise_std
    if isinstance(inside, Status):
        return Value(math.nan, inside)
    if s is None:
        return _NO_NOISE
    if not without.status.usable:
        return without
    key = f"range at {s!r}"
    if key not in spectrum.memo:
        if s < inside.least_noise(settings) and not inside.steady(settings, s):
            bound = spectrum.memo[key] = Value(without.number, _AT_LEAST)
            return bound
        found = inside.errors(settings, s, spectrum.pulled)
        peak = spectrum.d_x * settings.data_range**2
        if spectrum.pulled is None and float(found.squared.mean()) > peak * 10 ** (
            -_STRAIGHT_DB / 10
        ):
            found = found.bent(inside.bend(settings, s))
        spectrum.memo[key] = found
    errors: InRange | Value = spectrum.memo[key]
    return errors


def _inside(spectrum: SampleSpectrum, settings: Settings) -> PixelRange | Status:
    """H, image and noise, or why nothing can be said about the range."""
    if spectrum.eigenvalues is None:
        return spectrum.no_spectrum().status
    return _in_its_range(spectrum.pixel_range, settings)


def _pixels(spectrum: SampleSpectrum, settings: Settings) -> PixelRange | Status:
    """The same, of which only the image need be known."""
    parts = spectrum.components
    if not spectrum.in_components or parts is None or parts.image is None:
        return _inside(spectrum, settings)
    image = parts.image
    none = image.pixels.new_zeros(0, 0)
    return _in_its_range(PixelRange(none, image.pixels, image.offset, none), settings)


def _in_its_range(
    inside: PixelRange | Status, settings: Settings
) -> PixelRange | Status:
    if not isinstance(inside, PixelRange):
        return inside
    if inside.leaves(settings.data_range):
        return Status(
            "undefined",
            f"the sample leaves [0, {settings.data_range:g}], so its range is not "
            f"known; give mean and std of the normalisation, or data_range",
        )
    return inside


def _exact_or_not(errors: InRange, status: Status) -> Status:
    if status.word != "ok":
        return status
    if errors.straight:
        return Status(
            "estimated",
            "as for a linear network: its Jacobian is not finite where noise moves the "
            "image to",
        )
    if errors.exact:
        return status
    return Status(
        "estimated", "which pixels the range presses was not settled for every draw"
    )


def _judged(
    number: float, decibels: list[float], errors: InRange, status: Status
) -> Value:
    status = _exact_or_not(errors, status)
    n = len(decibels)
    if n < 2 or status.word != "ok":
        return Value(number, status)
    spread = math.sqrt(sum((d - number) ** 2 for d in decibels) / (n - 1) / n)
    if 2 * spread <= _SURE_DB:
        return Value(number)
    reason = f"mean over {n} draws of the noise, standard error {spread:.1f} dB"
    return Value(number, Status("estimated", reason))
