r"""Priors measured on samples: the statistics of a data set.

A covariance of thousands of entries a side can't be estimated from a few thousand
samples as it is: too many of its directions seem to have no variance at all, and an
attacker who believed that would be wrong. It is shrunk towards the power spectrum T of
the same samples, which has as many numbers as a sample has pixels:

.. math:: C = (1 - \rho) S + \rho\, T,

with ρ the least expected squared error in coordinates where T is the identity (Ledoit &
Wolf 2004, "A well-conditioned estimator for large-dimensional covariance matrices",
Eq. 14 and Lemmas 3.2 to 3.5), so that fine detail counts as much as what is coarse.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from leakwatch.priors.cosine import CosinePrior, cosines, transform
from leakwatch.priors.gaussian import GaussianPrior

__all__ = ["FEWEST", "LARGEST_DENSE", "MeasuredPrior", "measured_prior"]

#: Samples from which statistics are measured.
FEWEST = 16
#: Elements of a sample up to which its covariance is kept as a matrix.
LARGEST_DENSE = 4096
# Of the mean variance: rounding of pixels to 256 levels alone gives about this.
_FLOOR = 2e-5
# More channels than these are no colours: their axes are not estimated.
_COLOURS = 16
# Directions beyond those that are wanted, for random projections to find them.
_SPARE = 16
_KNOWS = "the statistics of the data set"


class MeasuredPrior(GaussianPrior):
    """Mean and covariance of samples, shrunk towards their power spectrum.

    Made by :func:`measured_prior`; matrices are formed when they are first asked for.

    Args:
        samples: minus their mean, ``(n, d_x)``, pixel units.
        spectrum: their power spectrum, and mean.

    Attributes:
        spectrum: as given.
    """

    def __init__(self, samples: Float[Tensor, "n d_x"], spectrum: CosinePrior) -> None:
        super().__init__(spectrum.mean, spectrum.knows)
        self.spectrum = spectrum
        self._samples = samples
        self._leading: Tensor | None = None

    @property
    def std(self) -> float:
        """See :class:`GaussianPrior`; shrinking leaves the trace as it is."""
        return self.spectrum.std

    @cached_property
    def shrinkage(self) -> float:
        """ρ, from 0 for the samples' own covariance to 1 for their power spectrum."""
        z = self.spectrum.coefficients(self._samples)
        w = z / self.spectrum.variance.flatten().sqrt().to(z)
        n, d = w.shape
        gram = w @ w.T / n if n < d else w.T @ w / n
        squared, trace = float(gram.square().sum()), float(gram.diagonal().sum())
        apart = squared - trace**2 / d
        error = (float(w.square().sum(1).square().mean()) - squared) / n
        return min(1.0, error / apart) if apart > 0 else 1.0

    @cached_property
    def covariance(self) -> Float[Tensor, "d_x d_x"]:
        """C as a matrix."""
        rho = self.shrinkage
        x = self._samples.double()
        return (x.T @ x) * ((1 - rho) / (len(x) - 1)) + rho * self.spectrum.covariance

    @cached_property
    def precision(self) -> Float[Tensor, "d_x d_x"]:
        """C⁻¹ as a matrix."""
        return torch.cholesky_inverse(self.root)

    def leading(self, count: int) -> Float[Tensor, "count d_x"]:
        """See :class:`GaussianPrior`; random projections find nearly the best ones."""
        if self._leading is None or len(self._leading) < count:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                wide = min(count + _SPARE, self.size)
                u, values, _ = torch.svd_lowrank(self.covariance, wide, niter=4)
            self._leading = (u * values.sqrt()).T[:count]
        return self._leading[:count]

    def draw(
        self, count: int, generator: torch.Generator
    ) -> Float[Tensor, "count d_x"]:
        """See :class:`GaussianPrior`; mixtures of the samples and of their spectrum."""
        x, rho = self._samples, self.shrinkage
        z = torch.randn(count, len(x), generator=generator, dtype=torch.float64)
        own = (z.to(x) @ x).double() * math.sqrt((1 - rho) / (len(x) - 1))
        return own + math.sqrt(rho) * self.spectrum.draw(count, generator)

    def mul(self, v: Float[Tensor, "... d_x"]) -> Float[Tensor, "... d_x"]:
        """See :class:`GaussianPrior`."""
        return v @ self.covariance.to(v)

    def solve(self, v: Float[Tensor, "... d_x"]) -> Float[Tensor, "... d_x"]:
        """See :class:`GaussianPrior`."""
        return v @ self.precision.to(v)


def measured_prior(
    samples: Iterable[Float[Tensor, "*sample"]], knows: str = _KNOWS
) -> MeasuredPrior | CosinePrior:
    """Mean and covariance of samples, as an attacker would know them.

    Args:
        samples: in pixel units, all of one shape, channels first; of a data set like
            the one that is trained on. A few thousand are good, at least 16 are needed.
            They are kept where a sample has at most 4,096 elements; of larger ones the
            power spectrum alone is measured.
        knows: what an attacker with this prior knows.

    Raises:
        ValueError: for fewer than 16 samples, shapes that differ, values that are not
            finite, or samples that don't vary.

    Example:
        >>> import torch
        >>> _ = torch.manual_seed(0)
        >>> smooth = torch.randn(200, 1, 4, 4).cumsum(-1).cumsum(-2) / 10
        >>> prior = measured_prior(smooth)
        >>> bool(prior.covariance[0, 1] > 0), 0 < prior.shrinkage < 1
        (True, True)
    """
    kept, total, origin = [], 0, None
    sums: Tensor | None = None
    power: Tensor | None = None
    axes: tuple[Tensor, ...] = ()
    for sample in samples:
        x = sample.detach().to("cpu", torch.float64)
        if origin is None:
            # Sums around the first sample keep the digits that squares would lose.
            origin = x
            axes = tuple(cosines(n) for n in x.shape[1:])
        if x.shape != origin.shape:
            raise ValueError(
                f"samples of a prior must have one shape, got {tuple(origin.shape)} "
                f"and {tuple(x.shape)}."
            )
        apart = x - origin
        total += 1
        if x.numel() <= LARGEST_DENSE:
            kept.append(apart.float())
        z = transform(apart[None], axes, None)[0]
        squares = _products_of_channels(z)
        sums = z if sums is None else sums + z
        power = squares if power is None else power + squares
    if origin is None or total < FEWEST:
        raise ValueError(
            f"a prior is measured on at least {FEWEST} samples, got {total}; use "
            f"prior='natural' or 'white'."
        )
    assert sums is not None
    assert power is not None
    average = sums / total
    power = (power / total - _products_of_channels(average)) * total / (total - 1)
    mean = origin + transform(average[None], axes, None, back=True)[0]
    spectrum = _spectrum(mean, power, knows)
    if not kept:
        return spectrum
    centred = torch.stack(kept).flatten(1) - (mean - origin).flatten().float()
    return MeasuredPrior(centred, spectrum)


def _products_of_channels(z: Tensor) -> Tensor:
    """z_c z_d at each frequency, ``(c, c, *axes)``; z_c² alone if they are many."""
    return z * z if len(z) > _COLOURS else z[:, None] * z[None]


def _spectrum(mean: Tensor, power: Tensor, knows: str) -> CosinePrior:
    """Channels onto their principal axes, and the variances there."""
    channels = None
    if power.ndim > mean.ndim:
        c = len(mean)
        mixed = power.reshape(c, c, -1).mean(-1)
        if not bool(torch.isfinite(mixed).all()):
            raise ValueError("samples of a prior must be finite.")
        _, channels = torch.linalg.eigh(mixed)
        turned = torch.einsum("ij...,ik,jk->k...", power, channels, channels)
    else:
        turned = power
    level = float(turned.mean())
    if not 0 < level < float("inf"):
        raise ValueError(
            "samples of a prior must be finite and vary; these don't, so nothing is "
            "known of images."
        )
    variance = turned.clamp_min(_FLOOR * level)
    return CosinePrior(mean, variance * (level / variance.mean()), channels, knows)
