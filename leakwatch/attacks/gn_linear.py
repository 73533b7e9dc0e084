r"""The linear system of a Gauss–Newton step, for many attacks at once.

(H + σI)Δ = −b on the pixels that are not held by the box. Three ways:

- conjugate gradients on products H v = Jᵀ(J v) (Hestenes & Stiefel 1952), batched over
  attacks, stopped at a relative rest η (Dembo, Eisenstat & Steihaug 1982);
- a Cholesky factor of the dense Gram matrix, one attack after the other;
- conjugate gradients preconditioned by the Cholesky factor of a Gram matrix that was
  formed at an *earlier* image of the same attack.

The third makes the second cheap: near the solution J hardly changes, one Gram matrix
serves all remaining steps, and two or three products replace d_x of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

__all__ = ["Factor", "conjugate_gradients", "factor"]

Product = Callable[[Int[Tensor, " rows"], Float[Tensor, "rows n"]], Tensor]
"""H v of some attacks: positions among those that are solved for, and v."""


@final
class Factor:
    """A Cholesky factor of (H + σI) on the free pixels of one attack."""

    def __init__(self, lower: Tensor, free: Tensor) -> None:
        self._lower, self._free = lower, free

    def solve(self, b: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """(H + σI)⁻¹ b, zero where the box holds."""
        rhs = (b * self._free)[:, None]
        return torch.cholesky_solve(rhs, self._lower)[:, 0] * self._free


def factor(
    h: Float[Tensor, "n n"], shift: float, free: Bool[Tensor, " n"]
) -> Factor | None:
    """Factor of H + σI with the held pixels taken out; ``None`` if there is none.

    Args:
        h: Gram matrix.
        shift: σ.
        free: pixels that the box does not hold.
    """
    kept = free.to(h)
    m = h * kept[:, None] * kept
    m.diagonal().add_(torch.where(free, shift, 1.0))
    lower, info = torch.linalg.cholesky_ex(m)
    if int(info) or not bool(torch.isfinite(lower).all()):
        return None
    return Factor(lower, kept)


def conjugate_gradients(
    product: Product,
    b: Float[Tensor, "rows n"],
    shift: Float[Tensor, " rows"],
    free: Bool[Tensor, "rows n"],
    *,
    tolerance: Float[Tensor, " rows"],
    most: int,
    factors: list[Factor | None] | None = None,
) -> tuple[Float[Tensor, "rows n"], Bool[Tensor, " rows"], Int[Tensor, " rows"]]:
    """Solves (H + σI) v = b on the free pixels, to a relative rest.

    Args:
        product: H v.
        b: right-hand sides.
        shift: σ.
        free: where v may differ from zero.
        tolerance: η, the rest relative to b at which a row is finished, in the norm of
            the preconditioner.
        most: iterations.
        factors: preconditioners; ``None`` for a row that has none.

    Returns:
        v, whether the tolerance was reached, and the products used. Rows whose products
        are not finite keep their last good v.
    """
    kept = free.to(b)
    rest = b * kept
    v = torch.zeros_like(b)
    reached = torch.zeros(len(b), dtype=torch.bool, device=b.device)
    used = torch.zeros(len(b), dtype=torch.long, device=b.device)
    rows = torch.arange(len(b), device=b.device)

    def preconditioned(which: Tensor, r: Tensor) -> Tensor:
        if factors is None:
            return r
        out = r.clone()
        for place, row in enumerate(which.tolist()):
            held = factors[row]
            if held is not None:
                out[place] = held.solve(r[place])
        return out

    z = preconditioned(rows, rest)
    along = z.clone()
    size = (rest * z).sum(1)
    goal = size * tolerance.square()
    zero = ~(size > 0)
    reached |= zero
    rows = rows[~zero]
    for _ in range(most):
        if len(rows) == 0:
            break
        d = along[rows]
        hd = product(rows, d) * kept[rows] + shift[rows, None] * d
        curvature = (d * hd).sum(1)
        used[rows] += 1
        sound = torch.isfinite(curvature) & (curvature > 0)
        rows, d, hd, curvature = rows[sound], d[sound], hd[sound], curvature[sound]
        if len(rows) == 0:
            break
        length = (size[rows] / curvature)[:, None]
        v[rows] += length * d
        rest[rows] -= length * hd
        z_rows = preconditioned(rows, rest[rows])
        new = (rest[rows] * z_rows).sum(1)
        along[rows] = z_rows + (new / size[rows])[:, None] * d
        size[rows] = new
        done = ~(new > goal[rows])
        reached[rows] |= done
        rows = rows[~done]
    return v, reached, used
