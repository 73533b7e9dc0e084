"""What the scores assume about noise, prior and pixels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from leakwatch.checks import check_integer, check_number
from leakwatch.priors import GaussianPrior

#: Standard deviation of a number uniform on an interval of length 1.
UNIFORM_STD = 12**-0.5
#: What an attacker knows whose prior has independent pixels.
WHITE = "mean and spread of the pixels"


@final
@dataclass(frozen=True, eq=False)
class Settings:
    """What the scores assume about noise, prior and pixels.

    Attributes:
        noise_std: s, standard deviation of Gaussian noise on every entry of the
            shared gradient; ``None`` when no Gaussian noise is assumed.
        epsilon: ε, the damping of I²F, in units of the eigenvalues of H; 0 is the
            undamped score of Eq. 4 and Eq. 6.
        prior_std: R, standard deviation of one pixel around the prior mean, pixel
            units.
        data_range: peak of the PSNR, in pixel units.
        target_psnr: the predicted PSNR, in dB, that ``noise_std_for_psnr`` aims at.
        prior: what the attacker knows of images, instead of R²; ``None`` for
            independent pixels.
        influence_steps: steps in which the Bayesian error for a given perturbation is
            integrated; 1 is the linear prediction. See
            :mod:`leakwatch.scores.measure.influence_path`.

    Raises:
        TypeError: for anything but numbers.
        ValueError: for numbers out of range.
    """

    noise_std: float | None = None
    epsilon: float = 0.0
    prior_std: float = UNIFORM_STD
    data_range: float = 1.0
    target_psnr: float = 20.0
    prior: GaussianPrior | None = None
    influence_steps: int = 1

    def __post_init__(self) -> None:
        if self.noise_std is not None:
            check_number("noise_std", self.noise_std, example=1e-2)
        check_number("data_range", self.data_range, example=1.0)
        check_number("prior_std", self.prior_std, example=0.25)
        check_number("epsilon", self.epsilon, "[0, inf)", example=0.0)
        check_number("target_psnr", self.target_psnr, "(-inf, inf)", example=20.0)
        check_integer("influence_steps", self.influence_steps, example=8)

    @property
    def knows(self) -> str:
        """What the attacker of the Bayesian scores knows of images."""
        return WHITE if self.prior is None else self.prior.knows
