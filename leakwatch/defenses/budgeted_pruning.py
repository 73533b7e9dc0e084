"""Pruning that is told what it may cost instead of what share to take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from leakwatch.defenses.base import Needs, Reduction, Shared, check_gradient, combined
from leakwatch.defenses.budget import Budget
from leakwatch.defenses.pruning import pruned
from leakwatch.defenses.samples import Samples

__all__ = ["PruningToBudget"]


@final
@dataclass(frozen=True)
class PruningToBudget:
    """Sets as many of the smallest entries to zero as ‖δ‖ ≤ the budget allows.

    The same message as that of a :class:`leakwatch.defenses.GradientPruning` whose
    share is chosen for each message, so that pruning can be compared with noise of
    equal ‖δ‖: below it by less than the first entry that is kept. A budget of ‖g‖ or
    more prunes everything.

    Args:
        budget: ‖δ‖; there is nothing random.

    Example:
        >>> import torch
        >>> prune = PruningToBudget(Budget(1.2, "norm"))
        >>> g = torch.tensor([[3.0, -1.0, 2.0, 0.5]])
        >>> prune.protect(g, generator=torch.Generator()).gradient.tolist()
        [[3.0, 0.0, 2.0, 0.0]]
    """

    budget: Budget
    name: ClassVar[str] = "pruning"
    needs: ClassVar[Needs] = "gradient"

    def protect(
        self,
        gradient: Float[Tensor, "n d_theta"],
        *,
        generator: torch.Generator,
        samples: Samples | None = None,
    ) -> Shared:
        """Prunes each row. See :class:`leakwatch.defenses.Defense`."""
        check_gradient(gradient)
        norm = gradient.double().norm(dim=1)
        return pruned(
            gradient, _kept(gradient, self.budget.variance(norm, gradient.shape[1]))
        )

    def protect_batch(
        self,
        gradient: Float[Tensor, "n d_theta"],
        *,
        generator: torch.Generator,
        samples: Samples | None = None,
        reduction: Reduction = "mean",
    ) -> Shared:
        """Prunes the combined gradient."""
        return self.protect(combined(gradient, reduction), generator=generator)


def _kept(
    gradient: Float[Tensor, "n d_theta"], total: Float[Tensor, " n"]
) -> Bool[Tensor, "n d_theta"]:
    """Which entries stay, where those that go may have ‖δ‖² of this at most."""
    energy = gradient.double().square()
    ordered, order = energy.sort(dim=1, stable=True)
    # Rounding of the sum must not keep the last entry of a budget of ‖g‖.
    allowed = total[:, None] * (1 + 1e-12)
    return torch.ones_like(order, dtype=torch.bool).scatter(
        1, order, ordered.cumsum(1) > allowed
    )
