"""Covariances of noise on gradients: what is drawn, and what an attacker makes of it.

One row for each message. All sums are over the directions v_i = J u_i/σ_i in which the
sample can move its gradient; q_i = v_iᵀΣv_i is the variance that arrives along v_i, and
what arrives elsewhere an attacker who knows J discards.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, TypeAlias, final, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from leakwatch.checks import check_choice
from leakwatch.defenses.eigen.basis import Basis
from leakwatch.defenses.linear_maps import LinearMap, Scaling
from leakwatch.spectrum.operators import random_vector

__all__ = [
    "Coefficients",
    "Covariance",
    "Diagonal",
    "Isotropic",
    "linear_error",
    "standard",
]

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


@final
@dataclass(frozen=True, eq=False)
class Isotropic(Covariance):
    """Σ = s² I; its :meth:`best_error` is the square of the score ``i2f_bayes``.

    Attributes:
        variance: s², ``(n,)``, float64.
        size: d_θ.
    """

    variance: Float[Tensor, " n"]
    size: int

    @property
    def total(self) -> Float[Tensor, " n"]:
        """s² d_θ."""
        return self.variance * self.size

    def draw(
        self, generator: torch.Generator, coefficients: Coefficients = "gaussian"
    ) -> Float[Tensor, "n d_theta"]:
        """δ for each message."""
        drawn = standard(len(self), self.size, generator, coefficients)
        return drawn.to(self.variance.device) * self.variance.sqrt()[:, None]

    def along(self, basis: Basis) -> Float[Tensor, "n d_x"]:
        """s² in every resolved direction."""
        return torch.where(basis.resolved, self.variance[:, None], 0.0)

    def scaled(self, factor: float) -> Isotropic:
        """Σ times a number."""
        return Isotropic(self.variance * factor, self.size)

    def summed(self, weight: float) -> Isotropic:
        """Of the weighted sum of all messages."""
        return Isotropic(weight**2 * self.variance.sum(0, keepdim=True), self.size)

    def whitening(self, row: int, least: float) -> tuple[LinearMap, float]:
        """Nothing to whiten: the identity, and s."""
        ones = torch.ones(self.size, dtype=torch.float64, device=self.variance.device)
        return Scaling(ones), math.sqrt(float(self.variance[row]))


@final
@dataclass(frozen=True, eq=False)
class Diagonal(Covariance):
    """Independent noise with a variance for each entry.

    Predictions form J of one
    sample at a time in float64, d_θ · d_x numbers.

    Attributes:
        variance: Σ_jj, ``(n, d_θ)``, float64.
    """

    variance: Float[Tensor, "n d_theta"]

    @property
    def total(self) -> Float[Tensor, " n"]:
        """Σ_j Σ_jj."""
        return self.variance.sum(1)

    def draw(
        self, generator: torch.Generator, coefficients: Coefficients = "gaussian"
    ) -> Float[Tensor, "n d_theta"]:
        """δ for each message."""
        n, size = self.variance.shape
        drawn = standard(n, size, generator, coefficients)
        return drawn.to(self.variance.device) * self.variance.sqrt()

    def along(self, basis: Basis) -> Float[Tensor, "n d_x"]:
        """Σ_j v_ij² Σ_jj."""
        out = torch.zeros_like(basis.eigenvalues)
        for i in range(len(self)):
            v = basis.singular(i)
            out[i, basis.resolved[i]] = v.square() @ self.variance[i]
        return out

    def best_error(
        self, basis: Basis, prior_std: float | None = None
    ) -> Float[Tensor, " n"]:
        """The trace of (JᵀΣ⁻¹J + I/R²)⁻¹, in the basis of the resolved directions.

        Infinite information of an entry without noise, whose row of J is not 0, is
        taken as it is in the limit: such entries count as noise of 1e-12 of the mean.
        """
        return torch.stack([self._best(basis, i, prior_std) for i in range(len(self))])

    def _best(self, basis: Basis, row: int, prior_std: float | None) -> Tensor:
        keep = basis.resolved[row]
        sigma = basis.eigenvalues[row][keep].sqrt()
        variance = self.variance[row]
        least = variance.mean() * 1e-12
        if float(least) == 0:
            return linear_error(torch.zeros_like(basis.visible), basis, prior_std)[row]
        weighted = basis.singular(row) / variance.clamp_min(least).sqrt()
        info = sigma[:, None] * (weighted @ weighted.T) * sigma
        hidden = len(keep) - len(sigma)
        if prior_std is None:
            unbiased: Tensor = torch.linalg.inv(info).trace()
            return unbiased
        r2 = prior_std**2
        inside = torch.linalg.eigvalsh(info).clamp_min(0)
        error: Tensor = (r2 / (1 + r2 * inside)).sum() + hidden * r2
        return error

    def scaled(self, factor: float) -> Diagonal:
        """Σ times a number."""
        return Diagonal(self.variance * factor)

    def summed(self, weight: float) -> Diagonal:
        """Of the weighted sum of all messages."""
        return Diagonal(weight**2 * self.variance.sum(0, keepdim=True))

    def whitening(self, row: int, least: float) -> tuple[LinearMap, float]:
        """Entries over their standard deviation, times the root mean square of these.

        Entries with less than ``least`` of that root mean square count as if they had
        as much.
        """
        variance = self.variance[row]
        mean = variance.mean()
        if float(mean) == 0:
            return Scaling(torch.ones_like(variance)), 0.0
        factors = (mean / variance.clamp_min(least**2 * mean)).sqrt()
        return Scaling(factors), math.sqrt(float(mean))


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
