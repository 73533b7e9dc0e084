"""Noise along the directions in which a sample can move its gradient, and no others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from leakwatch.defenses.covariance import Coefficients, linear_error, standard
from leakwatch.defenses.eigen.basis import Basis
from leakwatch.defenses.linear_maps import Deflation, LinearMap
from leakwatch.defenses.samples import Samples

__all__ = ["InRange"]


@final
@dataclass(frozen=True, eq=False)
class InRange:
    """Σ = Σ_i D_i v_i v_iᵀ. See :class:`leakwatch.defenses.covariance.Covariance`.

    Attributes:
        samples: whose J it is.
        variance: D_i, ``(n, d_x)``, float64, 0 where a direction is not resolved.
        exact: share g(x + a) instead of g(x) + J a, where J a is the noise: equal to
            first order in a. D is then the covariance to first order only, and E‖δ‖²
            another than its sum; see :class:`leakwatch.defenses.eigen.moving.Moves`.
    """

    samples: Samples
    variance: Float[Tensor, "n d_x"]
    exact: bool = False

    def __len__(self) -> int:
        """Number of messages."""
        return len(self.variance)

    @property
    def basis(self) -> Basis:
        """Of the samples."""
        return self.samples.basis

    @property
    def total(self) -> Float[Tensor, " n"]:
        """Σ_i D_i."""
        return self.variance.sum(1)

    def draw_input(
        self, generator: torch.Generator, coefficients: Coefficients = "gaussian"
    ) -> Float[Tensor, "n d_x"]:
        """The image a = Σ ξ_i √(D_i/λ_i) u_i, whose J a is the noise.

        Args:
            generator: random stream.
            coefficients: what the ξ are.
        """
        return self.image(self.standard(generator, coefficients))

    def draw(
        self, generator: torch.Generator, coefficients: Coefficients = "gaussian"
    ) -> Float[Tensor, "n d_theta"]:
        """δ = J a for each message, or g(x + a) − g(x)."""
        xi = self.standard(generator, coefficients)
        if self.exact:
            return self.changed(xi)
        return self.samples.jacobian.matvec(self.image(xi)).double()

    def standard(
        self, generator: torch.Generator, coefficients: Coefficients = "gaussian"
    ) -> Float[Tensor, "n d_x"]:
        """ξ of a draw, one number for each direction, whether it has noise or not."""
        n, size = self.variance.shape
        return standard(n, size, generator, coefficients).to(self.variance.device)

    def image(self, xi: Float[Tensor, "n d_x"]) -> Float[Tensor, "n d_x"]:
        """The image a = Σ ξ_i √(D_i/λ_i) u_i of a draw.

        Args:
            xi: ξ.
        """
        return self.basis.to_input(xi * self.variance.sqrt())

    def changed(
        self, xi: Float[Tensor, "n d_x"], rows: Sequence[int] | None = None
    ) -> Float[Tensor, "m d_theta"]:
        """g(x + a) − g(x), float64: what moving the images by a really does.

        Args:
            xi: ξ of all samples.
            rows: of which samples it is wanted; ``None``: of all.
        """
        of = slice(None) if rows is None else list(rows)
        moved = self.samples.moved(self.image(xi))[of]
        there = self.samples.gradients(moved, self.samples.y[of])
        return there.double() - self.samples.gradient[of].double()

    def along(self, basis: Basis) -> Float[Tensor, "n d_x"]:
        """D_i.

        Raises:
            ValueError: for another basis than that of the samples.
        """
        if basis is not self.basis:
            raise ValueError(
                "noise along singular directions is known in their own basis; pass "
                "samples.basis of the samples that it was made for."
            )
        return self.variance

    def best_error(
        self, basis: Basis, prior_std: float | None = None
    ) -> Float[Tensor, " n"]:
        """Σ D_iR²/(D_i + λ_iR²): directions without noise are recovered exactly."""
        return linear_error(self.along(basis), basis, prior_std)

    def scaled(self, factor: float) -> InRange:
        """Σ times a number."""
        return InRange(self.samples, self.variance * factor, self.exact)

    def summed(self, weight: float) -> InRange | None:
        """Directions of several samples are not orthogonal: known for one only."""
        return self.scaled(weight**2) if len(self) == 1 else None

    def whitening(self, row: int, least: float) -> tuple[LinearMap, float]:
        """s(Σ + s²I)^−½ with s = ``least`` times the largest √D_i.

        What has no noise keeps its size and noised directions all but vanish: they are
        projected away, the partly noised ones less so.
        """
        keep = self.basis.resolved[row]
        noise = self.variance[row][keep]
        s2 = least**2 * float(noise.amax()) if len(noise) else 0.0
        factors = torch.ones_like(noise)
        if s2 > 0:
            factors = math.sqrt(s2) / (noise + s2).sqrt()
        used = noise > 0
        return Deflation(self.basis.singular(row)[used], factors[used]), math.sqrt(s2)
