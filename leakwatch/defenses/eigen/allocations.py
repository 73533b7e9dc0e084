"""How a budget of noise is spread over the directions of J, and what of it counts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from leakwatch.checks import check_integer, check_number
from leakwatch.defenses.covariance import Covariance
from leakwatch.defenses.eigen.basis import Basis
from leakwatch.defenses.eigen.input_space import InRange
from leakwatch.defenses.samples import Samples

__all__ = [
    "Allocation",
    "AlongDirections",
    "InputSpace",
    "Proportional",
    "Single",
    "Smallest",
    "Waterfill",
    "energy_in_range",
    "energy_share",
]


class Allocation(ABC):
    """Where noise goes.

    Attributes:
        name: recorded with results.
        needs_basis: whether it takes the singular directions of the samples.
    """

    needs_basis: ClassVar[bool] = True

    # Not at run time: a dataclass takes a property of its base for a field's default.
    if TYPE_CHECKING:

        @property
        def name(self) -> str:
            """Recorded with results."""

    @abstractmethod
    def covariance(self, samples: Samples, total: Float[Tensor, " n"]) -> Covariance:
        """The covariance of the noise on each sample's gradient.

        Args:
            samples: the samples.
            total: E‖δ‖² that may be spent on each, float64.
        """


class AlongDirections(Allocation):
    """Independent noise along each of the v_i.

    Attributes:
        exact: whether images are moved, see :class:`InRange`.
    """

    exact: ClassVar[bool] = False

    def covariance(self, samples: Samples, total: Float[Tensor, " n"]) -> InRange:
        """Of the D_i that :meth:`spread` gives."""
        basis = samples.basis
        variance = self.spread(basis.visible, basis.resolved, total)
        return InRange(samples, variance, self.exact)

    @abstractmethod
    def spread(
        self,
        eigenvalues: Float[Tensor, "n d_x"],
        resolved: Bool[Tensor, "n d_x"],
        total: Float[Tensor, " n"],
    ) -> Float[Tensor, "n d_x"]:
        """D_i, the variance along each v_i.

        Args:
            eigenvalues: λ_i, descending, 0 where they are not resolved.
            resolved: which of them are.
            total: E‖δ‖² that may be spent.
        """


@final
@dataclass(frozen=True)
class Smallest(AlongDirections):
    """Equal noise along the k resolved directions of smallest σ.

    The same ‖δ‖ moves a recovery by ‖δ‖/σ, most where σ is smallest (I²F, Section 5.1).
    What was hidden from the start, directions that are not resolved, gets nothing.

    Args:
        k: how many; all that are resolved where there are fewer.
    """

    k: int = 10
    name: ClassVar[str] = "smallest"

    def __post_init__(self) -> None:
        check_integer("k", self.k)

    def spread(
        self,
        eigenvalues: Float[Tensor, "n d_x"],
        resolved: Bool[Tensor, "n d_x"],
        total: Float[Tensor, " n"],
    ) -> Float[Tensor, "n d_x"]:
        """D_i = E‖δ‖²/k."""
        return _evenly(resolved & (_from_smallest(resolved) <= self.k), total)


@final
@dataclass(frozen=True)
class Single(AlongDirections):
    """All noise along one direction: Figure 5 of I²F, where MSE ∝ 1/λ.

    Args:
        direction: 0, 1, … from the largest σ, −1, −2, … from the smallest resolved one.
    """

    direction: int = -1
    name: ClassVar[str] = "single"

    def spread(
        self,
        eigenvalues: Float[Tensor, "n d_x"],
        resolved: Bool[Tensor, "n d_x"],
        total: Float[Tensor, " n"],
    ) -> Float[Tensor, "n d_x"]:
        """D_i = E‖δ‖² for that direction.

        Raises:
            ValueError: if a sample has fewer resolved directions.
        """
        if self.direction < 0:
            chosen = resolved & (_from_smallest(resolved) == -self.direction)
        else:
            chosen = resolved & (resolved.cumsum(1) == self.direction + 1)
        if not bool(chosen.any(1).all()):
            i = int((~chosen.any(1)).nonzero()[0])
            raise ValueError(
                f"direction {self.direction} of sample {i} is not resolved: rounding "
                f"leaves {int(resolved[i].sum())} of its {resolved.shape[1]} "
                f"directions. Choose another, or use float64."
            )
        return _evenly(chosen, total)


@final
@dataclass(frozen=True)
class Proportional(AlongDirections):
    """Noise along all resolved directions with a variance proportional to a power of λ.

    Args:
        exponent: 1: recovery errors D_i/λ_i are equal in all directions, as if the
            image were blurred by the same noise everywhere. ½: D_i ∝ σ_i maximises the
            Bayesian Cramér–Rao bound d_x²/tr(JᵀΣ⁻¹J) among noise along the v_i. 0:
            isotropic in the range of J.
    """

    exponent: float = 1.0
    name: ClassVar[str] = "proportional"

    def __post_init__(self) -> None:
        check_number("exponent", self.exponent, "[0, inf)", example=1.0)

    def spread(
        self,
        eigenvalues: Float[Tensor, "n d_x"],
        resolved: Bool[Tensor, "n d_x"],
        total: Float[Tensor, " n"],
    ) -> Float[Tensor, "n d_x"]:
        """D_i ∝ λ_i^exponent."""
        largest = eigenvalues.amax(1, keepdim=True)
        relative = eigenvalues / torch.where(largest > 0, largest, 1.0)
        weight = torch.where(resolved, relative**self.exponent, 0.0)
        sums = weight.sum(1, keepdim=True)
        return total[:, None] * weight / torch.where(sums > 0, sums, 1.0)


@final
@dataclass(frozen=True)
class Waterfill(AlongDirections):
    """Hides as many directions as the budget buys, the cheapest first.

    Noise of variance D_i along v_i moves a recovery along u_i by √(D_i/λ_i). Once that
    is the size R of the box of images the direction is hidden, and more noise there is
    wasted; so it costs λ_i R². The last direction gets what is left. What remains when
    all are hidden is not spent: ``Shared.variance`` states what was.

    An attacker with a Gaussian prior of standard deviation R still halves the squared
    error R² of a hidden direction: λR²·R²/(λR² + λR²).

    Args:
        box: R, in pixels where samples know their scale.
    """

    box: float = 1.0
    name: ClassVar[str] = "waterfill"

    def __post_init__(self) -> None:
        check_number("box", self.box, example=0.25)

    def spread(
        self,
        eigenvalues: Float[Tensor, "n d_x"],
        resolved: Bool[Tensor, "n d_x"],
        total: Float[Tensor, " n"],
    ) -> Float[Tensor, "n d_x"]:
        """D_i = min(λ_i R², what is left for it)."""
        cost = eigenvalues.flip(1) * self.box**2
        before = torch.cat([torch.zeros_like(cost[:, :1]), cost.cumsum(1)[:, :-1]], 1)
        left = (total[:, None] - before).clamp_min(0)
        return torch.minimum(cost, left).flip(1)


@final
@dataclass(frozen=True)
class InputSpace(AlongDirections):
    """Shares the gradient of x + a instead, a = Σ R ξ_i u_i over what can be hidden.

    The twin of :class:`Waterfill` in input space: to first order g(x + a) = g(x) + J a,
    and J a has the covariance of its noise, D_i = λ_i R². The last direction gets
    √(D_i/λ_i) < R. What is shared is the gradient of an image, which no attacker can
    tell from a true one.

    The covariance made here is that of J a. :class:`leakwatch.defenses.EigenNoise`
    hands it, in place of the budget, whatever makes the real ‖δ‖ the budget in every
    draw; on trained networks that is much less, and fewer directions are hidden.

    Args:
        box: R, in pixels where samples know their scale.
    """

    box: float = 1.0
    name: ClassVar[str] = "input_space"
    exact: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_number("box", self.box, example=0.25)

    def spread(
        self,
        eigenvalues: Float[Tensor, "n d_x"],
        resolved: Bool[Tensor, "n d_x"],
        total: Float[Tensor, " n"],
    ) -> Float[Tensor, "n d_x"]:
        """As for :class:`Waterfill`."""
        return Waterfill(self.box).spread(eigenvalues, resolved, total)


def energy_share(covariance: Covariance, basis: Basis) -> Float[Tensor, " n"]:
    """The part of E‖δ‖² inside the range of J: Σ v_iᵀΣv_i / tr Σ.

    For isotropic noise that is the number of resolved directions over d_θ, about
    d_x/d_θ; the rest an attacker who knows the network projects away. For noise along
    the v_i it is 1.

    Args:
        covariance: of the noise.
        basis: of J; directions that are not resolved do not count.

    Returns:
        From 0 to 1, ``(n,)``; NaN for no noise.
    """
    return covariance.along(basis).sum(1) / covariance.total


def energy_in_range(
    delta: Float[Tensor, "n d_theta"], basis: Basis
) -> Float[Tensor, " n"]:
    """The same for one δ: ‖Pδ‖²/‖δ‖² with P the projection on the range of J.

    Args:
        delta: a perturbation of each message.
        basis: of J.

    Returns:
        From 0 to 1, ``(n,)``; NaN for δ = 0.
    """
    inside = basis.pull(delta).square().sum(1)
    share: Tensor = inside / delta.double().square().sum(1)
    return share


def _from_smallest(resolved: Tensor) -> Tensor:
    """1, 2, … from the last resolved column backwards."""
    return resolved.flip(1).cumsum(1).flip(1)


def _evenly(chosen: Tensor, total: Tensor) -> Tensor:
    each = total / chosen.sum(1).clamp_min(1)
    return torch.where(chosen, each[:, None], 0.0)
