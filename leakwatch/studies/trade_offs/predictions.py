"""Predicted PSNR of attackers on the messages of a defense, without attacking.

With a prior it is the headline, :func:`leakwatch.scores.in_range.i2f_range_psnr`, of
what each attacker matches: the same knowledge of images and of the range of pixels, the
same draws of the noise, the same looks half way. Without one, pixels are independent
and their range is not known, which has closed forms.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from leakwatch.attacks.start import stream
from leakwatch.defenses import Samples, predicted_errors
from leakwatch.defenses.linear_maps import Chain, Deflation, Scaling, mapped
from leakwatch.derivatives import GradientMap
from leakwatch.derivatives.jacobian import GradientJacobian
from leakwatch.priors import GaussianPrior
from leakwatch.scores.in_range import psnr_in_range
from leakwatch.scores.measure.pixel_range import (
    DRAWS,
    PixelRange,
    noise_as_it_arrives,
)
from leakwatch.scores.settings import Settings
from leakwatch.studies.trade_offs.attackers import Answers, informed, plain, tells_all
from leakwatch.studies.trade_offs.outcomes import EXACT, Attacker, Predicted

__all__ = ["CEILING", "independent_pixels", "with_prior"]

#: PSNR from which on float64 can't tell a prediction from an exact recovery, dB.
CEILING: Final = -20 * math.log10(torch.finfo(torch.float64).eps)


def independent_pixels(
    answers: Answers, samples: Samples, *, prior_std: float, peak: float
) -> dict[Attacker, list[Predicted]]:
    """PSNR by attacker and message, dB; nothing where there is no prediction.

    Who attacks mixtures without knowing the partners is left with what
    :meth:`leakwatch.defenses.Mixing.estimation_error` says beside the error of who
    knows them; for all other defenses nothing is predicted for ``estimating``.

    Args:
        answers: the messages; their mean is what is predicted of.
        samples: whose they are.
        prior_std: R, network-input units.
        peak: the largest difference of pixels, network-input units.
    """
    try:
        predicted = predicted_errors(answers.mean, samples, prior_std=prior_std)
    except ValueError:
        return {}
    d_x = samples.x[0].numel()
    errors: dict[Attacker, torch.Tensor] = {
        "naive": predicted.naive / d_x,
        "adaptive": predicted.adaptive / d_x,
    }
    mixing = answers.mean.knowledge.mixing
    if mixing is not None:
        left = mixing.estimation_error(prior_std, answers.queries)
        errors["estimating"] = errors["adaptive"] + left.to(predicted.adaptive)
    return {
        who: [Predicted(_decibels(error / peak**2)) for error in errors[who].tolist()]
        for who in errors
    }


def with_prior(
    answers: Answers,
    samples: Samples,
    *,
    pixels: Float[Tensor, "n d_x"],
    input_scale: Float[Tensor, " d_x"],
    prior: GaussianPrior,
    data_range: float,
    seed: int,
) -> dict[Attacker, list[Predicted]]:
    """The headline by attacker and message; NaN where there is no prediction.

    Of the naive attacker that of the message as it is, under the noise and whatever
    else the defense really adds; of the adaptive one that of what
    :func:`leakwatch.defenses.observed` makes of it.

    Args:
        answers: the messages, not of mixtures; their mean is what is predicted of.
        samples: whose they are.
        pixels: the samples in pixel units.
        input_scale: d(input)/d(pixel) of each element.
        prior: what attackers know of images, pixel units.
        data_range: largest pixel value, the smallest being 0.
        seed: of the draws of a noise that is not isotropic.
    """
    settings = Settings(
        data_range=data_range, prior_std=prior.std, prior=prior, noise_std=None
    )
    offset = pixels - prior.mean.to(pixels).flatten()
    same = tells_all(answers)
    found: dict[Attacker, list[Predicted]] = {"naive": [], "adaptive": []}
    for row in range(len(samples)):
        for who in found:
            if who == "adaptive" and same:
                found[who].append(found["naive"][row])
                continue
            message = _Message(answers, samples, row, seed, input_scale)
            try:
                number = message.psnr(who, pixels[row], offset[row], settings)
            except ValueError:
                number = Predicted(math.nan)
            found[who].append(number)
    return found


class _Message:
    """One sample's message; see :func:`with_prior` for the arguments."""

    def __init__(
        self,
        answers: Answers,
        samples: Samples,
        row: int,
        seed: int,
        input_scale: Tensor,
    ) -> None:
        self.answers, self.samples, self.row = answers, samples, row
        self.seed, self.input_scale = seed, input_scale

    def psnr(
        self, who: Attacker, pixels: Tensor, offset: Tensor, settings: Settings
    ) -> Predicted:
        gradients, s = self._matched(who)
        jacobian = self._jacobian(gradients)
        none = pixels.new_zeros(0, len(pixels))
        inside = PixelRange(_gram(jacobian, self.samples), pixels, offset, none)
        # Of what has less noise rounding hides as much, and a bound is left.
        least = inside.least_noise(settings)
        at_least, s = s < least, max(s, least)
        drawn = self._drawn() if who == "naive" else None

        def noise(at: GradientJacobian, draws: int | None) -> Tensor:
            if drawn is None:
                return noise_as_it_arrives(at, draws)[0]
            arrived = at.normalized_pulls(drawn[:draws])[0].double()
            return arrived * float(at.scale[0]) / s

        def elsewhere(moved: Tensor) -> tuple[Tensor, Tensor]:
            x = self.samples.x[self.row]
            there = x.double() + (moved.to(x.device) * self.input_scale).view_as(x)
            at = jacobian.at_image(0, there.to(x))
            return _gram(at, self.samples), noise(at, 1)[0]

        inside = replace(inside, noise=noise(jacobian, None), elsewhere=elsewhere)
        value = psnr_in_range(inside, replace(settings, noise_std=s))
        number = CEILING if value.number > CEILING else value.number
        return Predicted(number, at_least and number < EXACT)

    def _matched(self, who: Attacker) -> tuple[GradientMap, float]:
        """The map whose values an attacker matches, and the noise taken for granted."""
        if who == "naive":
            aim = plain(self.samples, self.answers, self.row)
            return aim.observation.gradients, aim.observation.noise_std
        observation = informed(self.samples, self.answers, self.row).observation
        gradients, clip = observation.gradients, self.answers.mean.knowledge.clip
        clean = self.answers.mean.clean[self.row].double()
        norm = float(clean.norm())
        if clip is None or norm <= clip:
            return gradients, observation.noise_std
        # What clipping leaves of the gradient is its direction.
        across = Deflation((clean / norm)[None], clean.new_zeros(1))
        shorter = Chain(across, Scaling(torch.full_like(clean, clip / norm)))
        return mapped(self.samples.gradients, shorter), observation.noise_std

    def _drawn(self) -> Tensor | None:
        """Draws of what was really added; ``None`` for isotropic noise alone."""
        mean = self.answers.mean
        if tells_all(self.answers) and mean.bias is None:
            return None
        bias = 0.0 if mean.bias is None else mean.bias[self.row].double()
        covariance = mean.knowledge.covariance
        if covariance is None:
            return mean.delta[self.row : self.row + 1].double()
        drawn = stream(self.seed, self.row, 3)
        rows = [covariance.draw(drawn)[self.row] for _ in range(DRAWS)]
        return torch.stack(rows) + bias

    def _jacobian(self, gradients: GradientMap) -> GradientJacobian:
        one = slice(self.row, self.row + 1)
        x, y = self.samples.x[one], self.samples.y[one]
        return GradientJacobian(gradients, x, y, input_scale=self.input_scale)


def _gram(jacobian: GradientJacobian, samples: Samples) -> Tensor:
    """H, pixel units."""
    h = jacobian.gram(0, max_memory=samples.max_memory).h
    return h * float(jacobian.scale[0]) ** 2


def _decibels(mse: float) -> float:
    """PSNR of a mean squared error relative to the squared peak."""
    if math.isnan(mse):
        return math.nan
    return CEILING if mse <= 0 else min(CEILING, -10 * math.log10(mse))
