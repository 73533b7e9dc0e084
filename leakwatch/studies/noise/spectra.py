"""One spectrum per sample, from which predictions at any noise follow."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from leakwatch.reporting.quantities import Quantity
from leakwatch.scores.bayes import i2f_bayes, i2f_bayes_psnr, safe_noise_for_psnr
from leakwatch.scores.in_range import i2f_range_psnr, noise_std_for_range_psnr
from leakwatch.scores.measure.gaussian_channel import Channel, channel
from leakwatch.scores.measure.sample_spectrum import SampleSpectrum
from leakwatch.scores.registry import Score
from leakwatch.scores.result import ScoreResult, Value
from leakwatch.scores.settings import Settings
from leakwatch.status import Status

_NAME = "spectrum_kept"


def described(score: Score) -> Quantity:
    """A score as reports describe it."""
    return Quantity(
        score.name, score.unit, score.direction, score.meaning, score.source
    )


@final
class SpectrumKeeper:
    """A score without a number of interest, which keeps what was measured.

    Ask :func:`leakwatch.score` for ``keeper.score`` among the others; ``keeper.of``
    then gives, for each sample, predictions at every noise without a new Jacobian.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[SampleSpectrum, Settings]] = []
        self.score = Score(
            name=_NAME,
            compute=self._keep,
            needs=frozenset({"spectrum", "range"}),
            unit="",
            direction="higher = more exposed",
            meaning="Place of the spectrum among those kept.",
            source="this library",
        )

    def of(self, result: ScoreResult) -> tuple[NoiseResponse, ...]:
        """The spectrum of each sample of the result that ``score`` was part of."""
        places = result[_NAME].tolist()
        return tuple(
            NoiseResponse(None, Settings(), status)
            if math.isnan(place)
            else NoiseResponse(*self._kept[int(place)], status)
            for place, status in zip(places, result.status[_NAME], strict=True)
        )

    def _keep(self, spectrum: SampleSpectrum, settings: Settings) -> Value:
        self._kept.append((spectrum, settings))
        return Value(float(len(self._kept) - 1))


@final
@dataclass(frozen=True, eq=False)
class NoiseResponse:
    """What one sample's spectrum predicts under Gaussian noise.

    Attributes:
        spectrum: what was measured; ``None`` for a sample that failed.
        settings: the prior and the pixels.
        status: why there is nothing, where there is nothing.
    """

    spectrum: SampleSpectrum | None
    settings: Settings
    status: Status

    def error(self, noise_std: float) -> Value:
        """Predicted error, norm over the image, of the best estimator: i2f_bayes."""
        if self.spectrum is None:
            return Value(math.nan, self.status)
        return i2f_bayes(self.spectrum, replace(self.settings, noise_std=noise_std))

    def psnr(self, noise_std: float) -> Value:
        """Predicted PSNR, dB, of the strongest attacker that can be computed.

        That is i2f_range_psnr; i2f_bayes_psnr where the range of pixels is not known.
        """
        if self.spectrum is None:
            return Value(math.nan, self.status)
        settings = replace(self.settings, noise_std=noise_std)
        within = i2f_range_psnr(self.spectrum, settings)
        if within.status.usable:
            return within
        return i2f_bayes_psnr(self.spectrum, settings)

    def noise_for(self, target_psnr: float) -> Value:
        """Noise that holds this sample to what :meth:`psnr` predicts."""
        if self.spectrum is None:
            return Value(math.nan, self.status)
        settings = replace(self.settings, target_psnr=target_psnr)
        within = noise_std_for_range_psnr(self.spectrum, settings)
        if within.status.usable:
            return within
        return safe_noise_for_psnr(self.spectrum, settings)

    @property
    def channel(self) -> Channel | None:
        """The Gaussian channel, where the whole spectrum is known."""
        if self.spectrum is None:
            return None
        return channel(self.spectrum, self.settings)

    @property
    def grad_norm(self) -> float:
        """‖g‖, NaN where it is not known."""
        return math.nan if self.spectrum is None else self.spectrum.grad_norm.number


def inverse_sum(spectrum: SampleSpectrum, settings: Settings) -> Value:
    """Σ 1/λ_i: the expected squared error of I²F per unit of noise variance (Eq. 6)."""
    lam = spectrum.eigenvalues
    if lam is not None and (spectrum.rank < spectrum.d_x or not bool(lam[-1] > 0)):
        return Value.without(
            "undefined",
            "infinite: the gradient does not show every direction of the image",
        )
    return spectrum.of_spectrum(_inverse, float, "the smallest eigenvalues decide, and")


def resolved_rank(spectrum: SampleSpectrum, settings: Settings) -> Value:
    """How many eigenvalues rounding can't have made out of zero."""
    if spectrum.eigenvalues is None:
        return spectrum.no_spectrum()
    least, _ = spectrum.precision.bounds(spectrum.eigenvalues, spectrum.rank)
    return Value(float((least > 0).sum()))


def _inverse(lam: Float[Tensor, " d_x"]) -> Float[Tensor, " d_x"]:
    return torch.where(
        lam > 0, 1 / lam.clamp_min(torch.finfo(lam.dtype).tiny), math.inf
    )


INVERSE_SUM = Score(
    name="inverse_sum",
    compute=inverse_sum,
    needs=frozenset({"spectrum"}),
    unit="pixel² / gradient²",
    direction="higher = less exposed",
    meaning="Σ 1/λ: squared recovery error per unit of noise variance, predicted for a "
    "perfect attacker who knows nothing about images.",
    source="I²F, Zhang et al., NeurIPS 2023, Eq. 6",
)
RESOLVED_RANK = Score(
    name="resolved_rank",
    compute=resolved_rank,
    needs=frozenset({"spectrum"}),
    unit="directions",
    direction="higher = more exposed",
    meaning="Directions of the image that the gradient shows beyond rounding.",
    source="this library",
)
