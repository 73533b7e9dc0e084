"""How far a gradient is from the one that was shared, and which way to go.

Each distance comes with its derivative in the gradient, written out: the gradients of
all attacks are the largest tensors of a step, and autograd would walk over them many
times more often.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from leakwatch.names import unknown

__all__ = ["Distance", "available", "get"]

_Compare = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@final
@dataclass(frozen=True)
class Distance:
    """A distance between gradients; zero where they are equal, also to rounding.

    Attributes:
        name: what it is asked for by.
        degree: it grows with this power of the gradients' common scale.
        root: power of a layer's weight that its entries are multiplied with.
        prepare: what is kept of a target, ``(attacks, n)``.
        compare: gradient, prepared target and scratch memory of their shape, to the
            distance of each attack and its derivative in the gradient. Overwrites the
            gradient.
        formula: in words.
    """

    name: str
    degree: int
    root: float
    prepare: Callable[[Tensor], Tensor]
    compare: _Compare
    formula: str

    def __call__(
        self,
        g: Float[Tensor, "attacks n"],
        target: Float[Tensor, "attacks n"],
        weight: Float[Tensor, " n"] | None = None,
    ) -> tuple[Float[Tensor, " attacks"], Float[Tensor, "attacks n"]]:
        """The distance of each attack, and its derivative in ``g``.

        Args:
            g: gradients, any positive common scale. Left as they are.
            target: shared gradients.
            weight: of each entry, non-negative; default 1.

        Returns:
            Distance ``(attacks,)`` and derivative ``(attacks, n)``.

        Example:
            >>> import torch
            >>> g, target = torch.tensor([[3.0, 4.0]]), torch.tensor([[6.0, 8.0]])
            >>> [float(get(name)(g, target)[0]) for name in ("l2", "cosine", "l1")]
            [12.5, 0.0, 7.0]
        """
        root = None if weight is None else weight**self.root
        g, target = g.clone(), target.clone()
        if root is not None:
            g, target = g * root, target * root
        value, cotangent = self.compare(g, self.prepare(target), torch.empty_like(g))
        return value, cotangent if root is None else cotangent * root


def _l2(g: Tensor, target: Tensor, scratch: Tensor) -> tuple[Tensor, Tensor]:
    difference = g.sub_(target)
    return _norm(difference).square_().mul_(0.5), difference


def _l1(g: Tensor, target: Tensor, scratch: Tensor) -> tuple[Tensor, Tensor]:
    difference = g.sub_(target)
    return difference.abs().sum(1), difference.sign_()


def _cosine(g: Tensor, target: Tensor, scratch: Tensor) -> tuple[Tensor, Tensor]:
    # With r = g/‖g‖ − g*/‖g*‖ and D = ½‖r‖² = 1 − cos: dD/dg = (r − D g/‖g‖)/‖g‖. In
    # float32, 1 − cos itself would have no digits left below 1e-7.
    norm = _norm(g)
    length = norm.clamp_min(torch.finfo(g.dtype).tiny)[:, None]
    r = torch.addcdiv(target, g, length, out=scratch)
    # No gradient has no direction, so it explains nothing.
    value = torch.where(norm > 0, _norm(r).square_().mul_(0.5), 1.0)
    r.addcmul_(g, -value[:, None] / length).div_(length)
    return value, r


def _minus_direction(target: Tensor) -> Tensor:
    return -target / _norm(target).clamp_min(torch.finfo(target.dtype).tiny)[:, None]


def _norm(t: Tensor) -> Tensor:
    out: Tensor = torch.linalg.vector_norm(t, dim=1)
    return out


def _same(target: Tensor) -> Tensor:
    return target


_DISTANCES = {
    d.name: d
    for d in (
        Distance("l2", 2, 0.5, _same, _l2, "½‖g − g*‖²"),
        Distance(
            "cosine", 0, 0.5, _minus_direction, _cosine, "½‖g/‖g‖ − g*/‖g*‖‖² = 1 − cos"
        ),
        Distance("l1", 1, 1.0, _same, _l1, "Σ|g − g*|"),
    )
}


def available() -> tuple[str, ...]:
    """Names of all distances."""
    return tuple(_DISTANCES)


def get(name: str) -> Distance:
    """The distance of that name.

    Args:
        name: ``"l2"``: ½‖g − g*‖²; ``"cosine"``: 1 − cos, computed as
            ½‖g/‖g‖ − g*/‖g*‖‖²; or ``"l1"``: Σ|g − g*|.

    Returns:
        The distance.

    Raises:
        ValueError: if there is none; lists those that there are.
    """
    if name not in _DISTANCES:
        raise ValueError(unknown("distance", name, _DISTANCES))
    return _DISTANCES[name]
