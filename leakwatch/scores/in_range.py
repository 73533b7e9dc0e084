r"""The same channel for attackers who know the range of pixels too.

Attacks keep images in their range. Where many pixels lie at its ends, as in digits,
that tells far more than mean and spread of the pixels do: predictions without it were
4 to 14 dB too low. See :mod:`leakwatch.scores.measure.pixel_range`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import final

from torch import Tensor

from leakwatch.scores.bayes import (
    AT_MOST,
    i2f_bayes,
    i2f_bayes_psnr,
    safe_noise_for_psnr,
)
from leakwatch.scores.i2f import psnr
from leakwatch.scores.measure.gaussian_channel import in_components
from leakwatch.scores.measure.pixel_range import InRange, PixelRange
from leakwatch.scores.measure.sample_spectrum import SampleSpectrum
from leakwatch.scores.registry import scored
from leakwatch.scores.result import Value
from leakwatch.scores.settings import Settings
from leakwatch.status import OK, Status

# Of a PSNR, twice its standard error: an error off by a tenth.
_SURE_DB = 1.0
_TRIES = 60
# Decibels for each e-fold of noise, where only one prediction is known.
_SLOPE = 6.0
# Predictions above this are those of a linear network: the image hardly moves.
_STRAIGHT_DB = 25.0
# Rounds between the noise that a linear network needs and what it gains where it bends.
_ROUNDS = 6
# How far below the target the noise that is found may hold a prediction in the first
# rounds, and later, where what is gained jumps; and by how much of that the search on
# the line may be off, which costs no look elsewhere.
_CLOSE_DB, _CLOSE_ROUNDS, _BELOW_DB, _FOUND_DB = 0.02, 2, 0.16, 0.004
# By how much a prediction may differ when it is asked for again.
_ANEW_DB = 0.03
# Of log s, where predictions jump.
_LOG_NOISE = 1e-4
_STRAIGHT, _SEARCH = "straight", "search"
# Times the noise, at most, by which minima at another noise are stretched.
_STRETCH = 2.0
_NO_NOISE = Value.without("not computed", "needs noise_std, also when a delta is given")
_AT_LEAST = Status(
    "estimated",
    "without the range of pixels, which exposes more: under so little noise rounding "
    "hides what it tells; give a larger noise_std",
)
_FOR_OTHERS = Status(
    "estimated",
    "at most: the average image of the prior needs it, this one stays further below "
    "the target",
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
        return _in_components(spectrum, settings, without, decibels=True)
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


def psnr_in_range(inside: PixelRange, settings: Settings) -> Value:
    """:func:`i2f_range_psnr` under noise that need not be isotropic, with a prior.

    Args:
        inside: H, image and noise.
        settings: the prior, and the noise that the attacker takes for granted.

    Returns:
        The PSNR; infinite where nothing is missed, NaN where H is not finite.

    Raises:
        ValueError: without ``noise_std``.
    """
    s = settings.noise_std
    if s is None:
        raise ValueError("psnr_in_range needs settings with a noise_std.")
    if inside.leaves(settings.data_range):
        return Value(math.nan, _leaving(settings))
    errors = inside.errors(settings, s)
    peak = len(inside.image) * settings.data_range**2
    if not _straight(errors, peak):
        errors = errors.bent(inside.bend(settings, s, errors))
    decibels = 10 * (peak / errors.squared).log10()
    number = float(decibels.mean())
    if not number < math.inf:  # all pixels lie at the ends and are found, or NaN
        return Value(number)
    return _judged(number, decibels.tolist(), errors, OK)


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
        return _in_components(spectrum, settings, without, decibels=False)
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
    """The s at which i2f_range_psnr is ``target_psnr``, or a little below it.

    By 0.02 dB as a rule, by 0.2 dB at most where predictions jump.

    A root in log s: with the same draws at every s, the prediction falls with the
    noise. With a prior of independent pixels it is at least
    noise_std_for_psnr. The mean over the noise counts, also when a δ is given.
    """
    inside, least = _inside(spectrum, settings), safe_noise_for_psnr(spectrum, settings)
    if isinstance(inside, Status):
        return Value(math.nan, inside)
    if not least.status.usable:
        return least
    # The mean over the noise, with and without what is gained where the network bends.
    both = replace(spectrum, pulled=None, path=None, memo=_shared(spectrum))
    straight = replace(
        both,
        pixel_range=replace(inside, elsewhere=None),
        memo=_shared(spectrum) | {_SEARCH: True},
    )
    line = _Line(straight, settings, inside.least_noise(settings), least.number)
    # Minima are found to a few digits: the same noise, asked anew, must be held too.
    target = settings.target_psnr - _ANEW_DB
    aim = target - _CLOSE_DB / 2
    seen: list[tuple[float, float]] = []
    value = least
    for turn in range(_ROUNDS):
        found = line.noise_for(aim)
        if found is None:
            return Value.without(
                "undefined",
                f"no noise was found that holds the prediction to "
                f"{settings.target_psnr:g} dB; ask for a higher target_psnr",
            )
        if found == 0:
            return least
        # Noise that stands out from the rounding of H was found without it.
        hidden = found <= max(line.floor, least.number)
        value = Value(found, least.status if hidden or least.status != AT_MOST else OK)
        reached = i2f_range_psnr(both, replace(settings, noise_std=found))
        if not reached.status.usable:
            return Value(math.nan, reached.status)
        here = line.predicted(found)
        gain = reached.number - here
        below = _CLOSE_DB if turn < _CLOSE_ROUNDS else _BELOW_DB
        lowest = target - below
        if found == least.number:
            lowest = -math.inf
            if reached.number < target - _BELOW_DB and value.status.word == "ok":
                value = Value(found, _FOR_OTHERS)
        if lowest <= reached.number <= target:
            return value
        seen.append((here, gain))
        aim = _next_aim(seen, target - _CLOSE_DB / 2)
    return _held(both, settings, value)


def _shared(spectrum: SampleSpectrum) -> dict[str, object]:
    """What has been found out and holds for the mean over the noise."""
    shared = {k: v for k, v in spectrum.memo.items() if k == "channel"}
    known = spectrum.memo.get(_STRAIGHT, {}) if spectrum.pulled is None else {}
    return shared | {_STRAIGHT: dict(known)}


def _next_aim(seen: list[tuple[float, float]], target: float) -> float:
    """Where prediction and gain add up to the target; the gain taken as a line.

    Args:
        seen: predictions without the gain, and the gain.
        target: of the sum.
    """
    here, gain = seen[-1]
    slope = 0.0
    if len(seen) > 1 and here != seen[-2][0]:
        slope = (gain - seen[-2][1]) / (here - seen[-2][0])
    # Half of a step at least, two at most: lines through two points can be steep.
    return here + (target - here - gain) / min(max(1 + slope, 0.5), 2.0)


def _in_components(
    spectrum: SampleSpectrum, settings: Settings, without: Value, *, decibels: bool
) -> Value:
    """Of who models the leading components of the prior and knows the range.

    Args:
        spectrum: what was measured along components.
        settings: noise and prior.
        without: the score of an attacker who doesn't know the range.
        decibels: whether to return a PSNR, or an error in pixel units.
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
    if squared is None:
        return without
    if not decibels:
        number = math.sqrt(float(squared.mean()))
        return Value(
            number, in_components(parts, s, settings.data_range, pixelwise=True)
        )
    if float(squared.min()) <= 0:
        return _PERFECT
    peak = spectrum.d_x * settings.data_range**2
    number = float(10 * (peak / squared).log10().mean())
    shift = number - without.number
    status = in_components(parts, s, settings.data_range, shift, pixelwise=True)
    return Value(number, status)


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
        number *= 10 ** ((over + _BELOW_DB / 10) / 10)
    return Value(number, value.status)


@final
@dataclass
class _Line:
    """Predictions of a linear network at all noises that were looked at.

    Attributes:
        spectrum: of the sample, without a way to look elsewhere.
        settings: the prior.
        floor: the noise below which nothing can be said.
        least: that for an attacker who doesn't know the range.
        seen: log s → dB.
    """

    spectrum: SampleSpectrum
    settings: Settings
    floor: float
    least: float
    seen: dict[float, float] = field(default_factory=dict)

    def predicted(self, s: float) -> float:
        """Infinite where there is none."""
        log = round(math.log(s), 12)
        if log not in self.seen:
            value = i2f_range_psnr(self.spectrum, replace(self.settings, noise_std=s))
            usable = value.status.usable
            self.seen[log] = value.number if usable else math.inf
        return self.seen[log]

    def noise_for(self, aim: float) -> float | None:
        """The s at which a prediction is ``aim``, or at most 0.01 dB below it.

        With the same draws at every s, predictions fall with the noise.

        Returns:
            ``least`` where that is enough; ``None`` where no noise is.
        """
        given, low = self.settings.noise_std, max(self.least, self.floor)
        if low == 0:
            return self.least
        if given is not None and given >= low:
            self.predicted(given)  # known already
        if all(db <= aim for db in self.seen.values()) and not self._shown(low, aim):
            return self.least
        aim -= _FOUND_DB
        for turn in range(_TRIES):
            below = [at for at, db in self.seen.items() if db <= aim]
            if below:
                high = min(below)
                above = (at for at, db in self.seen.items() if db > aim and at < high)
                last = max(above, default=high - 1)
                if high - last <= _LOG_NOISE:
                    return math.exp(high)
                log = self._between(last, high, aim, halve=turn % 3 == 2)
            else:
                log = max(self.seen)
                log += self._step(log, aim)
            s = math.exp(log)
            if abs(self.predicted(s) - aim) <= _FOUND_DB:
                return s
        return None

    def _shown(self, low: float, aim: float) -> bool:
        """Whether there is a noise at which a prediction is above ``aim``."""
        end = self.floor if self.settings.prior is not None else low
        while self.predicted(low) <= aim:
            if low <= end or not end:
                # Then it is less than what rounding may hide, or what they need who
                # don't know the range.
                return 0 < self.least < low and self.predicted(self.least) > aim
            # It may take less than for the average image of the prior.
            low = max(low * math.exp(self._step(math.log(low), aim)), end)
        return True

    def _step(self, log: float, aim: float) -> float:
        """From there towards the aim, further where it is far away."""
        fall = (self.predicted(math.exp(log)) - aim) / _SLOPE
        if not math.isfinite(fall):
            return 1.0
        return math.copysign(min(max(abs(fall), 0.3), 3.0), fall)

    def _between(self, low: float, high: float, aim: float, *, halve: bool) -> float:
        first, last = (self.predicted(math.exp(at)) - aim for at in (low, high))
        share = first / (first - last) if math.isfinite(first) else 0.5
        return low + (high - low) * (0.5 if halve else min(max(share, 0.05), 0.95))


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
    known: dict[float, InRange | Value] = spectrum.memo.setdefault(_STRAIGHT, {})
    if s not in known:
        near, checked = None, False
        # Only in a search: elsewhere numbers must not depend on what was asked before.
        if _SEARCH in spectrum.memo:
            near, checked = _nearest(known, s)
        found = inside.errors(settings, s, spectrum.pulled, near, checked=checked)
        known[s] = found
        drawn = found if spectrum.pulled is None else None
        if s < inside.least_noise(settings) and not inside.steady(settings, s, drawn):
            known[s] = Value(without.number, _AT_LEAST)
    errors = known[s]
    if isinstance(errors, Value):
        return errors
    if spectrum.pulled is not None or inside.elsewhere is None:
        return errors
    if _straight(errors, spectrum.d_x * settings.data_range**2):
        return errors
    key = f"bent at {s!r}"
    if key not in spectrum.memo:
        spectrum.memo[key] = errors.bent(inside.bend(settings, s, errors))
    bent: InRange = spectrum.memo[key]
    return bent


def _straight(errors: InRange, peak: float) -> bool:
    """Whether the image moves so little that the network is linear on the way."""
    return float(errors.squared.mean()) <= peak * 10 ** (-_STRAIGHT_DB / 10)


def _nearest(
    known: Mapping[float, InRange | Value], noise_std: float
) -> tuple[Tensor | None, bool]:
    """Minima at the nearest noise, stretched, and whether less noise was settled."""
    found = {s: one for s, one in known.items() if isinstance(one, InRange)}
    if not found:
        return None, False
    nearest = min(found, key=lambda s: abs(math.log(noise_std / s)))
    stretch = min(max(noise_std / nearest, 1 / _STRETCH), _STRETCH)
    checked = any(s <= noise_std and one.exact for s, one in found.items())
    return stretch * found[nearest].delta, checked


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
        return _leaving(settings)
    return inside


def _leaving(settings: Settings) -> Status:
    return Status(
        "undefined",
        f"the sample leaves [0, {settings.data_range:g}], so its range is not known; "
        f"give mean and std of the normalisation, or data_range",
    )


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
