"""Gaussian priors of images: a mean, and a covariance as a matrix."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from functools import cached_property
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["DensePrior", "GaussianPrior"]


class GaussianPrior(ABC):
    """N(μ, C) over images, in pixel units and float64.

    A subclass says how to multiply by C and by its inverse; for a prior of your own
    that is all there is to write.

    Args:
        mean: μ, the shape of one sample.
        knows: what an attacker with this prior knows, as in "an attacker who knows …".

    Attributes:
        mean: μ.
        knows: as given.

    Raises:
        ValueError: for a mean that is not finite.
    """

    def __init__(self, mean: Float[Tensor, "*sample"], knows: str) -> None:
        if not bool(torch.isfinite(mean).all()):
            raise ValueError("the mean of a prior must be finite, but holds NaN or ∞.")
        self.mean = mean.detach().double()
        self.knows = knows

    @abstractmethod
    def mul(self, v: Float[Tensor, "... d_x"]) -> Float[Tensor, "... d_x"]:
        """C v, of each row."""

    @abstractmethod
    def solve(self, v: Float[Tensor, "... d_x"]) -> Float[Tensor, "... d_x"]:
        """C⁻¹ v, of each row."""

    @property
    def size(self) -> int:
        """d_x."""
        return self.mean.numel()

    @property
    def std(self) -> float:
        """√(tr C/d_x), root mean square over pixels of their standard deviation."""
        return math.sqrt(float(self.covariance.diagonal().mean()))

    @cached_property
    def covariance(self) -> Float[Tensor, "d_x d_x"]:
        """C as a matrix."""
        return self.mul(self._eye())

    @cached_property
    def precision(self) -> Float[Tensor, "d_x d_x"]:
        """C⁻¹ as a matrix."""
        inverse = self.solve(self._eye())
        return (inverse + inverse.T) / 2

    @cached_property
    def root(self) -> Float[Tensor, "d_x d_x"]:
        """L with L Lᵀ = C, lower triangular.

        Raises:
            ValueError: if C is not positive definite.
        """
        factor, info = torch.linalg.cholesky_ex(self.covariance)
        if int(info) != 0:
            raise ValueError(
                "the covariance of a prior must be positive definite, but its Cholesky "
                "decomposition fails; add a small multiple of the identity."
            )
        whole: Tensor = factor
        return whole

    @cached_property
    def largest(self) -> float:
        """Largest eigenvalue of C, pixel units squared."""
        return float(torch.linalg.eigvalsh(self.covariance)[-1])

    def leading(self, count: int) -> Float[Tensor, "count d_x"]:
        """Components of largest variance, as rows: L_kᵀ with L Lᵀ = C.

        Rows are at right angles to each other, longest first.

        Args:
            count: how many, at most d_x.
        """
        values, vectors = torch.linalg.eigh(self.covariance)
        top = slice(self.size - count, self.size)
        rows: Tensor = (vectors[:, top] * values[top].clamp_min(0).sqrt()).T.flip(0)
        return rows

    def draw(
        self, count: int, generator: torch.Generator
    ) -> Float[Tensor, "count d_x"]:
        """Images of the prior minus its mean.

        Args:
            count: how many.
            generator: of random numbers, on the CPU.
        """
        z = torch.randn(count, self.size, generator=generator, dtype=torch.float64)
        return z.to(self.mean) @ self.root.T

    def check(self, shape: tuple[int, ...]) -> None:
        """Whether it fits samples of a shape.

        Raises:
            ValueError: if it is of images of another shape.
        """
        if tuple(self.mean.shape) != tuple(shape):
            raise ValueError(
                f"the prior is of samples of shape {tuple(self.mean.shape)}, but these "
                f"have shape {tuple(shape)}; measure it on samples like these."
            )

    def _eye(self) -> Tensor:
        return torch.eye(self.size, dtype=torch.float64, device=self.mean.device)


@final
class DensePrior(GaussianPrior):
    """A prior with its covariance as a matrix.

    Args:
        mean: μ, the shape of one sample, pixel units.
        covariance: C, ``(d_x, d_x)``, pixel units squared.
        knows: what an attacker with this prior knows.

    Raises:
        ValueError: for a covariance that is not square, finite, symmetric and positive
            definite, or that doesn't fit the mean.

    Example:
        >>> import torch
        >>> prior = DensePrior(torch.full((1, 1, 2), 0.5), torch.eye(2) / 4)
        >>> prior.solve(torch.ones(2, dtype=torch.float64)), prior.std
        (tensor([4., 4.], dtype=torch.float64), 0.5)
    """

    def __init__(
        self,
        mean: Float[Tensor, "*sample"],
        covariance: Float[Tensor, "d_x d_x"],
        knows: str = "mean and covariance of the pixels",
    ) -> None:
        super().__init__(mean, knows)
        _check_covariance(covariance, self.size)
        self.covariance = covariance.detach().to(self.mean)
        _ = self.root

    def mul(self, v: Float[Tensor, "... d_x"]) -> Float[Tensor, "... d_x"]:
        """See :class:`GaussianPrior`."""
        return v @ self.covariance.to(v)

    def solve(self, v: Float[Tensor, "... d_x"]) -> Float[Tensor, "... d_x"]:
        """See :class:`GaussianPrior`."""
        solved = torch.cholesky_solve(v.reshape(-1, self.size).T, self.root.to(v))
        return solved.T.reshape(v.shape)

    @cached_property
    def precision(self) -> Float[Tensor, "d_x d_x"]:
        """C⁻¹ as a matrix."""
        return torch.cholesky_inverse(self.root)


def _check_covariance(covariance: Tensor, size: int) -> None:
    shape = tuple(covariance.shape)
    if shape != (size, size) or not covariance.is_floating_point():
        raise ValueError(
            f"the covariance of a prior must be a floating point matrix of shape "
            f"{(size, size)}, for samples of {size} elements, got shape {shape} of "
            f"{covariance.dtype}."
        )
    peak = float(covariance.abs().max())
    if not math.isfinite(peak):
        raise ValueError(
            "the covariance of a prior must be finite, but holds NaN or infinity."
        )
    gap = float((covariance - covariance.T).abs().max())
    if gap > 1e-6 * peak:
        raise ValueError(
            f"the covariance of a prior must be symmetric, but differs from its "
            f"transpose by up to {gap:.1e}; pass (c + c.T) / 2 if that is what you "
            f"mean."
        )
