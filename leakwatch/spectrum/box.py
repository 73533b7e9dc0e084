r"""Quadratics over a box: ½ ΔᵀMΔ + bᵀΔ at its least, with low ≤ Δ ≤ high.

By the primal–dual active set method (Hintermüller, Ito & Kunisch 2002): guess which
entries are pressed against the box, solve for the others, and correct the guess by the
signs of multipliers and violations. It ends after a few guesses.

A guess costs a Cholesky factor of the free entries, n_free³/3; or, where M⁻¹ is known
and shared by many right-hand sides, of the pressed ones: they are what is corrected in
the minimum without a box.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["BoxMinimum", "minimize_in_box", "minimum_in_box"]

_GUESSES = 12


class BoxMinimum(NamedTuple):
    """Where a quadratic over a box is least.

    Attributes:
        delta: the best point of the box that was seen.
        exact: whether it is the minimum; False when the guesses went in circles.
    """

    delta: Float[Tensor, " n"]
    exact: bool


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
    return minimize_in_box(m, b, low, high).delta


def minimize_in_box(
    m: Float[Tensor, "n n"],
    b: Float[Tensor, " n"],
    low: Float[Tensor, " n"],
    high: Float[Tensor, " n"],
    *,
    inverse: Float[Tensor, "n n"] | None = None,
    guesses: int = _GUESSES,
) -> BoxMinimum:
    """:func:`minimum_in_box`, and whether it is exact.

    Args:
        m: symmetric positive definite.
        b: slope at Δ = 0.
        low: at most 0, may be −∞.
        high: at least 0, may be ∞.
        inverse: M⁻¹, where many b share one M.
        guesses: at most.

    Example:
        >>> import torch
        >>> m, b = torch.eye(2), torch.tensor([-2.0, 0.5])
        >>> one = torch.ones(2)
        >>> minimize_in_box(m, b, -one, one, inverse=m)
        BoxMinimum(delta=tensor([ 1.0000, -0.5000]), exact=True)
    """
    best = _along_slope(m, b, low, high)
    value = _quadratic(m, b, best)
    delta, force = torch.zeros_like(b), -b
    # The multipliers' unit, so that pixels and forces can be compared.
    unit = float(m.diagonal().mean())
    unbound = None if inverse is None else -(inverse @ b)
    before: tuple[Tensor, Tensor] | None = None
    exact = False
    for _ in range(guesses):
        at_high = force + unit * (delta - high) > 0
        at_low = force + unit * (delta - low) < 0
        if before is not None and all(
            torch.equal(x, y) for x, y in zip(before, (at_low, at_high), strict=True)
        ):
            exact = True
            break
        before = at_low, at_high
        pressed = torch.where(at_high, high, torch.where(at_low, low, 0.0))
        free = ~(at_low | at_high)
        moved = _solved(m, b, pressed, free, inverse, unbound)
        if moved is None:
            break
        delta = moved
        inside = torch.minimum(torch.maximum(delta, low), high)
        reached = _quadratic(m, b, inside)
        if reached < value:
            best, value = inside, reached
        force = -(m @ delta + b)
        # Exactly in balance; rounding must not decide about these.
        force = torch.where(free, 0.0, force)
    return BoxMinimum(best, exact)


def _solved(
    m: Tensor,
    b: Tensor,
    pressed: Tensor,
    free: Tensor,
    inverse: Tensor | None,
    unbound: Tensor | None,
) -> Tensor | None:
    """Δ with the pressed entries as given; ``None`` if rounding forbids it."""
    rest, held = free.nonzero()[:, 0], (~free).nonzero()[:, 0]
    if len(rest) == 0:
        return pressed
    if inverse is None or unbound is None or len(held) > len(rest):
        right = -b[rest] - m[rest] @ pressed
        lower, info = torch.linalg.cholesky_ex(m[rest][:, rest])
        if int(info):
            return None
        delta = pressed.clone()
        delta[rest] = torch.cholesky_solve(right[:, None], lower)[:, 0]
        return delta
    if len(held) == 0:
        return unbound
    lower, info = torch.linalg.cholesky_ex(inverse[held][:, held])
    if int(info):
        return None
    gap = (pressed - unbound)[held]
    force = torch.cholesky_solve(gap[:, None], lower)[:, 0]
    delta = unbound + inverse[:, held] @ force
    delta[held] = pressed[held]
    return delta


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
