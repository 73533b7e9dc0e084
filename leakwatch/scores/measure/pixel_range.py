r"""What an attacker gains who knows the range of pixels.

In the linear model of :mod:`~leakwatch.scores.measure.gaussian_channel` the most
probable image in the range solves

.. math:: \min_z \tfrac{1}{2s^2}\|J(z - x) - \delta\|^2
    + \tfrac12 (z - \mu)^T C^{-1} (z - \mu), \quad
    \text{low} \le z \le \text{high},

which needs H = JᵀJ and Jᵀδ only. A pixel at an end of the range, as most of a digit's
are, is pressed against it by half of all noise, and found exactly; with it goes one
unknown of those that are left. The expectation over the noise has no closed form, but
few draws of Jᵀδ suffice: all their minima are found together.

Where noise moves the image far, the gradient does not change by J(z − x) on the way,
but by the mean of the Jacobians between x and z times z − x. H and Jᵀδ half way stand
for it: :meth:`PixelRange.bend` looks there, and again where that leads.

An attacker who is *told* which pixels lie at the ends has the error of the Gaussian
channel on the others, a closed form that bounds all who have to find out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from leakwatch.derivatives.jacobian import GradientJacobian
from leakwatch.scores.settings import Settings
from leakwatch.spectrum.box import BoxMinima, minima_in_box

__all__ = ["DRAWS", "InRange", "PixelRange", "noise_as_it_arrives"]

#: Draws of the noise over which predictions are averaged; those of large images, whose
#: many pixels average too, are fewer.
DRAWS: Final = 16
_DRAWN_PIXELS: Final = 8192
_FEWEST: Final = 8
# Entries of gradients that are drawn for all samples at once.
_DRAWN_NUMBERS: Final = 2**25
# Looks half way, and decibels by which the last one may still change a prediction.
_LOOKS: Final = 4
_SETTLED_DB: Final = 0.3
# Draws with which rounding is tried, and units in the last place that it is taken for.
_TRIED: Final = 2
_ROUNDED: Final = 4.0
# Of the prior's part of M's diagonal: below it, one step of the search for a minimum
# moves what the gradient does not show by less than its tolerance can tell.
_FLAT: Final = 1e-10
# Of the range: what normalising an image and taking it back may do to it.
_SLACK: Final = 1e-5


@final
@dataclass(frozen=True)
class InRange:
    """Errors of the most probable image in the range, one for each draw of the noise.

    Attributes:
        squared: ‖z − x‖², ``(draws,)``, pixel units squared.
        exact: whether each minimum was found, to a few hundredths of a decibel.
        delta: z − x of a linear network, ``(draws, d_x)``.
        straight: whether they are those of a linear network, because the Jacobian half
            way is not finite.
    """

    squared: Float[Tensor, " draws"]
    exact: bool
    delta: Float[Tensor, "draws d_x"]
    straight: bool = False

    def bent(self, decibels: float) -> InRange:
        """The same with the gain of :meth:`PixelRange.bend`."""
        if math.isnan(decibels):
            return replace(self, straight=True)
        return replace(self, squared=self.squared * 10 ** (-decibels / 10))


@final
@dataclass(frozen=True, eq=False)
class PixelRange:
    """H, an image and its range: all that the prediction needs; pixel units, float64.

    Attributes:
        h: H, ``(d_x, d_x)``.
        image: x, ``(d_x,)``.
        offset: x − μ.
        noise: Jᵀξ for draws of ξ with independent standard normal entries,
            ``(draws, d_x)``.
        elsewhere: z − x ↦ H and Jᵀξ at z, of the first draw; ``None`` where only the
            image itself was measured.
    """

    h: Float[Tensor, "d_x d_x"]
    image: Float[Tensor, " d_x"]
    offset: Float[Tensor, " d_x"]
    noise: Float[Tensor, "draws d_x"]
    elsewhere: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None

    def leaves(self, high: float) -> bool:
        """Whether the image is not in [0, high], so that the range is another one."""
        slack = _SLACK * high
        return bool(((self.image < -slack) | (self.image > high + slack)).any())

    def ends(self, high: float) -> Bool[Tensor, " d_x"]:
        """Which pixels lie at an end of [0, high]."""
        slack = _SLACK * high
        return (self.image <= slack) | (self.image >= high - slack)

    def least_noise(self, settings: Settings) -> float:
        """The noise below which rounding may hide what the prior says.

        s²/R² then does not stand out from the rounding of H, √n ε λ_1 where that of its
        entries adds up as at random, with λ_1 ≤ tr H. Whether it matters depends on the
        image: see :meth:`steady`. With a full covariance R is that of an average pixel:
        what the gradient hardly shows varies little in images too.

        Args:
            settings: the prior.
        """
        n, eps = len(self.h), float(torch.finfo(self.h.dtype).eps)
        spread = _spread(settings)
        return spread * math.sqrt(n**0.5 * eps * float(self.h.diagonal().sum()))

    def steady(
        self, settings: Settings, noise_std: float, known: InRange | None = None
    ) -> bool:
        """Whether the prediction stays where rounding of H would have been another.

        Pixels that are pressed to an end of the range take with them what the gradient
        hardly shows: little noise may be enough. So it is tried, for the first draws,
        with entries that are off by as much as rounding can make them.

        Args:
            settings: the prior.
            noise_std: s.
            known: :meth:`errors` there, of the draws; found out by default.
        """
        known = known or self.errors(settings, noise_std)
        drawn = noise_std * self.noise[:_TRIED]
        n, eps = len(self.h), float(torch.finfo(self.h.dtype).eps)
        generator = torch.Generator("cpu").manual_seed(0)
        off = torch.randn(n, n, generator=generator, dtype=torch.float64).to(self.h)
        size = self.h.diagonal().clamp_min(0).sqrt()
        other = self.h + _ROUNDED * eps * size[:, None] * (off + off.T) * size
        found = self._minima(other, drawn, settings, noise_std, known.delta[:_TRIED])
        if not (known.exact and bool(found.converged.all())):
            return False
        a, b = known.squared[:_TRIED].sum().sqrt(), found.delta.norm()
        return bool(20 * (a / b).log10().abs() < _SETTLED_DB)

    def errors(
        self,
        settings: Settings,
        noise_std: float,
        pulled: Tensor | None = None,
        near: Tensor | None = None,
        *,
        checked: bool = False,
    ) -> InRange:
        """Errors of the most probable image in the range.

        Args:
            settings: the prior.
            noise_std: s.
            pulled: Jᵀδ of one given δ; default: s times each draw.
            near: z − x of each draw where the search begins, cut to the range.
            checked: whether the minima at less noise were found, and checked.
        """
        arrived = noise_std * self.noise if pulled is None else pulled[None]
        found = self._minima(
            self.h, arrived, settings, noise_std, near, checked=checked
        )
        squared = found.delta.square().sum(1)
        return InRange(squared, bool(found.converged.all()), found.delta)

    def bend(
        self, settings: Settings, noise_std: float, known: InRange | None = None
    ) -> float:
        """What the prediction gains where the network is not linear, in decibels.

        Args:
            settings: the prior.
            noise_std: s.
            known: :meth:`errors` there, of the draws; found out by default.

        Returns:
            The change for the first draw, with the Jacobian half way between the image
            and where the attack ends; 0 dB where none but that at the image is known,
            NaN where the network gives no finite one.
        """
        first = (known or self.errors(settings, noise_std)).delta[0]
        straight = float(first.norm())
        if self.elsewhere is None or straight == 0:
            return 0.0
        last, change = first, straight
        for _ in range(_LOOKS):
            h, pulled = self.elsewhere(last / 2)
            if not bool(torch.isfinite(h).all() and torch.isfinite(pulled).all()):
                return math.nan
            there = self._minima(
                h, noise_std * pulled[None], settings, noise_std, last[None]
            )
            # Half of the way: a step alone turns back and forth around the answer.
            last = (last + there.delta[0]) / 2
            before, change = change, float(last.norm())
            if change == 0 or before == 0:
                return 0.0
            if abs(20 * math.log10(before / change)) < _SETTLED_DB:
                break
        return 20 * math.log10(straight / change)

    def _minima(
        self,
        h: Float[Tensor, "d_x d_x"],
        arrived: Float[Tensor, "draws d_x"],
        settings: Settings,
        noise_std: float,
        near: Float[Tensor, "draws d_x"] | None = None,
        *,
        checked: bool = False,
    ) -> BoxMinima:
        """Z − x of the most probable image z in the range, for each Jᵀδ."""
        prior = _precision(settings, h)
        # All of it times s²/d̄, so that its entries are about 1.
        unit = float(h.diagonal().mean()) or 1.0
        m = (h + noise_std**2 * prior) / unit
        towards = noise_std**2 * (prior @ self.offset)
        high = settings.data_range
        low = -self.image.clamp(0.0, high)
        flat = noise_std**2 < _FLAT * unit * _spread(settings) ** 2
        if near is not None:
            near = torch.minimum(torch.maximum(near, low), low + high)
        return minima_in_box(
            m,
            (towards - arrived) / unit,
            low,
            low + high,
            flat=flat,
            near=near,
            checked=checked,
        )

    def told(self, settings: Settings, noise_std: float) -> float:
        """Mean squared error of an attacker who is told which pixels lie at the ends.

        s² tr (H + s²C⁻¹)⁻¹ over the other pixels; 0 when there are none.

        Args:
            settings: the prior.
            noise_std: s.
        """
        inside = ~self.ends(settings.data_range)
        if not bool(inside.any()):
            return 0.0
        m = self.h + noise_std**2 * _precision(settings, self.h)
        lower, info = torch.linalg.cholesky_ex(m[inside][:, inside])
        if int(info):
            return math.nan
        return noise_std**2 * float(torch.cholesky_inverse(lower).diagonal().sum())


def _spread(settings: Settings) -> float:
    """R, with a full covariance that of an average pixel."""
    return settings.prior_std if settings.prior is None else settings.prior.std


def _precision(settings: Settings, like: Tensor) -> Tensor:
    """C⁻¹."""
    if settings.prior is None:
        eye = torch.eye(len(like), dtype=like.dtype, device=like.device)
        return eye / settings.prior_std**2
    return settings.prior.precision.to(like)


def noise_as_it_arrives(
    jacobian: GradientJacobian, draws: int | None = None, seed: int = 0
) -> Float[Tensor, "batch draws d_x"]:
    """Jᵀξ of each sample for the same draws of ξ ~ N(0, I); float64.

    The same draws for all samples and at every call: differences between samples,
    noise levels and epochs are then theirs, not those of the draws.

    Args:
        jacobian: of the samples.
        draws: how many; default: 16, or fewer of large images.
        seed: of a generator of its own.
    """
    batch, d_theta, d_x = jacobian.shape
    if draws is None:
        draws = max(_FEWEST, min(DRAWS, _DRAWN_PIXELS // d_x))
    generator = torch.Generator(device="cpu").manual_seed(seed)
    together = max(1, min(draws, _DRAWN_NUMBERS // (batch * d_theta)))
    arrived = []
    for start in range(0, draws, together):
        rows = min(together, draws - start)
        # One after the other: a draw must not depend on how many are taken together.
        xi = torch.stack(
            [
                torch.randn(d_theta, generator=generator, dtype=torch.float32)
                for _ in range(rows)
            ]
        ).to(jacobian.scale.device, jacobian.dtype)
        there = jacobian.normalized_pulls(xi).double()
        arrived.append(there * jacobian.scale[:, None, None])
    return torch.cat(arrived, 1)
