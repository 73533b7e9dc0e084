r"""The quadratic model of one step, minimised: in a box, or by products alone.

:func:`minimum_in_box` minimises ½ ΔᵀMΔ + bᵀΔ over low ≤ Δ ≤ high with a dense matrix,
by the primal–dual active set method (Hintermüller, Ito & Kunisch 2002): guess which
pixels are pressed against the box, solve for the others, and correct the guess by the
signs of multipliers and violations. It ends after a few guesses, and every guess costs
a Cholesky factor of the free pixels only: images with a plain background have few.

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

__all__ = ["conjugate_gradients", "minimum_in_box"]

_GUESSES = 12


def minimum_in_box(
    m: Float[Tensor, "n n"],
    b: Float[Tensor, " n"],
    low: Float[Tensor, " n"],
    high: Float[Tensor, " n"],
) -> Float[Tensor, " n"]:
    """The minimiser of ½ ΔᵀMΔ + bᵀΔ over low ≤ Δ ≤ high.

    Args:
        m: symmetric positive definite.
        b: slope at Δ = 0.
        low: at most 0, may be −∞.
        high: at least 0, may be ∞.

    Returns:
        Δ, at least as good as 0 and as the best point along −b; zero where no better
        point is found. Exact unless the guesses went in circles.

    Example:
        >>> import torch
        >>> m, b = torch.tensor([[2.0, 1.0], [1.0, 2.0]]), torch.tensor([-2.0, 2.0])
        >>> minimum_in_box(m, b, torch.tensor([0.0, 0.0]), torch.tensor([9.0, 9.0]))
        tensor([1., 0.])
    """
    best = _along_slope(m, b, low, high)
    value = _quadratic(m, b, best)
    delta, force = torch.zeros_like(b), -b
    # The multipliers' unit, so that pixels and forces can be compared.
    unit = float(m.diagonal().mean())
    before: tuple[Tensor, Tensor] | None = None
    for _ in range(_GUESSES):
        at_high = force + unit * (delta - high) > 0
        at_low = force + unit * (delta - low) < 0
        if before is not None and all(
            torch.equal(x, y) for x, y in zip(before, (at_low, at_high), strict=True)
        ):
            break
        before = at_low, at_high
        delta = torch.where(at_high, high, torch.where(at_low, low, 0.0))
        free = (~(at_low | at_high)).nonzero()[:, 0]
        if len(free):
            rhs = -b[free] - m[free] @ delta
            lower, info = torch.linalg.cholesky_ex(m[free][:, free])
            if int(info):
                break
            delta[free] = torch.cholesky_solve(rhs[:, None], lower)[:, 0]
        inside = torch.minimum(torch.maximum(delta, low), high)
        reached = _quadratic(m, b, inside)
        if reached < value:
            best, value = inside, reached
        force = -(m @ delta + b)
        # Exactly in balance; rounding must not decide about these.
        force[free] = 0.0
    return best


def _quadratic(m: Tensor, b: Tensor, v: Tensor) -> float:
    return float(0.5 * v @ (m @ v) + b @ v)


def _along_slope(m: Tensor, b: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Shortened until it descends: a point along the projected slope (Cauchy point)."""
    curvature = float(b @ (m @ b))
    length = float(b @ b) / curvature if curvature > 0 else 1.0
    for _ in range(30):
        v = torch.minimum(torch.maximum(-length * b, low), high)
        if _quadratic(m, b, v) < 0:
            return v
        length *= 0.25
    return torch.zeros_like(b)


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
) -> tuple[Float[Tensor, "rows n"], Bool[Tensor, " rows"]]:
    """Solves (H + σI) v = b on the free pixels, to a relative rest.

    Args:
        product: H v.
        b: right-hand sides.
        shift: σ.
        free: where v may differ from zero.
        tolerance: of ‖b − (H + σI)v‖/‖b‖ on the free pixels.
        most: iterations.

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
    along, size = rest.clone(), rest.square().sum(1)
    goal = size * tolerance.square()
    v = torch.zeros_like(b)
    reached = ~(size > 0)
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
        new = rest[rows].square().sum(1)
        along[rows] = rest[rows] + (new / size[rows])[:, None] * d
        size[rows] = new
        done = ~(new > goal[rows])
        reached[rows] |= done
        rows = rows[~done]
    return v, reached
