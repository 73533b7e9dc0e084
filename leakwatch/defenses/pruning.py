"""Gradients without their smallest entries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias, final, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from leakwatch.checks import check_number
from leakwatch.defenses.base import (
    Knowledge,
    Needs,
    Reduction,
    Shared,
    check_gradient,
    combined,
)
from leakwatch.defenses.samples import Samples

__all__ = ["GradientPruning", "Scope"]

Scope: TypeAlias = Literal["global", "layer"]
"""Where the smallest entries are looked for."""


@final
@dataclass(frozen=True)
class GradientPruning:
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
        if self.scope not in get_args(Scope):
            raise ValueError(f"scope must be 'global' or 'layer', got {self.scope!r}.")

    def protect(
        self,
        gradient: Float[Tensor, "n d_theta"],
        *,
        generator: torch.Generator,
        samples: Samples | None = None,
    ) -> Shared:
        """Prunes each row. See :class:`leakwatch.defenses.Defense`.

        Raises:
            ValueError: if the sizes of the layers are not known, or don't add up.
        """
        check_gradient(gradient)
        layers = self._layers(gradient.shape[1], samples)
        parts = torch.split(gradient.abs(), layers, dim=1)
        kept = torch.cat([_largest(part, self.share) for part in parts], dim=1)
        return pruned(gradient, kept)

    def protect_batch(
        self,
        gradient: Float[Tensor, "n d_theta"],
        *,
        generator: torch.Generator,
        samples: Samples | None = None,
        reduction: Reduction = "mean",
    ) -> Shared:
        """Prunes the combined gradient."""
        together = combined(gradient, reduction)
        return self.protect(together, generator=generator, samples=samples)

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


def pruned(
    gradient: Float[Tensor, "n d_theta"], kept: Bool[Tensor, "n d_theta"]
) -> Shared:
    """What is shared of gradients of which some entries are set to zero.

    Args:
        gradient: clean gradients.
        kept: the entries that stay.
    """
    message = torch.where(kept, gradient, 0.0)
    return Shared(
        message,
        gradient,
        torch.zeros(len(gradient), dtype=torch.float64).to(gradient.device),
        Knowledge(kept=kept),
        bias=message - gradient,
    )


def _largest(magnitude: Tensor, share: float) -> Bool[Tensor, "n d"]:
    """Which entries stay."""
    n, size = magnitude.shape
    # 0.29 of 100 are 29, although 0.29 · 100 = 28.999999999999996.
    count = min(size, int(share * size * (1 + 1e-12) + 1e-9))
    order = magnitude.argsort(dim=1, stable=True)
    kept = torch.ones(n, size, dtype=torch.bool, device=magnitude.device)
    return kept.scatter(1, order[:, :count], False)
