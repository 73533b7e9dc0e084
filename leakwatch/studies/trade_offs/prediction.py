"""What linearisation predicts of attacks, as PSNR."""

from __future__ import annotations

import math
from typing import Final

import torch

from leakwatch.defenses import Samples, predicted_errors
from leakwatch.studies.trade_offs.attackers import Answers
from leakwatch.studies.trade_offs.outcomes import Attacker

__all__ = ["CEILING", "predictions"]

#: PSNR from which on float64 can't tell a prediction from an exact recovery, dB.
CEILING: Final = -20 * math.log10(torch.finfo(torch.float64).eps)


def predictions(
    answers: Answers, samples: Samples, *, prior_std: float, peak: float
) -> dict[Attacker, list[float]]:
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
        found = predicted_errors(answers.mean, samples, prior_std=prior_std)
    except ValueError:
        return {}
    d_x = samples.x[0].numel()
    errors: dict[Attacker, torch.Tensor] = {
        "naive": found.naive / d_x,
        "adaptive": found.adaptive / d_x,
    }
    mixing = answers.mean.knowledge.mixing
    if mixing is not None:
        left = mixing.estimation_error(prior_std, answers.queries)
        errors["estimating"] = errors["adaptive"] + left.to(found.adaptive)
    return {
        who: [_decibels(error / peak**2) for error in errors[who].tolist()]
        for who in errors
    }


def _decibels(mse: float) -> float:
    """PSNR of a mean squared error relative to the squared peak."""
    if math.isnan(mse):
        return math.nan
    return CEILING if mse <= 0 else min(CEILING, -10 * math.log10(mse))
