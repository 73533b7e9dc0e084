"""Noise that is drawn as a change of the image: J a, or g(x + a) − g(x)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from leakwatch.defenses.covariance import Coefficients, Covariance, standard
from leakwatch.defenses.eigen.basis import Basis
from leakwatch.defenses.linear_maps import Deflation, LinearMap
from leakwatch.defenses.samples import Samples

__all__ = ["MOST_TRIES", "TOLERANCE", "InRange", "Moves"]

#: How far ‖δ‖ may be from what it is to be, relative to that.
TOLERANCE = 1e-3
#: Gradients of each sample that a search may take.
MOST_TRIES = 40

# Where nothing bounds the next try from above, or from below.
_GROWTH = (2.0, 16.0)
_DECAY = (1e-6, 0.5)
# Of the logarithm of a bracket: how near to its ends a try may come.
_INSIDE = (0.02, 0.98)
# A bracket narrower than this holds a jump, as of a ReLU network's gradient.
_NARROW = 1e-9


@final
@dataclass(frozen=True, eq=False)
class InRange(Covariance):
    """Σ = Σ_i D_i v_i v_iᵀ: noise in the range of J, drawn as an image.

    Attributes:
        samples: whose J it is.
        variance: D_i, ``(n, d_x)``, float64, 0 where a direction is not resolved.
        exact: share g(x + a) instead of g(x) + J a, where J a is the noise: equal to
            first order in a. D is then the covariance to first order only, and E‖δ‖²
            another than its sum: see :class:`Moves`.
    """

    samples: Samples
    variance: Float[Tensor, "n d_x"]
    exact: bool = False

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


@final
@dataclass(frozen=True, eq=False)
class Moves:
    """The images x + a(t), where t moves them along one draw, and their gradients.

    a = Σ ξ_i √(D_i(t)/λ_i) u_i with the noise D(t) that an allocation makes of a budget
    t, such as :class:`leakwatch.defenses.InputSpace`. To first order the gradient moves
    by ‖J a‖² = Σ ξ_i² D_i(t), t in the mean over draws; what it really moves by is
    looked for, since on a trained network it can be ten times as much.

    The size of δ = g(x + a(t)) − g(x) need not grow with t, but where the gradient is
    continuous every size between two that were found is taken between them: a bracket
    that begins at t = 0, where δ = 0, narrows by interpolation of log ‖δ‖ over log t,
    and by bisection every third time.

    Attributes:
        spread: t of each sample to the noise D(t) of each.
        xi: ξ, ``(n, d_x)``.
    """

    spread: Callable[[Float[Tensor, " n"]], InRange]
    xi: Float[Tensor, "n d_x"]

    def delta(self, t: Float[Tensor, " n"]) -> Float[Tensor, "n d_theta"]:
        """g(x + a(t)) − g(x) of each, float64."""
        return self.spread(t).changed(self.xi)

    def alone(self, total: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """The t at which ‖δ‖² of each sample is what it is to be.

        Args:
            total: ‖δ‖² of each, gradient units squared.

        Returns:
            t, ``(n,)``, float64: ‖δ‖ is right to :data:`TOLERANCE`; or it is smaller,
            where no more t is spent (everything is hidden), or where ‖δ‖ jumps over it.
        """
        searches = [_Search(math.sqrt(b), b) for b in total.tolist()]
        for _ in range(MOST_TRIES):
            rows = [i for i, search in enumerate(searches) if search.open]
            if not rows:
                break
            noise = self.spread(total.new_tensor([search.t for search in searches]))
            spent = noise.total.tolist()
            sizes = noise.changed(self.xi, rows).norm(dim=1).tolist()
            for i, size in zip(rows, sizes, strict=True):
                searches[i].take(size, spent[i])
        return total.new_tensor([search.low for search in searches])

    def together(
        self, t: Float[Tensor, " n"], weight: Float[Tensor, " n"], size: float
    ) -> Float[Tensor, " n"]:
        """The multiple of all t at which ‖Σ_i w_i δ_i‖ is what it is to be.

        What noise of several samples adds up to is known in the mean only to first
        order: the rest of each δ_i has a mean, which does not cancel between samples.

        Args:
            t: of each sample, to begin with.
            weight: w.
            size: ‖Σ_i w_i δ_i‖.

        Returns:
            t, as for :meth:`alone`.
        """
        search = _Search(size, 1.0)
        for _ in range(MOST_TRIES):
            if not search.open:
                break
            noise = self.spread(t * search.t)
            spent = noise.total / torch.where(t > 0, t, 1.0)
            message = weight @ noise.changed(self.xi)
            search.take(float(message.norm()), float(spent.max()))
        return t * search.low


@final
@dataclass
class _Search:
    """For a t at which some size is what it is to be.

    Attributes:
        target: the size.
        t: the next to try.
        low: where the size is right, or else the largest t with a smaller one.
        high: the smallest t with a larger size.
        at_low: the size there.
        at_high: the size there.
        tries: how many sizes were found.
        open: whether there is more to try.
    """

    target: float
    t: float
    low: float = 0.0
    high: float = math.inf
    at_low: float = 0.0
    at_high: float = math.inf
    tries: int = 0

    @property
    def open(self) -> bool:
        asked = self.target > 0 and self.t > 0
        return asked and self.high > self.low * (1 + _NARROW)

    def take(self, size: float, spent: float) -> None:
        """Takes what was found at t, of which no more than so much was spent."""
        self.tries += 1
        more = spent >= self.t * (1 - _NARROW)
        t = min(self.t, spent)
        right = abs(size - self.target) <= TOLERANCE * self.target
        if right or size < self.target:
            self.low, self.at_low = t, size
        else:
            # Where it is not a number, too.
            self.high, self.at_high = t, size if math.isfinite(size) else math.inf
        if right or (self.low == t and not more):
            self.high = self.low
        else:
            self.t = self._next()

    def _next(self) -> float:
        if math.isinf(self.high):
            return self.low * _between(_GROWTH, self._squared(self.at_low))
        if self.low == 0:
            return self.high * _between(_DECAY, self._squared(self.at_high))
        part = 0.5
        if self.tries % 3 and self.at_low > 0 and math.isfinite(self.at_high):
            whole = math.log(self.at_high / self.at_low)
            part = _between(_INSIDE, math.log(self.target / self.at_low) / whole)
        return self.low * math.exp(part * math.log(self.high / self.low))

    def _squared(self, size: float) -> float:
        """By what t is multiplied to first order for the size to be right."""
        ratio = math.inf if size == 0 else self.target / size
        return ratio * ratio


def _between(bounds: tuple[float, float], value: float) -> float:
    return min(max(value, bounds[0]), bounds[1])
