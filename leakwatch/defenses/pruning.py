"""Gradients without their smallest entries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, TypeAlias, final, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from leakwatch.checks import check_choice, check_number
from leakwatch.defenses.base import Defense, Knowledge, Needs, Shared, check_gradient
from leakwatch.defenses.budget import Budget
from leakwatch.defenses.samples import Samples

__all__ = ["GradientPruning", "PruningToBudget", "Scope"]

Scope: TypeAlias = Literal["global", "layer"]
"""Where the smallest entries are looked for."""


@final
@dataclass(frozen=True)
class GradientPruning(Defense):
    """Sets the entries of smallest magnitude to zero.

    Zhu et al., "Deep Leakage from Gradients", NeurIPS 2019, Section 5.2. The change
    δ = pruned − g is :attr:`leakwatch.defenses.Shared.delta`, which I²F takes as it
    takes noise (Zhang et al., NeurIPS 2023, Appendix D):
    ``leakwatch.score(module, x, y, ["i2f"], delta=shared.delta)``. It draws nothing, so
    an attacker gains nothing by asking twice; one who knows it matches the entries that
    are left, and only these.

    Exactly ⌊share · entries⌋ are pruned. Among equal magnitudes, the earlier in the
    order of the gradient go first, so that the same gradient always gives the same
    message.

    Args:
        share: part of the entries that is pruned, 0 (none) to 1 (all).
        scope: ``"global"``: the smallest of the whole message; ``"layer"``: this share
            of each parameter tensor.
        sizes: entries of each parameter tensor in their order, for ``"layer"`` where no
            samples are given: ``GradientMap(module).sizes()``.

    Raises:
        TypeError: if the share is not a number.
        ValueError: for a share outside of [0, 1], or an unknown scope.

    Example:
        >>> import torch
        >>> prune = GradientPruning(0.5)
        >>> g = torch.tensor([[3.0, -1.0, 2.0, 0.5]])
        >>> prune.protect(g, generator=torch.Generator()).gradient.tolist()
        [[3.0, 0.0, 2.0, 0.0]]
    """

    share: float
    scope: Scope = "global"
    sizes: Mapping[str, int] | None = None
    name: ClassVar[str] = "pruning"
    needs: ClassVar[Needs] = "gradient"
    budget: ClassVar[None] = None

    def __post_init__(self) -> None:
        check_number("share", self.share, "[0, 1]", example=0.9)
        check_choice("scope", self.scope, get_args(Scope))

    def protect(
        self,
        gradient: Float[Tensor, "n d_theta"],
        *,
        generator: torch.Generator,
        samples: Samples | None = None,
    ) -> Shared:
        """Prunes each row. See :meth:`Defense.protect`.

        Raises:
            ValueError: if the sizes of the layers are not known, or don't add up.
        """
        check_gradient(gradient)
        layers = self._layers(gradient.shape[1], samples)
        parts = torch.split(gradient.abs(), layers, dim=1)
        kept = torch.cat([_largest(part, self.share) for part in parts], dim=1)
        return _pruned(gradient, kept)

    def with_layers(self, sizes: Mapping[str, int]) -> GradientPruning:
        """With these sizes, where it looks at layers and was given none."""
        told = self.scope == "global" or self.sizes is not None or not sizes
        return self if told else replace(self, sizes=sizes)

    def _layers(self, size: int, samples: Samples | None) -> list[int]:
        if self.scope == "global":
            return [size]
        sizes = self.sizes
        if sizes is None and samples is not None:
            sizes = samples.gradients.sizes()
        if sizes is None:
            raise ValueError(
                "pruning by layer needs the sizes of the parameter tensors; pass "
                "sizes=GradientMap(module).sizes(), or samples."
            )
        if sum(sizes.values()) != size:
            raise ValueError(
                f"the sizes add up to {sum(sizes.values())}, but a message has {size} "
                f"entries; pass those of the parameters that are shared."
            )
        return list(sizes.values())


@final
@dataclass(frozen=True)
class PruningToBudget(Defense):
    """Sets as many of the smallest entries to zero as ‖δ‖ ≤ the budget allows.

    The same message as that of a :class:`GradientPruning` whose
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
        """Prunes each row. See :meth:`Defense.protect`."""
        check_gradient(gradient)
        norm = gradient.double().norm(dim=1)
        total = self.budget.variance(norm, gradient.shape[1])
        return _pruned(gradient, _within(gradient, total))


def _pruned(
    gradient: Float[Tensor, "n d_theta"], kept: Bool[Tensor, "n d_theta"]
) -> Shared:
    message = torch.where(kept, gradient, 0.0)
    return Shared.fixed(message, gradient, Knowledge(kept=kept))


def _largest(magnitude: Tensor, share: float) -> Bool[Tensor, "n d"]:
    """Which entries stay."""
    n, size = magnitude.shape
    # 0.29 of 100 are 29, although 0.29 · 100 = 28.999999999999996.
    count = min(size, int(share * size * (1 + 1e-12) + 1e-9))
    order = magnitude.argsort(dim=1, stable=True)
    kept = torch.ones(n, size, dtype=torch.bool, device=magnitude.device)
    return kept.scatter(1, order[:, :count], False)


def _within(
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
