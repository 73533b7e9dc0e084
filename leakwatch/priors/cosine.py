r"""A prior with a power spectrum: independent coefficients of cosines.

The discrete cosine transform along each axis but the channels' turns images whose
statistics are the same everywhere into nearly independent coefficients (Ahmed,
Natarajan & Rao 1974), without the edges that a Fourier transform wraps around. With
the channels turned onto their principal axes, C = T diag(v) Tᵀ for an orthonormal T:
a product or a solution costs two small matrix products per axis, at any size.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from leakwatch.priors.gaussian import GaussianPrior

__all__ = ["CosinePrior", "cosines", "transform"]


def cosines(n: int) -> Float[Tensor, "n n"]:
    """The orthonormal discrete cosine transform (type II), one frequency a row.

    Example:
        >>> t = cosines(4)
        >>> bool((t @ t.T - torch.eye(4)).abs().max() < 1e-15)
        True
    """
    k = torch.arange(n, dtype=torch.float64, device="cpu")
    rows = torch.cos(math.pi / n * k[:, None] * (k + 0.5)) * math.sqrt(2 / n)
    rows[0] /= math.sqrt(2)
    return rows


def transform(
    x: Float[Tensor, "batch *sample"],
    axes: tuple[Float[Tensor, "n n"], ...],
    channels: Float[Tensor, "c c"] | None,
    *,
    back: bool = False,
) -> Float[Tensor, "batch *sample"]:
    """Tᵀx, the coefficients of images; or T x, the images of coefficients.

    Args:
        x: images or coefficients.
        axes: the cosines of each axis but the first of a sample.
        channels: principal axes of the channels as columns; ``None`` for no turn.
        back: from coefficients to images.
    """
    for axis, rows in enumerate(axes, 2):
        rows = rows.to(x)
        x = torch.movedim(
            torch.movedim(x, axis, -1) @ (rows if back else rows.T), -1, axis
        )
    if channels is not None:
        turn = channels.to(x)
        turned = torch.movedim(x, 1, -1) @ (turn.T if back else turn)
        x = torch.movedim(turned, -1, 1)
    return x


class CosinePrior(GaussianPrior):
    """Independent coefficients of cosines, each with a variance of its own.

    Args:
        mean: μ, the shape of one sample, channels first, pixel units. The cosines are
            along all axes but the first.
        variance: v, of each coefficient, the shape of a sample, pixel units squared.
        channels: principal axes of the channels, orthonormal columns, ``(c, c)``;
            default: the channels themselves.
        knows: what an attacker with this prior knows.

    Raises:
        ValueError: for variances that are not positive and finite, or shapes that don't
            fit each other.

    Example:
        >>> import torch
        >>> prior = CosinePrior(torch.zeros(1, 2, 2), torch.full((1, 2, 2), 0.25))
        >>> (prior.mul(torch.ones(4, dtype=torch.float64)) - 0.25).abs().max() < 1e-15
        tensor(True)
    """

    def __init__(
        self,
        mean: Float[Tensor, "c *axes"],
        variance: Float[Tensor, "c *axes"],
        channels: Float[Tensor, "c c"] | None = None,
        knows: str = "mean and power spectrum of the pixels",
    ) -> None:
        super().__init__(mean, knows)
        if variance.shape != mean.shape:
            raise ValueError(
                f"variances must have the shape of a sample, {tuple(mean.shape)}, got "
                f"{tuple(variance.shape)}."
            )
        if not bool((torch.isfinite(variance) & (variance > 0)).all()):
            raise ValueError("variances must be positive and finite.")
        self.variance = variance.detach().to(self.mean)
        self.channels = None if channels is None else channels.detach().to(self.mean)
        self._axes = tuple(cosines(n).to(self.mean) for n in mean.shape[1:])

    def coefficients(self, x: Float[Tensor, "... d_x"]) -> Float[Tensor, "... d_x"]:
        """Tᵀx, of each row."""
        images = x.reshape(-1, *self.mean.shape)
        return transform(images, self._axes, self.channels).reshape(x.shape)

    def images(self, z: Float[Tensor, "... d_x"]) -> Float[Tensor, "... d_x"]:
        """T z, of each row."""
        many = z.reshape(-1, *self.mean.shape)
        return transform(many, self._axes, self.channels, back=True).reshape(z.shape)

    def leading(self, count: int) -> Float[Tensor, "count d_x"]:
        """See :class:`GaussianPrior`."""
        variance = self.variance.flatten()
        chosen = variance.argsort(descending=True, stable=True)[:count]
        z = variance.new_zeros(len(chosen), self.size)
        z[torch.arange(len(chosen)), chosen] = variance[chosen].sqrt()
        return self.images(z)

    def draw(
        self, count: int, generator: torch.Generator
    ) -> Float[Tensor, "count d_x"]:
        """See :class:`GaussianPrior`."""
        z = torch.randn(count, self.size, generator=generator, dtype=torch.float64)
        return self.images(z.to(self.variance) * self.variance.flatten().sqrt())

    def mul(self, v: Float[Tensor, "... d_x"]) -> Float[Tensor, "... d_x"]:
        """See :class:`GaussianPrior`."""
        return self.images(self.coefficients(v) * self.variance.flatten().to(v))

    def solve(self, v: Float[Tensor, "... d_x"]) -> Float[Tensor, "... d_x"]:
        """See :class:`GaussianPrior`."""
        return self.images(self.coefficients(v) / self.variance.flatten().to(v))

    @property
    def std(self) -> float:
        """See :class:`GaussianPrior`; an orthonormal T leaves the trace as it is."""
        return math.sqrt(float(self.variance.mean()))
