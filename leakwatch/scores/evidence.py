"""What is known about one sample when its scores are computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from leakwatch.scores.result import Status, Value


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
    """

    noise_std: float | None = None
    epsilon: float = 0.0
    prior_std: float = 12**-0.5
    data_range: float = 1.0
    target_psnr: float = 20.0
    prior_covariance: Float[Tensor, "d_x d_x"] | None = None


@final
@dataclass(frozen=True, eq=False)
class Evidence:
    """Everything measured about one sample, in pixel units and float64.

    Attributes:
        d_x: number of input elements.
        loss: the sample's loss.
        grad_norm: ‖g‖.
        lambda_max: largest eigenvalue of H.
        lambda_min: smallest.
        cos_max: largest eigenvalue of the cosine Hessian.
        cos_min: smallest.
        trace: Σ λ_i = ‖J‖²_F.
        eigenvalues: all of them, descending; ``None`` when only the ends are known.
        floor: what the arithmetic can't tell from zero among the eigenvalues.
        eigenvectors: input-space singular vectors u_i as columns; only when something
            asked for them.
        pulled: Jᵀδ for a given perturbation δ of the gradient.
        offset: x − μ, distance from the prior mean, pixel units.
    """

    d_x: int
    loss: Value
    grad_norm: Value
    lambda_max: Value
    lambda_min: Value
    cos_max: Value
    cos_min: Value
    trace: Value
    eigenvalues: Float[Tensor, " d_x"] | None = None
    floor: float = 0.0
    eigenvectors: Float[Tensor, "d_x d_x"] | None = None
    pulled: Float[Tensor, " d_x"] | None = None
    offset: Float[Tensor, " d_x"] | None = None
    why_no_spectrum: str = field(default="")

    def no_spectrum(self) -> Value:
        """The answer of a score that needs the whole spectrum and has none."""
        return Value(float("nan"), Status("not computed", self.why_no_spectrum))

    def of_spectrum(self, formula: Callable[[Tensor], float], what: str) -> Value:
        """A formula of all eigenvalues, with a check that the smallest don't matter.

        Eigenvalues below the floor may be anything from 0 to the floor. The formula is
        evaluated at both ends; where that changes the answer by more than 1 %, the
        answer is unresolved and its number is NaN.

        Args:
            formula: eigenvalues ``(d_x,)`` ↦ number.
            what: the words for the reason.
        """
        if self.eigenvalues is None:
            return self.no_spectrum()
        if not bool(torch.isfinite(self.eigenvalues).all()):
            return Value(float("nan"), self.lambda_max.status)
        below = self.eigenvalues < self.floor
        value = formula(self.eigenvalues.clamp_min(0))
        if not bool(below.any()):
            return Value(value)
        low = formula(torch.where(below, 0.0, self.eigenvalues))
        high = formula(torch.where(below, self.floor, self.eigenvalues))
        if abs(high - low) <= 0.01 * max(abs(low), abs(high)):
            return Value(value)
        return Value(
            float("nan"),
            Status(
                "unresolved",
                f"{int(below.sum())} of {self.d_x} eigenvalues are below the precision "
                f"floor {self.floor:.1e} and {what} depends on them; use "
                f"dtype=torch.float64, a damping epsilon, or the Bayesian score",
            ),
        )
