"""Covariances of noise on gradients: what is drawn, and what an attacker makes of it.

One row for each message. All sums are over the directions v_i = J u_i/σ_i in which the
sample can move its gradient; q_i = v_iᵀΣv_i is the variance that arrives along v_i, and
what arrives elsewhere an attacker who knows J discards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, TypeAlias, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from leakwatch.checks import check_choice
from leakwatch.defenses.eigen.basis import Basis
from leakwatch.defenses.linear_maps import LinearMap
from leakwatch.spectrum.operators import random_vector

__all__ = ["Coefficients", "Covariance", "linear_error", "standard"]

Coefficients: TypeAlias = Literal["gaussian", "sign"]
"""Standard normal numbers, or ±1: the same covariance, and a ‖δ‖ that does not vary
where the directions are orthonormal. Signs are for measurements: an attacker who knows
the size of a number has only two values to tell apart."""


class Covariance(ABC):
    """The covariance Σ of the noise on each message."""

    def __len__(self) -> int:
        """Number of messages."""
        return len(self.total)

    @property
    @abstractmethod
    def total(self) -> Float[Tensor, " n"]:
        """E‖δ‖² = tr Σ, float64."""

    @abstractmethod
    def draw(
        self, generator: torch.Generator, coefficients: Coefficients = "gaussian"
    ) -> Float[Tensor, "n d_theta"]:
        """δ for each message, float64.

        Args:
            generator: random stream; row by row, so that a message's noise does not
                depend on how many follow.
            coefficients: what is drawn.
        """

    @abstractmethod
    def along(self, basis: Basis) -> Float[Tensor, "n d_x"]:
        """q_i = v_iᵀΣv_i, 0 where the direction is not resolved."""

    def best_error(
        self, basis: Basis, prior_std: float | None = None
    ) -> Float[Tensor, " n"]:
        """E‖x̂ − x‖² of the best linear attacker who knows Σ and J.

        tr (JᵀΣ⁻¹J + I/R²)⁻¹, with the limit for directions that Σ leaves alone.
        Directions that are not resolved count R² with a prior, and nothing without.
        Here for noise that is independent along the v_i.

        Args:
            basis: J.
            prior_std: R, ``None`` for an attacker who knows nothing of images.
        """
        return linear_error(self.along(basis), basis, prior_std)

    @abstractmethod
    def scaled(self, factor: float) -> Covariance:
        """Σ times a number."""

    @abstractmethod
    def summed(self, weight: float) -> Covariance | None:
        """Of ``weight`` times the sum of all messages, one row; None if not known."""

    @abstractmethod
    def whitening(self, row: int, least: float) -> tuple[LinearMap, float]:
        """L = s(Σ + s²I)^−½ or the like, and the standard deviation s of L δ.

        Args:
            row: the message.
            least: entries or directions with less noise than this share of the largest
                or mean count as if they had it, so that nothing is divided by 0.
        """


def standard(
    rows: int, size: int, generator: torch.Generator, coefficients: Coefficients
) -> Float[Tensor, "rows size"]:
    """Numbers of mean 0 and variance 1, float64, on the generator's device.

    Args:
        rows: messages; each row is drawn on its own.
        size: numbers in each.
        generator: random stream.
        coefficients: normal numbers or signs.

    Raises:
        ValueError: for unknown coefficients.
    """
    check_choice("coefficients", coefficients, get_args(Coefficients))
    drawn = torch.stack([random_vector(size, generator) for _ in range(rows)])
    if coefficients == "sign":
        return torch.where(drawn < 0, -1.0, 1.0).to(drawn)
    return drawn


def linear_error(
    noise: Float[Tensor, "n d_x"], basis: Basis, prior_std: float | None
) -> Float[Tensor, " n"]:
    """Best squared error where noise along different v_i is independent.

    Σ q_i R²/(q_i + λ_i R²), or Σ q_i/λ_i over resolved directions without a prior.

    Args:
        noise: q_i.
        basis: λ_i.
        prior_std: R.
    """
    lam = basis.visible
    if prior_std is None:
        terms = noise / torch.where(basis.resolved, lam, 1.0)
        return torch.where(basis.resolved, terms, 0.0).sum(1)
    r2 = prior_std**2
    below = noise + lam * r2
    terms = noise * r2 / torch.where(below > 0, below, 1.0)
    return torch.where(basis.resolved, terms, r2).sum(1)
