"""What the scores assume about noise, prior and pixels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from leakwatch.checks import check_integer, check_number

#: Standard deviation of a number uniform on an interval of length 1.
UNIFORM_STD = 12**-0.5


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
        prior_covariance: ``(d_x, d_x)`` in pixel units squared, instead of R².
        influence_steps: steps in which the Bayesian error for a given perturbation is
            integrated; 1 is the linear prediction. See
            :mod:`leakwatch.scores.measure.influence_path`.

    Raises:
        TypeError: for anything but numbers.
        ValueError: for numbers out of range, and for a covariance that is not square,
            finite, symmetric and positive definite.
    """

    noise_std: float | None = None
    epsilon: float = 0.0
    prior_std: float = UNIFORM_STD
    data_range: float = 1.0
    target_psnr: float = 20.0
    prior_covariance: Float[Tensor, "d_x d_x"] | None = None
    influence_steps: int = 1

    def __post_init__(self) -> None:
        if self.noise_std is not None:
            check_number("noise_std", self.noise_std, example=1e-2)
        check_number("data_range", self.data_range, example=1.0)
        check_number("prior_std", self.prior_std, example=0.25)
        check_number("epsilon", self.epsilon, "[0, inf)", example=0.0)
        check_number("target_psnr", self.target_psnr, "(-inf, inf)", example=20.0)
        check_integer("influence_steps", self.influence_steps, example=8)
        if self.prior_covariance is not None:
            _check_covariance(self.prior_covariance)
            _ = self.prior_root

    @cached_property
    def prior_root(self) -> Float[Tensor, "d_x d_x"]:
        """L with L Lᵀ = the full prior covariance, lower triangular, float64."""
        if self.prior_covariance is None:
            raise ValueError("prior_root needs a prior_covariance; none was given.")
        root, info = torch.linalg.cholesky_ex(self.prior_covariance.double())
        if int(info) != 0:
            raise ValueError(
                "prior_covariance must be positive definite, but its Cholesky "
                "decomposition fails; add a small multiple of the identity."
            )
        factor: Tensor = root
        return factor


def _check_covariance(covariance: Tensor) -> None:
    shape = tuple(covariance.shape)
    if len(shape) != 2 or shape[0] != shape[1] or not covariance.is_floating_point():
        raise ValueError(
            f"prior_covariance must be a floating point matrix (d_x, d_x), got shape "
            f"{shape} of {covariance.dtype}."
        )
    peak = float(covariance.abs().max())
    if not math.isfinite(peak):
        raise ValueError("prior_covariance must be finite, but holds NaN or infinity.")
    gap = float((covariance - covariance.T).abs().max())
    if gap > 1e-6 * peak:
        raise ValueError(
            f"prior_covariance must be symmetric, but differs from its transpose by "
            f"up to {gap:.1e}; pass (c + c.T) / 2 if that is what you mean."
        )
