"""The same noise on every entry, and independent noise of another size on each."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from leakwatch.defenses.covariance import (
    Coefficients,
    Covariance,
    linear_error,
    standard,
)
from leakwatch.defenses.eigen.basis import Basis
from leakwatch.defenses.linear_maps import LinearMap, Scaling

__all__ = ["Diagonal", "Isotropic"]


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
