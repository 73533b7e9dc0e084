r"""The quadratic model of one step, minimised over a box with a dense matrix.

Minimise ½ ΔᵀMΔ + bᵀΔ over low ≤ Δ ≤ high by the primal–dual active set method
(Hintermüller, Ito & Kunisch 2002): guess which pixels are pressed against the box,
solve for the others, and correct the guess by the signs of multipliers and violations.
It ends after a few guesses, and every guess costs a Cholesky factor of the free
pixels only: images with a plain background have few of them.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["minimum_in_box"]

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
