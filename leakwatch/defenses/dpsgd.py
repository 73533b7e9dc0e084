"""Per-sample clipping and Gaussian noise, as in differentially private training."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor

from leakwatch.checks import check_number
from leakwatch.defenses.base import (
    Defense,
    Needs,
    Reduction,
    Shared,
    averaging,
    check_gradient,
    combined,
)
from leakwatch.defenses.budget import Budget
from leakwatch.defenses.covariance import Isotropic
from leakwatch.defenses.samples import Samples

__all__ = ["DPSGD", "dp_sgd"]


@final
@dataclass(frozen=True)
class DPSGD(Defense):
    """Shortens each sample's gradient to norm C and adds noise of σC to their sum.

    Abadi et al., "Deep Learning with Differential Privacy", CCS 2016, Algorithm 1. Here
    as the defense that everybody knows, measured like the others: by what attacks find.
    :func:`leakwatch.defenses.privacy_loss` says which ε that is.

    A message of one sample is a batch of one. A batch draws its noise once, on the sum.

    Args:
        clip: C, gradient units.
        noise_multiplier: σ, the noise on the sum has a standard deviation of σC.

    Raises:
        TypeError: if one is not a number.
        ValueError: for C ≤ 0 or σ < 0.

    Example:
        >>> import torch
        >>> made = DPSGD(1.0, 0.0).protect(
        ...     torch.tensor([[3.0, 4.0], [0.3, 0.4]]), generator=torch.Generator())
        >>> made.gradient
        tensor([[0.6000, 0.8000],
                [0.3000, 0.4000]])
    """

    clip: float
    noise_multiplier: float
    name: ClassVar[str] = "dp-sgd"
    needs: ClassVar[Needs] = "sample gradients"

    def __post_init__(self) -> None:
        check_number("clip", self.clip, example=1.0)
        check_number("noise_multiplier", self.noise_multiplier, "[0, inf)", example=1.0)

    @property
    def budget(self) -> Budget:
        """That of the noise on a message of one sample, or on a sum: σC an entry."""
        return Budget(self.noise_multiplier * self.clip, "std")

    def protect(
        self,
        gradient: Float[Tensor, "n d_theta"],
        *,
        generator: torch.Generator,
        samples: Samples | None = None,
    ) -> Shared:
        """Clips each row and adds noise to it. See :meth:`Defense.protect`."""
        clipped = self._clipped(gradient)
        made = self._noisy(gradient, clipped, 1.0, generator)
        return replace(made, knowledge=replace(made.knowledge, clip=self.clip))

    def protect_batch(
        self,
        gradient: Float[Tensor, "n d_theta"],
        *,
        generator: torch.Generator,
        samples: Samples | None = None,
        reduction: Reduction = "mean",
    ) -> Shared:
        """Clips each row, adds noise to the sum, and divides by n for the mean."""
        weight = averaging(len(gradient), reduction)
        clipped = combined(self._clipped(gradient), reduction)
        return self._noisy(combined(gradient, reduction), clipped, weight, generator)

    def _clipped(self, gradient: Tensor) -> Tensor:
        check_gradient(gradient)
        norm = gradient.double().norm(dim=1, keepdim=True)
        short = (self.clip / norm.clamp_min(self.clip)).to(gradient.dtype)
        clipped: Tensor = gradient * short
        return clipped

    def _noisy(
        self,
        clean: Tensor,
        clipped: Tensor,
        weight: float,
        generator: torch.Generator,
    ) -> Shared:
        n, size = clean.shape
        std = weight * self.noise_multiplier * self.clip
        variance = torch.full((n,), std**2, dtype=torch.float64).to(clean.device)
        covariance = Isotropic(variance, size)
        made = Shared.noisy(clipped, covariance.draw(generator), covariance)
        return replace(made, clean=clean, bias=clipped - clean)


def dp_sgd(budget: Budget, clip: float = 1.0) -> DPSGD:
    """DP-SGD with noise of a stated size, as trade-offs ask for defenses.

    Args:
        budget: σC, in the unit ``"std"``.
        clip: C, gradient units.

    Raises:
        ValueError: for a budget in another unit, which would follow the gradient.

    Example:
        >>> dp_sgd(Budget(1.5, "std"))
        DPSGD(clip=1.0, noise_multiplier=1.5)
    """
    if budget.unit != "std":
        raise ValueError(
            f"the noise of dp-sgd is stated in the unit 'std', not {budget.unit!r}: "
            f"what follows the gradient gives it away; use Budget({budget.value:g}, "
            f"'std')."
        )
    return DPSGD(clip, budget.value / clip)
