"""The linear Gaussian channel from image to noisy gradient, with a Gaussian prior.

With the prior covariance C = L Lᵀ, the channel falls apart into independent ones along
the eigenvectors w_i of Lᵀ H L: a prior variance of 1, a gain μ_i, and an error of L w_i
in the image per unit of error. For C = R²I these are μ_i = λ_i R² and L w_i = R u_i.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from leakwatch.scores.measure.components import Components
from leakwatch.scores.measure.influence_path import InfluencePath
from leakwatch.scores.measure.sample_spectrum import SampleSpectrum
from leakwatch.scores.result import (
    ACCURATE,
    REMEDY,
    USABLE,
    Value,
    from_probes,
    judged,
)
from leakwatch.scores.settings import Settings
from leakwatch.spectrum import Estimate
from leakwatch.status import OK, Status

_WHAT = "the directions that the gradient shows least matter here, and they"
# Part of the error: where less is in what was looked at, all of that is out.
_ALL_OUT = 0.1
_EPS64 = float(torch.finfo(torch.float64).eps)


@final
@dataclass(frozen=True, eq=False)
class Channel:
    """Independent scalar channels, one per direction, descending in gain.

    Attributes:
        gain: μ_i, ``(d_x,)``; noise variance s² leaves a posterior variance of
            1/(1 + μ_i/s²).
        least: lower bounds of them, given rounding.
        most: upper bounds.
        weight: ‖L w_i‖², the mean squared error in the image per unit of variance.
        basis: L w_i as columns, ``(d_x, d_x)``; ``None`` when there are no
            eigenvectors.
        unseen: the weight of directions that were not looked at, which are among the
            others with a gain of zero.
        left_out: what to say of that.
    """

    gain: Float[Tensor, " d_x"]
    least: Float[Tensor, " d_x"]
    most: Float[Tensor, " d_x"]
    weight: Float[Tensor, " d_x"]
    basis: Float[Tensor, "d_x d_x"] | None
    unseen: float = 0.0
    left_out: str = ""

    def judged(self, formula: Callable[[Tensor], float]) -> Value:
        """A monotone function of the gains, with the status that rounding gives it."""
        ends = (formula(self.least), formula(self.most))
        value = judged(formula(self.gain), min(ends), max(ends), _WHAT)
        if not (self.left_out and value.status.usable):
            return value
        return Value(value.number, Status("estimated", self.left_out))

    def squared_error(self, gain: Tensor, noise_std: float) -> float:
        """Mean squared norm of the best estimator's error, for some gains."""
        return float((self.weight * posterior(gain, noise_std)).sum())


def posterior(gain: Tensor, noise_std: float) -> Tensor:
    """Variance that is left of a prior variance of 1: s²/(s² + μ)."""
    return noise_std**2 / (noise_std**2 + gain)


def channel(spectrum: SampleSpectrum, settings: Settings) -> Channel | None:
    """The channel of one sample; ``None`` without the spectrum that it needs.

    Args:
        spectrum: of the sample.
        settings: the prior.
    """
    if "channel" not in spectrum.memo:
        build = _isotropic if settings.prior is None else _correlated
        spectrum.memo["channel"] = build(spectrum, settings)
    made: Channel | None = spectrum.memo["channel"]
    return made


def _isotropic(spectrum: SampleSpectrum, settings: Settings) -> Channel | None:
    lam, r = spectrum.eigenvalues, settings.prior_std
    if lam is None:
        return None
    low, high = spectrum.precision.bounds(lam, spectrum.rank)
    basis = None if spectrum.eigenvectors is None else spectrum.eigenvectors * r
    return Channel(
        lam * r**2, low * r**2, high * r**2, torch.full_like(lam, r**2), basis
    )


def _correlated(spectrum: SampleSpectrum, settings: Settings) -> Channel | None:
    h = spectrum.h
    if h is None or settings.prior is None:
        parts = spectrum.components
        return None if parts is None else _along_components(spectrum, parts)
    root = settings.prior.root.to(h)
    ascending, columns = torch.linalg.eigh(root.T @ h @ root)
    gain, columns = ascending.flip(0).clamp_min(0), columns.flip(1)
    gain[spectrum.rank :] = 0.0
    basis = root @ columns
    precision = spectrum.precision.scaled(settings.prior.largest)
    low, high = precision.bounds(gain, spectrum.rank)
    rounding = len(gain) * _EPS64 * float(gain[0])
    return Channel(
        gain,
        (low - rounding).clamp_min(0),
        torch.where(high > gain, high + rounding, high),
        basis.square().sum(0),
        basis,
    )


def in_components(
    parts: Components,
    noise_std: float,
    data_range: float,
    shift: float = 0.0,
    *,
    pixelwise: bool = False,
) -> Status:
    """What a prediction from some components of the prior is worth.

    Args:
        parts: the components.
        noise_std: s.
        data_range: peak of the PSNR.
        shift: dB by which the prediction is above that of an average image.
        pixelwise: whether it is of the attacker who moves single pixels into the range.
    """
    if parts.count == parts.size:
        return OK
    seen = (
        f"from {parts.count} of {parts.size} components of the prior, with "
        f"{100 * parts.share:.3g} % of its variance"
    )
    least, most = parts.least(noise_std), parts.most(noise_std)
    apart = math.sqrt(most / max(least, 1e-300)) - 1
    if apart <= ACCURATE:
        whose = ""
        if pixelwise:
            whose = " for an attacker who moves single pixels into the range"
            seen += "; solver='exact' has the best one, decibels apart at times"
        return Status("estimated", f"within {100 * apart:.1g} %{whose}, {seen}")
    limit = ""
    if least > 1e-9 * most:
        # An image that the leading components can't show may yet be seen in the others.
        shift = max(shift, 0.0)
        best = 10 * math.log10(parts.size * data_range**2 / least) + shift
        limit = f" and at most {best:.1f} dB"
    out = parts.error(noise_std) <= _ALL_OUT * parts.rest
    what = "all that was looked at is out" if out else "more may be seen of the others"
    return Status(
        "estimated",
        f"exposure is at least that{limit}: {what}, {seen}; solver='exact' looks at "
        f"all of them",
    )


def _along_components(spectrum: SampleSpectrum, parts: Components) -> Channel:
    gain = parts.channels[0].flip(0)
    weight = parts.weight.diagonal().flip(0)
    largest = float(parts.norms.diagonal().max())
    low, high = spectrum.precision.scaled(largest).bounds(gain, len(gain))
    left_out = ""
    if parts.count < parts.size:
        left_out = (
            f"from {parts.count} of {parts.size} components of the prior, with "
            f"{100 * parts.share:.3g} % of its variance; what the gradient shows of "
            f"the others comes on top, so exposure is at least that; {REMEDY}"
        )
    none = gain.new_zeros(1)
    return Channel(
        torch.cat([gain, none]),
        torch.cat([low, none]),
        torch.cat([high, none]),
        torch.cat([weight, gain.new_tensor([parts.rest])]),
        None,
        unseen=parts.rest,
        left_out=left_out,
    )


def mean_error(spectrum: SampleSpectrum, settings: Settings, noise_std: float) -> Value:
    """√Σ ‖L w_i‖² s²/(s² + μ_i), the best estimator's root mean squared error norm.

    Args:
        spectrum: of the sample, whole or sampled.
        settings: the prior.
        noise_std: s.
    """
    whole, parts = channel(spectrum, settings), spectrum.components
    spread = settings.prior_std
    if whole is not None:
        value = whole.judged(
            lambda gain: math.sqrt(whole.squared_error(gain, noise_std))
        )
        if not whole.left_out or settings.prior is None or parts is None:
            return value
        if value.status.usable:
            value = Value(
                math.sqrt(parts.most(noise_std)),
                in_components(parts, noise_std, settings.data_range),
            )
        if spectrum.sums is None:
            return value
        spread = settings.prior.std
    shift = (noise_std / spread) ** 2
    independent = spectrum.of_sums(
        lambda lam: noise_std**2 / (lam + shift), "i2f_bayes", transform=math.sqrt
    )
    if whole is None:
        return independent
    # Who knows how pixels hang together can also ignore it, and see every direction.
    if independent.status.usable and not independent.number >= value.number:
        reason = f"exposure is at least that of independent pixels; {REMEDY}"
        return Value(independent.number, Status("estimated", reason))
    return value


def information(
    spectrum: SampleSpectrum, settings: Settings, noise_std: float
) -> Value:
    """½ Σ log₂(1 + μ_i/s²), in bits; arguments as for :func:`mean_error`."""

    def bits(nats: float) -> float:
        return nats / (2 * math.log(2))

    whole = channel(spectrum, settings)
    if whole is not None:
        return whole.judged(
            lambda gain: bits(float(torch.log1p(gain / noise_std**2).sum()))
        )
    shift = (noise_std / settings.prior_std) ** 2
    return spectrum.of_sums(
        lambda lam: torch.log1p(lam / shift), "leaked_bits", transform=bits
    )


def error_for_given(
    spectrum: SampleSpectrum, settings: Settings, noise_std: float
) -> Value:
    """‖x' − x‖ of the best estimator when the noise is the δ at hand.

    (H/s² + C⁻¹)⁻¹ (Jᵀδ/s² − C⁻¹(x − μ)), the error of the maximum of the posterior;
    or, with ``influence_steps``, the end of the path that begins in this direction.

    Args:
        spectrum: of the sample, with ``pulled``.
        settings: the prior.
        noise_std: s.
    """
    if spectrum.offset is None:
        return Value.without(
            "not computed", "the error for a given delta needs the offset x − μ too"
        )
    whole, s2 = channel(spectrum, settings), noise_std**2
    if whole is None:
        return spectrum.of_solution(spectrum.estimated, s2 / settings.prior_std**2)
    basis = whole.basis
    if basis is None or spectrum.pulled is None:
        return spectrum.no_spectrum()
    # basisᵀ C⁻¹ (x − μ) = Wᵀ L⁻¹ (x − μ), the offset in prior standard deviations.
    if settings.prior is None:
        whitened = basis.T @ spectrum.offset / settings.prior_std**2
    else:
        whitened = torch.linalg.solve(basis, spectrum.offset)
    towards = basis.T @ spectrum.pulled / s2 - whitened
    doubt = whole.weight.sqrt() * spectrum.pulled_error / s2

    def size(vector: Tensor, gain: Tensor) -> float:
        return float((basis @ (vector * posterior(gain, noise_std))).norm())

    ends = [size(towards, gain) for gain in (whole.least, whole.most)]
    slack = size(doubt, whole.least)
    linear = judged(
        size(towards, whole.gain),
        max(min(ends) - slack, 0.0),
        max(ends) + slack,
        _WHAT,
    )
    return linear if spectrum.path is None else _along(spectrum.path, linear)


def _along(path: InfluencePath | Status, linear: Value) -> Value:
    """The end of the path; rounding is judged where it begins."""
    if not linear.status.usable:
        return linear
    if isinstance(path, Status):
        return Value(math.nan, path)
    number, left = path.error, path.discretisation
    if not math.isfinite(number):
        return Value.without(
            "failed",
            "on the way of the integrated prediction the gradient or its Jacobian is "
            "not finite; use influence_steps=1",
        )
    if left <= ACCURATE * number:
        return Value(number, linear.status)
    reason = f"the last of its steps may be off by {left:.1e}; raise influence_steps"
    word = "estimated" if left <= USABLE * number else "not converged"
    return Value(number, Status(word, reason))


def noise_for_squared_error(channel: Channel, gain: Tensor, wanted: float) -> float:
    """The s at which the mean squared error is ``wanted``; 0 when it is so without.

    Args:
        channel: the channel.
        gain: its gains, or bounds of them.
        wanted: below the prior's own Σ ‖L w_i‖².
    """
    # On the CPU: bisection looks at one number after the other.
    gain, weight = gain.cpu(), channel.weight.cpu()
    shown = gain > 0
    if float(weight[~shown].sum()) >= wanted:
        return 0.0

    def error(log_s2: float) -> float:
        return float((weight * posterior(gain, math.exp(log_s2 / 2))).sum())

    # In log s² the error is monotone; beyond these ends it is constant.
    middle = _bisected(
        lambda log_s2: error(log_s2) >= wanted,
        math.log(float(gain[shown].min())) - 80.0,
        math.log(float(gain[shown].max())) + 80.0,
        steps=100,
    )
    return math.exp(middle / 2)


def sampled_noise_for(
    spectrum: SampleSpectrum, settings: Settings, wanted: float
) -> Value:
    """The s at which Σ s²R²/(s² + λ_iR²) is ``wanted``, from random starts.

    Its errors are those of the sum there, over the slope of the sum.

    Args:
        spectrum: of the sample, with ``sums``.
        settings: the prior, isotropic.
        wanted: a squared error below that of the prior alone.
    """
    sums, spread = spectrum.sums, settings.prior_std**2
    if sums is None:
        return spectrum.no_spectrum()
    top = spectrum.lambda_max.number
    if (spectrum.d_x - spectrum.rank) * spread >= wanted or not top > 0:
        return Value(0.0)

    def error_at(log_shift: float, *, rounded: bool = False) -> Estimate:
        shift = math.exp(log_shift)
        return sums.estimate(
            lambda lam: spread * shift / (lam + shift),
            spread=(lambda nodes: spectrum.precision.bounds(nodes, len(nodes)))
            if rounded
            else None,
        )

    low, high = math.log(top) - 70.0, math.log(top) + 70.0
    if error_at(low).value >= wanted:
        return Value.without(
            "not converged",
            f"the random starts see too little of the directions that decide; {REMEDY}",
        )
    middle = _bisected(lambda at: error_at(at).value >= wanted, low, high, steps=60)
    number = settings.prior_std * math.exp(middle / 2)
    step = 1e-3
    rise = error_at(middle + step).value - error_at(middle - step).value
    slope = rise / (2 * step)
    per_sum = number / (2 * slope) if slope > 0 else math.inf

    def moved(error: Estimate) -> Estimate:
        return Estimate(
            number,
            error.error * per_sum,
            max(number - (error.high - error.value) * per_sum, 0.0),
            number + (error.value - error.low) * per_sum,
        )

    return from_probes(
        moved(error_at(middle)),
        moved(error_at(middle, rounded=True)),
        "noise_std_for_psnr",
    )


def _bisected(
    beyond: Callable[[float], bool], low: float, high: float, *, steps: int
) -> float:
    """Where an increasing condition turns true, to (high − low)/2^steps."""
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (low, middle) if beyond(middle) else (middle, high)
    return (low + high) / 2
