"""Linear maps that an attacker applies to gradients before matching them.

An attack needs no change for that. With parameters θ = θ_0 + Lᵀφ, the gradient in φ at
φ = 0 is L ∇_θ ℓ: a module whose parameter is φ shares the mapped gradient, and every
score and attack takes it as it takes any other. See :func:`mapped`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.func import functional_call

from leakwatch.derivatives import GradientMap

__all__ = ["Chain", "Deflation", "LinearMap", "Scaling", "Selection", "mapped"]


class LinearMap(Protocol):
    """A linear map L from gradients to what an attacker matches instead."""

    @property
    def rows(self) -> int:
        """Numbers that are left."""

    @property
    def columns(self) -> int:
        """d_θ."""

    def apply(self, g: Float[Tensor, "*n columns"]) -> Float[Tensor, "*n rows"]:
        """L g."""

    def transpose(self, phi: Float[Tensor, "*n rows"]) -> Float[Tensor, "*n columns"]:
        """Lᵀ φ."""


@final
@dataclass(frozen=True, eq=False)
class Scaling:
    """Every entry times a factor of its own.

    Attributes:
        factors: ``(d_θ,)``.

    Example:
        >>> import torch
        >>> Scaling(torch.tensor([2.0, 0.5])).apply(torch.tensor([1.0, 4.0])).tolist()
        [2.0, 2.0]
    """

    factors: Float[Tensor, " columns"]

    @property
    def rows(self) -> int:
        """d_θ."""
        return len(self.factors)

    @property
    def columns(self) -> int:
        """d_θ."""
        return len(self.factors)

    def apply(self, g: Float[Tensor, "*n columns"]) -> Float[Tensor, "*n rows"]:
        """Each entry times its factor."""
        return g * self.factors.to(g)

    def transpose(self, phi: Float[Tensor, "*n rows"]) -> Float[Tensor, "*n columns"]:
        """The same."""
        return phi * self.factors.to(phi)


@final
@dataclass(frozen=True, eq=False)
class Selection:
    """Some of the entries.

    Attributes:
        index: positions that are kept.
        columns: d_θ.
    """

    index: Int[Tensor, " rows"]
    columns: int

    @property
    def rows(self) -> int:
        """How many are kept."""
        return len(self.index)

    def apply(self, g: Float[Tensor, "*n columns"]) -> Float[Tensor, "*n rows"]:
        """The entries that are kept."""
        return g[..., self.index.to(g.device)]

    def transpose(self, phi: Float[Tensor, "*n rows"]) -> Float[Tensor, "*n columns"]:
        """Zeros elsewhere."""
        out = phi.new_zeros((*phi.shape[:-1], self.columns))
        return out.index_copy(-1, self.index.to(phi.device), phi)


@final
@dataclass(frozen=True, eq=False)
class Deflation:
    """Factors along orthonormal directions, and 1 across them: I − Q(I − F)Qᵀ.

    A factor of 0 projects a direction away.

    Attributes:
        directions: the rows of Qᵀ, ``(k, d_θ)``.
        factors: F, ``(k,)``.

    Example:
        >>> import torch
        >>> q = torch.tensor([[1.0, 0.0]])
        >>> Deflation(q, torch.zeros(1)).apply(torch.tensor([3.0, 4.0])).tolist()
        [0.0, 4.0]
    """

    directions: Float[Tensor, "k columns"]
    factors: Float[Tensor, " k"]

    @property
    def rows(self) -> int:
        """d_θ."""
        return self.directions.shape[1]

    @property
    def columns(self) -> int:
        """d_θ."""
        return self.directions.shape[1]

    def apply(self, g: Float[Tensor, "*n columns"]) -> Float[Tensor, "*n rows"]:
        """(I − Q(I − F)Qᵀ) g."""
        q = self.directions.to(g)
        return g - ((g @ q.T) * (1 - self.factors).to(g)) @ q

    def transpose(self, phi: Float[Tensor, "*n rows"]) -> Float[Tensor, "*n columns"]:
        """The same: it is symmetric."""
        return self.apply(phi)


@final
@dataclass(frozen=True, eq=False)
class Chain:
    """One map after another.

    Attributes:
        first: applied to the gradient.
        second: applied to the result.
    """

    first: LinearMap
    second: LinearMap

    def __post_init__(self) -> None:
        if self.second.columns != self.first.rows:
            raise ValueError(
                f"the second map takes {self.second.columns} numbers, but the first "
                f"leaves {self.first.rows}."
            )

    @property
    def rows(self) -> int:
        """What the second leaves."""
        return self.second.rows

    @property
    def columns(self) -> int:
        """d_θ."""
        return self.first.columns

    def apply(self, g: Float[Tensor, "*n columns"]) -> Float[Tensor, "*n rows"]:
        """The second of the first."""
        return self.second.apply(self.first.apply(g))

    def transpose(self, phi: Float[Tensor, "*n rows"]) -> Float[Tensor, "*n columns"]:
        """The first's transpose of the second's."""
        return self.first.transpose(self.second.transpose(phi))


def mapped(gradients: GradientMap, through: LinearMap) -> GradientMap:
    """The map from samples to L g(x), with the derivative L J.

    Exact, not linearised. Attacks and scores that only differentiate take it as it is;
    what reads the last layer's own gradient (inferred labels, slopes of the logits in
    Gauss–Newton) finds none and does without, so give the labels.

    Args:
        gradients: the map.
        through: L.

    Returns:
        A map whose module has φ as its only shared parameter.

    Raises:
        ValueError: if L takes another number of entries than are shared, or the
            criterion has parameters of its own that are shared.

    Example:
        >>> import torch
        >>> at = GradientMap(torch.nn.Linear(2, 2), dtype=torch.float64)
        >>> half = mapped(at, Scaling(torch.full((6,), 0.5)))
        >>> x, y = torch.rand(3, 2), torch.tensor([0, 1, 1])
        >>> torch.testing.assert_close(half(x, y), 0.5 * at(x, y))
    """
    module = _Reparametrised(gradients, through)
    return GradientMap(
        module,
        gradients.criterion,
        prepare=gradients.prepare,
        parameters="phi",
        dtype=gradients.dtype,
        chunk_size=gradients.chunk_size,
    )


@final
class _Reparametrised(nn.Module):
    """A network at θ + Lᵀφ, with φ = 0."""

    def __init__(self, gradients: GradientMap, through: LinearMap) -> None:
        super().__init__()
        self.base = gradients.module
        # In the network's own arithmetic: attacks take that of the first parameter.
        like = next(self.base.parameters())
        self.phi = nn.Parameter(like.new_zeros(through.rows))
        self._through = through
        self._sizes = gradients.sizes()
        total = sum(self._sizes.values())
        if through.columns != total:
            raise ValueError(
                f"the map takes {through.columns} entries, but {total} are shared; "
                f"make it for the gradients of this module."
            )
        foreign = self._sizes.keys() - dict(self.base.named_parameters()).keys()
        if foreign:
            raise ValueError(
                f"{', '.join(sorted(foreign))} belong to the criterion, which can't be "
                f"mapped; share the network's parameters only."
            )

    def forward(self, *args: Any) -> Any:
        """What the network gives at these parameters."""
        moved = self._through.transpose(self.phi)
        own = dict(self.base.named_parameters())
        parts = torch.split(moved, list(self._sizes.values()))
        at = {
            name: own[name] + part.view_as(own[name])
            for name, part in zip(self._sizes, parts, strict=True)
        }
        return functional_call(self.base, at, args)
