r"""J along the leading components of an image prior, and what that says of the rest.

What people recognise in an image lies in a few hundred components of its statistics:
low frequencies, or principal components of a data set. With the prior's covariance
C = L Lᵀ and an image μ + L_k w + L_r u, J along the columns of L_k is a tangent for
each, whatever the size of the image, and G = L_kᵀHL_k is well conditioned.

The others are not looked at one by one, but not ignored either. A few random draws of
L_r u show what they do to the gradient:

- they hide the leading ones, as noise J L_r u that the attacker did not ask for. Who
  estimates w by a filter (G + τI)⁻¹ L_kᵀJᵀ and leaves u at its mean has an error that
  the draws tell; the best attacker has at most that: :meth:`Components.most`;
- at best each component is seen as if all others were known, and the energy T =
  E ‖J L_r u‖² is where it helps most. By Cauchy's inequality the error in u is at least
  ρ/(1 + T v/(ρ s²)) for a total variance ρ = tr L_rᵀL_r, of which no component has more
  than v: :meth:`Components.least`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from leakwatch.derivatives.jacobian import GradientJacobian
from leakwatch.priors import GaussianPrior

__all__ = ["COUNTS", "Components", "Image", "leading_components"]

#: How many components may be looked at.
COUNTS = (64, 128, 256)
# Decibels that more components must be able to change: a tenth of the error.
_ENOUGH_DB = 0.8
# Part of the error: where less is in what was looked at, all of that is out; and below
# this mean square, of the range's, people recognise the picture anyway (20 dB).
_ALL_OUT = 0.1
_RECOGNISED = 1e-2
# What the others hide may make of that: a decibel.
_HIDDEN = 1.26
# Random draws of the components that are not looked at, and of directions apart from
# those that are: for their energy, and for the trace.
_DRAWS = 8
_WHITE = 4
# Standard errors of the draws' mean by which bounds are moved.
_SURE = 2.0
# Between the noise alone and all that hides the components, filters to choose from.
_FILTERS = (0.0, 1e-3, 1e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0)
# Directions of several samples at once.
_GROUP_BYTES = 256 * 2**20
# MiB for tangents; with less they would be formed over and over.
_LEAST_MEMORY = 16.0
# Draws of the noise over which predictions for one image are averaged.
_NOISES = 16


@final
@dataclass(frozen=True, eq=False)
class Image:
    """One image in components of the prior; pixel units, float64.

    Attributes:
        pixels: x, ``(d_x,)``.
        offset: x − μ.
        rows: L_kᵀ, ``(k, d_x)``.
        hides: L_kᵀJᵀJ times the part of x − μ that L_k can't make, ``(k,)``.
    """

    pixels: Float[Tensor, " d_x"]
    offset: Float[Tensor, " d_x"]
    rows: Float[Tensor, "k d_x"]
    hides: Float[Tensor, " k"]


@final
@dataclass(frozen=True, eq=False)
class Components:
    """H and the prior along some components L_k of it, L Lᵀ = C.

    Attributes:
        gram: G = L_kᵀ H L_k, ``(k, k)``, float64.
        norms: L_kᵀ L_k, ``(k, k)``, pixel units squared; diagonal.
        rest: ρ = tr C − tr L_kᵀL_k, the variance of all others together.
        size: d_x.
        hides: L_kᵀHL_r u for draws of u, ``(draws, k)``.
        energy: ‖J L_r u‖² of the same, ``(draws,)``.
        image: the image at hand, for errors that hold for it alone.
        along: L_kᵀJᵀĝ, ``(k,)``.
        white: ‖J z‖² for standard normal z apart from L_k, ``(draws,)``.
        memo: errors of filters by the noise, once they are known.
    """

    gram: Float[Tensor, "k k"]
    norms: Float[Tensor, "k k"]
    rest: float
    size: int
    hides: Float[Tensor, "draws k"]
    energy: Float[Tensor, " draws"]
    image: Image | None = None
    along: Float[Tensor, " k"] | None = None
    white: Float[Tensor, " draws"] | None = None
    memo: dict[float, Tensor] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """K."""
        return len(self.gram)

    @property
    def share(self) -> float:
        """Part of the prior's variance that the components hold."""
        seen = float(self.norms.diagonal().sum())
        return seen / (seen + self.rest)

    @cached_property
    def trace(self) -> tuple[float, float]:
        """Σλ of H, and its standard error."""
        seen = float((self.gram.diagonal() / self.norms.diagonal()).sum())
        if self.white is None or self.count == self.size:
            return seen, 0.0 if self.count == self.size else math.inf
        spread = float(self.white.std() / math.sqrt(len(self.white)))
        return seen + float(self.white.mean()), spread

    def error(self, noise_std: float) -> float:
        """Mean squared error in the components of who knows all others."""
        gain, _ = self.channels
        left = noise_std**2 / (noise_std**2 + gain)
        return float((self.weight.diagonal() * left).sum())

    def least(self, noise_std: float) -> float:
        """A mean squared error of the whole image that no attacker falls below.

        Args:
            noise_std: s.
        """
        if self.rest <= 0:
            return self.error(noise_std)
        largest = float(self.norms.diagonal().min())
        energy = float(self.energy.mean()) + _SURE * self._spread(self.energy)
        shown = energy * largest / (self.rest * noise_std**2)
        return self.error(noise_std) + self.rest / (1 + shown)

    def most(self, noise_std: float) -> float:
        """A mean squared error that the best attacker does not exceed.

        Args:
            noise_std: s.
        """
        errors = self._filtered(noise_std)
        everything = float(self.norms.diagonal().sum())
        return min(float(errors.min()), everything) + self.rest

    def squared_errors(
        self, noise_std: float, data_range: float
    ) -> Float[Tensor, " draws"] | None:
        """‖z − x‖² for the image at hand, one for each draw of the noise.

        z is the filtered image, each pixel moved into the range: what an attacker does
        who models the leading components alone and knows the range.

        Args:
            noise_std: s.
            data_range: peak; the range begins at 0.
        """
        if self.image is None:
            return None
        gain, columns = self.channels
        errors = self._filtered(noise_std)
        tau = self._levels(noise_std)[int(errors.argmin())]
        image = self.image
        own = image.rows @ image.offset / self.norms.diagonal()
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randn(
            _NOISES, self.count, generator=generator, dtype=torch.float64
        ).to(gain)
        shown = gain * (own @ columns) + image.hides @ columns
        shown = shown + noise_std * gain.sqrt() * (drawn @ columns)
        found = (shown / (gain + tau)) @ columns.T
        if float(errors.min()) > float(self.norms.diagonal().sum()):
            found = torch.zeros_like(found)
        z = (image.pixels - image.offset) + (found.to(image.rows) @ image.rows).double()
        return (z.clamp(0.0, data_range) - image.pixels).square().sum(1)

    def head(self, count: int) -> Components:
        """The first of the components alone; the next ones join the others.

        Args:
            count: how many.
        """
        if count >= self.count:
            return self
        generator = torch.Generator().manual_seed(1)
        size = len(self.energy), self.count - count
        u = torch.randn(size, generator=generator, dtype=torch.float64).to(self.gram)
        between, further = self.gram[count:, :count], self.gram[count:, count:]
        moved = self.norms.diagonal()[count:]
        own = u @ self.hides[:, count:].mT
        energy = self.energy + 2 * own.diagonal() + (u @ further * u).sum(1)
        image = self.image
        if image is not None:
            coordinates = image.rows[count:] @ image.offset / moved
            hides = image.hides[:count] + coordinates @ between
            image = replace(image, rows=image.rows[:count], hides=hides)
        white = self.white
        if white is not None:
            white = white + (further.diagonal() / moved).sum()
        return Components(
            self.gram[:count, :count],
            self.norms[:count, :count],
            self.rest + float(moved.sum()),
            self.size,
            self.hides[:, :count] + u @ between,
            energy,
            image,
            None if self.along is None else self.along[:count],
            white,
        )

    @cached_property
    def channels(self) -> tuple[Float[Tensor, " k"], Float[Tensor, "k k"]]:
        """Eigenvalues of G, ascending and at least 0, and eigenvectors as columns."""
        values, columns = torch.linalg.eigh(self.gram)
        return values.clamp_min(0), columns

    @cached_property
    def weight(self) -> Float[Tensor, "k k"]:
        """L_kᵀL_k along these eigenvectors."""
        _, columns = self.channels
        return columns.T @ (self.norms.diagonal()[:, None] * columns)

    def _levels(self, noise_std: float) -> list[float]:
        """What the filter takes for the noise in each direction of the gradient."""
        gain, columns = self.channels
        seen = gain > gain.max() * torch.finfo(gain.dtype).eps
        through = (self.hides @ columns).square().mean(0)[seen] / gain[seen]
        hidden = float(through.mean()) if bool(seen.any()) else 0.0
        return [noise_std**2 + factor * hidden for factor in _FILTERS]

    def _filtered(self, noise_std: float) -> Float[Tensor, " filters"]:
        """Mean squared error in the components, of each filter."""
        if noise_std in self.memo:
            return self.memo[noise_std]
        gain, columns = self.channels
        weight = self.weight
        hides = self.hides @ columns
        errors = []
        for tau in self._levels(noise_std):
            damped = (gain + tau).reciprocal()
            plain = (tau**2 + noise_std**2 * gain) * damped.square()
            moved = hides * damped
            hidden = ((moved @ weight) * moved).sum(1)
            error = (weight.diagonal() * plain).sum() + hidden.mean()
            errors.append(float(error) + _SURE * self._spread(hidden))
        self.memo[noise_std] = self.gram.new_tensor(errors)
        return self.memo[noise_std]

    def _spread(self, drawn: Tensor) -> float:
        return float(drawn.std()) / math.sqrt(len(drawn)) if len(drawn) > 1 else 0.0


def leading_components(
    jacobian: GradientJacobian,
    prior: GaussianPrior,
    noise_std: float | None,
    *,
    max_memory: float | None,
    pixels: Float[Tensor, "batch d_x"] | None = None,
    data_range: float = 1.0,
    counts: Sequence[int] = COUNTS,
) -> list[Components]:
    """H of each sample along the leading components of a prior.

    As many as make a picture of 20 dB; and all of them where these leave more than
    0.8 dB open, unless all that they show is out.

    Args:
        jacobian: of the samples.
        prior: what is known of images.
        noise_std: s, at which the prediction has to settle; ``None``: as many
            components as there may be.
        max_memory: MiB that tangents may take; 16, if it is less.
        pixels: the images, for errors that hold for them alone.
        data_range: peak of the PSNR.
        counts: how many components may be looked at.
    """
    batch, _, d_x = jacobian.shape
    if max_memory is not None:
        max_memory = max(max_memory, _LEAST_MEMORY)
    peak = d_x * data_range**2
    whole = _Basis.of(prior, min(max(counts), d_x))
    part = whole.recognised(counts, peak)
    x = None if pixels is None else pixels.cpu().double()
    first = part if noise_std is not None else whole
    found = _along(jacobian, range(batch), first, x, max_memory)
    # Whether more are needed is up to each sample alone, not to its batch.
    more = [i for i, one in enumerate(found) if not _enough(one, noise_std, peak)]
    if more and len(first.rows) < len(whole.rows):
        larger = _along(jacobian, more, whole, x, max_memory)
        for i, one in zip(more, larger, strict=True):
            found[i] = one
    return found


def _enough(one: Components, noise_std: float | None, peak: float) -> bool:
    """Whether more components would say little that people care for."""
    if noise_std is None or not bool(one.gram.isfinite().all()):
        return noise_std is not None
    most = one.most(noise_std)
    if most <= 10 ** (_ENOUGH_DB / 10) * one.least(noise_std):
        return True
    out = one.error(noise_std) <= _ALL_OUT * one.rest
    return out and most <= _HIDDEN * _RECOGNISED * peak


@final
@dataclass(frozen=True, eq=False)
class _Basis:
    """Directions that all samples share; on the CPU.

    Attributes:
        prior: of images.
        rows: L_kᵀ.
        squares: of the lengths of its rows.
        drawn: images minus their mean, and white noise.
        others: the same without what L_k can make; none if it can make everything.
    """

    prior: GaussianPrior
    rows: Float[Tensor, "k d_x"]
    squares: Float[Tensor, " k"]
    drawn: Float[Tensor, "draws d_x"]
    others: Float[Tensor, "draws d_x"]

    @classmethod
    def of(cls, prior: GaussianPrior, count: int) -> _Basis:
        """With draws that are the same at every call."""
        generator = torch.Generator().manual_seed(0)
        drawn = prior.draw(_DRAWS, generator).cpu()
        white = torch.randn(
            _WHITE, prior.size, generator=generator, dtype=torch.float64
        )
        rows = prior.leading(count).cpu()
        return cls._made(prior, rows, torch.cat([drawn.double(), white]))

    @classmethod
    def _made(cls, prior: GaussianPrior, rows: Tensor, drawn: Tensor) -> _Basis:
        made = cls(prior, rows, rows.square().sum(1), drawn, drawn[:0])
        if len(rows) >= prior.size:
            return made
        return replace(made, others=made.apart(drawn))

    def head(self, count: int) -> _Basis:
        """Of fewer components."""
        if count >= len(self.rows):
            return self
        return self._made(self.prior, self.rows[:count], self.drawn)

    def recognised(self, counts: Sequence[int], peak: float) -> _Basis:
        """Of the fewest components that make a picture of 20 dB, if any of them do."""
        for count in sorted(counts):
            part = self.head(count)
            if part.rest <= _RECOGNISED * peak:
                return part
        return self

    def apart(self, v: Float[Tensor, "n d_x"]) -> Float[Tensor, "n d_x"]:
        """What of v the components can't make."""
        return v - (v @ self.rows.T / self.squares) @ self.rows

    @property
    def rest(self) -> float:
        """Variance of all other components together."""
        if not len(self.others):
            return 0.0
        total = self.prior.std**2 * self.prior.size
        return max(total - float(self.squares.sum()), 0.0)


def _along(
    jacobian: GradientJacobian,
    samples: Sequence[int],
    basis: _Basis,
    pixels: Float[Tensor, "batch d_x"] | None,
    max_memory: float | None,
) -> list[Components]:
    k, others = len(basis.rows), len(basis.others)
    shared = torch.cat([basis.rows, basis.others])
    offsets, own = None, None
    if pixels is not None:
        offsets = pixels[list(samples)] - basis.prior.mean.to(pixels).flatten()
        own = basis.apart(offsets) if others else None
    scales = jacobian.scale.tolist()
    found: list[Components] = []
    # Of large images a few at a time: their directions alone take memory.
    group = max(1, int(_GROUP_BYTES / (shared.numel() * jacobian.dtype.itemsize)))
    for start in range(0, len(samples), group):
        part = list(samples)[start : start + group]
        directions = shared.to(jacobian.dtype).expand(len(part), -1, -1)
        if own is not None:
            last = own[start : start + group, None].to(jacobian.dtype)
            directions = torch.cat([directions, last], 1)
        grams = jacobian.grams(
            part, directions.to(jacobian.device), max_memory=max_memory
        )
        for i, gram in zip(part, grams, strict=True):
            offset = None if offsets is None else offsets[len(found)]
            x = None if pixels is None else pixels[i]
            scale = scales[i]
            g, along = gram.h.cpu() * scale**2, gram.along.cpu()[:k] * scale
            found.append(_components(basis, g, along, x, offset, k, others))
    return found


def _components(
    basis: _Basis,
    g: Float[Tensor, "n n"],
    along: Float[Tensor, " k"],
    pixels: Float[Tensor, " d_x"] | None,
    offset: Float[Tensor, " d_x"] | None,
    k: int,
    others: int,
) -> Components:
    """From inner products of all tangents of one sample."""
    hides, white = g[k : k + _DRAWS], g.diagonal()[k + _DRAWS : k + others]
    none = g.new_zeros(1, k)
    image = None
    if pixels is not None and offset is not None:
        hidden = g[-1, :k] if others else none[0]
        image = Image(pixels, offset, basis.rows, hidden)
    return Components(
        g[:k, :k],
        torch.diag(basis.squares),
        basis.rest,
        basis.prior.size,
        hides[:, :k] if others else none,
        hides.diagonal(k) if others else none[0, :1],
        image,
        along,
        white if others else None,
    )
