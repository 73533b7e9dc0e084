"""Independent Gaussian noise of one size on every entry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor

from leakwatch.defenses.base import Defense, Needs, Shared, check_gradient
from leakwatch.defenses.budget import Budget
from leakwatch.defenses.covariance import Isotropic
from leakwatch.defenses.samples import Samples

__all__ = ["GaussianNoise"]


@final
@dataclass(frozen=True)
class GaussianNoise(Defense):
    """Adds N(0, s²) to each entry of each message.

    The defense that everybody compares with (Zhu et al., "Deep Leakage from Gradients",
    NeurIPS 2019, Section 5.1; I²F Eq. 6). Only about d_x/d_θ of its energy lands in the
    range of J, see :func:`leakwatch.defenses.energy_share`.

    Args:
        budget: E‖δ‖² = s² d_θ; ``Budget(s, "std")`` states s.

    Example:
        >>> import torch
        >>> noise = GaussianNoise(Budget(0.5, "relative"))
        >>> made = noise.protect(torch.ones(1, 400), generator=torch.Generator())
        >>> float(made.variance[0])  # (0.5 · 20)²
        100.0
    """

    budget: Budget
    name: ClassVar[str] = "gaussian"
    needs: ClassVar[Needs] = "gradient"

    def protect(
        self,
        gradient: Float[Tensor, "n d_theta"],
        *,
        generator: torch.Generator,
        samples: Samples | None = None,
    ) -> Shared:
        """Noise on each row. See :meth:`Defense.protect`."""
        check_gradient(gradient)
        size = gradient.shape[1]
        total = self.budget.variance(gradient.double().norm(dim=1), size)
        covariance = Isotropic(total / size, size)
        return Shared.noisy(gradient, covariance.draw(generator), covariance)
