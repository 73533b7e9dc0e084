r"""The quadratic model of one step, minimised by products alone.

:func:`conjugate_gradients` solves (H + σI)v = b of many attacks at once on the pixels
that are not held by the box, from products H v = Jᵀ(J v) (Hestenes & Stiefel 1952),
each stopped at a relative rest (Dembo, Eisenstat & Steihaug 1982).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

__all__ = ["conjugate_gradients"]

Product: TypeAlias = Callable[[Int[Tensor, " some"], Float[Tensor, "some n"]], Tensor]
"""H v of some attacks: positions among those that are solved for, and v."""


def conjugate_gradients(
    product: Product,
    b: Float[Tensor, "rows n"],
    shift: Float[Tensor, " rows"],
    free: Bool[Tensor, "rows n"],
    *,
    tolerance: Float[Tensor, " rows"],
    most: int,
    inverse: Product | None = None,
) -> tuple[Float[Tensor, "rows n"], Bool[Tensor, " rows"]]:
    """Solves (H + σI) v = b on the free pixels, to a relative rest.

    Args:
        product: H v.
        b: right-hand sides.
        shift: σ.
        free: where v may differ from zero.
        tolerance: of ‖b − (H + σI)v‖/‖b‖ on the free pixels.
        most: iterations.
        inverse: about (H + σI)⁻¹ v, symmetric and positive, cheap; fewer iterations
            then do.

    Returns:
        v, and whether the tolerance was reached. Rows whose products are not finite, or
        show no positive curvature, keep their last good v.

    Example:
        >>> import torch
        >>> h, b = torch.diag(torch.tensor([1.0, 3.0])), torch.tensor([[2.0, 4.0]])
        >>> one, all = torch.ones(1), torch.ones(1, 2, dtype=torch.bool)
        >>> conjugate_gradients(lambda rows, v: v @ h, b, one, all,
        ...                     tolerance=1e-6 * one, most=9)[0].round(decimals=4)
        tensor([[1., 1.]])
    """
    kept = free.to(b)
    rest = b * kept

    def turned(which: Tensor) -> Tensor:
        r = rest[which]
        return r if inverse is None else inverse(which, r) * kept[which]

    goal = rest.square().sum(1)
    v = torch.zeros_like(b)
    reached = ~(goal > 0)
    goal = goal * tolerance.square()
    along = turned(torch.arange(len(b), device=b.device)).clone()
    size = (rest * along).sum(1)
    rows = (~reached).nonzero()[:, 0]
    for _ in range(most):
        if len(rows) == 0:
            break
        d = along[rows]
        image = product(rows, d) * kept[rows] + shift[rows, None] * d
        curvature = (d * image).sum(1)
        sound = torch.isfinite(curvature) & (curvature > 0)
        rows, d, image, curvature = (
            rows[sound],
            d[sound],
            image[sound],
            curvature[sound],
        )
        length = (size[rows] / curvature)[:, None]
        v[rows] += length * d
        rest[rows] -= length * image
        towards = turned(rows)
        new = (rest[rows] * towards).sum(1)
        along[rows] = towards + (new / size[rows])[:, None] * d
        size[rows] = new
        done = ~(rest[rows].square().sum(1) > goal[rows])
        reached[rows] |= done
        rows = rows[~done]
    return v, reached
