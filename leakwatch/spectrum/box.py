r"""Quadratics over a box: ½ ΔᵀMΔ + bᵀΔ at its least, with low ≤ Δ ≤ high.

By the primal–dual active set method (Hintermüller, Ito & Kunisch 2002): guess which
entries are pressed against the box, solve for the others, and correct the guess by the
signs of multipliers and violations. It ends after a few guesses.

A guess costs a Cholesky factor of the free entries, n_free³/3. Where many b share one
M, :func:`minima_in_box` finds all minima together, to a few digits, from one factor:
alternating directions (Boyd et al. 2011, §5.2; over-relaxed as there in §3.4.3) between
the quadratic and the box, after M was scaled to a diagonal of ones. A step is one
product of all right-hand sides with one matrix. What these do not reach, active sets
finish.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

__all__ = ["BoxMinima", "minima_in_box", "minimum_in_box"]

_GUESSES = 12
# On a GPU: guesses for each look whether they changed.
_UNSEEN = 4
_SHORTENINGS = 12
# Penalty for leaving the box, where the diagonal of M is one: of 0.01 to 0.05, what
# took the fewest steps on networks, noises and priors with conditions of 1 to 1e8.
_PENALTY = 0.02
_RELAXED = 1.6
_STEPS, _EVERY = 500, 10
# Tolerances from here on are far above the rounding of steps in float32.
_ROUGH = 1e-3
# Of its length: what a minimum by steps may be apart from that by active sets.
_SAME = 0.02


class BoxMinima(NamedTuple):
    """Where quadratics over a box are least.

    Attributes:
        delta: points of the box, ``(*batch, k, n)``.
        converged: whether each is the minimum to the tolerance, ``(*batch, k)``.
    """

    delta: Float[Tensor, "*batch k n"]
    converged: Bool[Tensor, "*batch k"]


def minima_in_box(
    m: Float[Tensor, "*batch n n"],
    b: Float[Tensor, "*batch k n"],
    low: Float[Tensor, "*batch n"],
    high: Float[Tensor, "*batch n"],
    *,
    tolerance: float = 2e-3,
    steps: int = _STEPS,
    flat: bool = False,
    near: Float[Tensor, "*batch k n"] | None = None,
    checked: bool = False,
) -> BoxMinima:
    """The minimisers of ½ ΔᵀMΔ + bᵀΔ over low ≤ Δ ≤ high, for many b at once.

    Args:
        m: symmetric positive definite.
        b: slopes at Δ = 0, ``(*batch, k, n)``.
        low: at most 0, may be −∞.
        high: at least 0, may be ∞.
        tolerance: of Δ's length, what further steps would still change.
        steps: at most.
        flat: M has directions so flat that the steps hardly move along them, which
            looks as if they had converged: active sets finish all minima.
        near: points of the box where the search begins, which a single one, and all of
            a flat M, go on from by active sets; default: 0.
        checked: M is known to have no such directions, so that the first minimum need
            not be checked.

    Returns:
        Points of the box. One look at the device for every ten steps, and some for the
        first minimum, which active sets check.

    Example:
        >>> import torch
        >>> m = torch.tensor([[2.0, 1.0], [1.0, 2.0]])
        >>> b = torch.tensor([[-2.0, 2.0], [1.0, 1.0]])
        >>> high = torch.full((2,), 9.0)
        >>> found = minima_in_box(m, b, torch.zeros(2), high, tolerance=1e-6)
        >>> found.delta.round(decimals=3).abs(), found.converged
        (tensor([[1., 0.],
                [0., 0.]]), tensor([True, True]))
    """
    if near is not None and (flat or b.shape[-2] == 1):
        none = torch.zeros_like(b[..., 0], dtype=torch.bool)
        found = _finished(m, b, low, high, BoxMinima(near, none))
        if bool(found.converged.all()):
            return found
    unit = m.diagonal(dim1=-2, dim2=-1).rsqrt()
    scaled = m * unit[..., None] * unit[..., None, :]
    scaled.diagonal(dim1=-2, dim2=-1).add_(_PENALTY)
    lower, info = torch.linalg.cholesky_ex(scaled)
    # What is no minimum has no number, and no look at the device is needed for it.
    lower = torch.where((info == 0)[..., None, None], lower, math.nan)
    inverse = torch.cholesky_inverse(lower)
    unit, low, high = (t[..., None, :] for t in (unit, low, high))
    # Rounding adds up to far less than a tolerance that is not small.
    kind = torch.float32 if tolerance >= _ROUGH else b.dtype
    point = force = torch.zeros_like(b, dtype=kind)
    if near is not None:
        slope = (near @ m + b) * unit
        held = (near <= low) & (slope > 0) | (near >= high) & (slope < 0)
        point = (near / unit).to(kind)
        force = torch.where(held, -slope / _PENALTY, 0.0).to(kind)
    constant, inverse = ((b * unit) @ inverse).to(kind), (inverse * _PENALTY).to(kind)
    bottom, top, size = (t.to(kind) for t in (low / unit, high / unit, unit))
    before, converged = point, torch.zeros_like(b[..., 0], dtype=torch.bool)
    last = torch.zeros_like(point[..., 0])
    for step in range(1, steps + 1):
        free = (point - force) @ inverse - constant
        want = force.add(free, alpha=_RELAXED).add_(point, alpha=1 - _RELAXED)
        point = torch.minimum(torch.maximum(want, bottom), top)
        force = want - point
        if step % _EVERY == 0:
            delta = point * size
            changed = (delta - before * size).norm(dim=-1)
            # A geometric series of changes: what is left is a multiple of the last.
            rate = (changed / last).clamp_max(0.99)
            left = changed * rate / (1 - rate)
            converged = left.nan_to_num(0.0) <= tolerance * delta.norm(dim=-1)
            if bool(converged.all()):
                break
            before, last = point, changed
    if flat:
        converged = torch.zeros_like(converged)
    inside = torch.where(point >= top, high, point.to(b.dtype) * unit)
    found = BoxMinima(torch.where(point <= bottom, low, inside), converged)
    low, high = low[..., 0, :], high[..., 0, :]
    if not checked and bool(converged.all()):
        found = _tried(m, b, low, high, found)
    return found if bool(found.converged.all()) else _finished(m, b, low, high, found)


def _tried(
    m: Tensor, b: Tensor, low: Tensor, high: Tensor, found: BoxMinima
) -> BoxMinima:
    """The first minimum of each M by active sets; where it is another, none counts.

    Steps along flat directions are so short that they look as if they had converged.
    """
    others = torch.ones_like(found.converged)
    others[..., 0] = False
    tried = _finished(m, b, low, high, BoxMinima(found.delta, others))
    exact, first = tried.delta[..., 0, :], found.delta[..., 0, :]
    apart = (exact - first).norm(dim=-1)
    same = tried.converged[..., 0] & (apart <= _SAME * exact.norm(dim=-1))
    return BoxMinima(found.delta, found.converged & same[..., None])


def _finished(
    m: Tensor, b: Tensor, low: Tensor, high: Tensor, found: BoxMinima
) -> BoxMinima:
    """The same with minima by active sets where the steps did not reach them."""
    delta, converged = found.delta.clone(), found.converged.clone()
    for place in (~converged).nonzero().tolist():
        i = tuple(place[:-1])
        if bool(delta[*place].isfinite().all()):
            row = (t[None] for t in (m[i], b[*place], low[i], high[i], delta[*place]))
            best, done = _by_faces(*row)
            delta[*place], converged[*place] = best[0], done[0]
    return BoxMinima(delta, converged)


def minimum_in_box(
    m: Float[Tensor, "*batch n n"],
    b: Float[Tensor, "*batch n"],
    low: Float[Tensor, "*batch n"],
    high: Float[Tensor, "*batch n"],
) -> Float[Tensor, "*batch n"]:
    """The minimiser of ½ ΔᵀMΔ + bᵀΔ over low ≤ Δ ≤ high.

    Args:
        m: symmetric positive definite.
        b: slope at Δ = 0.
        low: at most 0, may be −∞.
        high: at least 0, may be ∞.

    Returns:
        Δ, at least as good as 0 and as the best point along −b; zero where no better
        point is found. Exact unless the guesses went in circles. One look at the
        device for every four guesses.

    Example:
        >>> import torch
        >>> m, b = torch.tensor([[2.0, 1.0], [1.0, 2.0]]), torch.tensor([-2.0, 2.0])
        >>> minimum_in_box(m, b, torch.tensor([0.0, 0.0]), torch.tensor([9.0, 9.0]))
        tensor([1., 0.])
    """
    if b.ndim == 1:
        return minimum_in_box(m[None], b[None], low[None], high[None])[0]
    start = _along_slope(m, b, low, high)
    return _by_faces(m, b, low, high, torch.zeros_like(b), start)[0]


def _by_faces(
    m: Float[Tensor, "batch n n"],
    b: Float[Tensor, "batch n"],
    low: Float[Tensor, "batch n"],
    high: Float[Tensor, "batch n"],
    delta: Float[Tensor, "batch n"],
    best: Float[Tensor, "batch n"] | None = None,
) -> tuple[Float[Tensor, "batch n"], Bool[Tensor, " batch"]]:
    """The minima, and whether the guesses ended.

    Args:
        m: as in :func:`minimum_in_box`, like the next three.
        b: slope.
        low: bound.
        high: bound.
        delta: whose pressed entries are the first guess.
        best: a point of the box that the result must not be worse than; default: that.
    """
    best = delta if best is None else best
    value = _quadratic(m, b, best)
    force = -(_times(m, delta) + b)
    # The multipliers' unit, so that pixels and forces can be compared.
    unit = m.diagonal(dim1=1, dim2=2).mean(1, keepdim=True)
    before: Tensor | None = None
    ended = torch.zeros_like(value, dtype=torch.bool)
    # Where a look is waited for, guesses that change nothing more cost less than it.
    every = 1 if m.device.type == "cpu" else _UNSEEN
    for turn in range(_GUESSES):
        at_high = force + unit * (delta - high) > 0
        at_low = force + unit * (delta - low) < 0
        guess = torch.stack((at_low, at_high, force.isnan()), 1)
        if before is not None:
            ended = (guess == before).flatten(1).all(1)
            if turn % every == 0 and bool(ended.all()):
                break
        before = guess
        pressed = torch.where(at_high, high, torch.where(at_low, low, 0.0))
        free = ~(at_low | at_high)
        delta = _solved(m, b, pressed, free)
        inside = torch.minimum(torch.maximum(delta, low), high)
        reached = _quadratic(m, b, inside)
        # No look at numbers: on a GPU each would wait for all before it.
        better = reached < value
        best = torch.where(better[:, None], inside, best)
        value = torch.where(better, reached, value)
        # Exactly in balance; rounding must not decide about these.
        force = torch.where(free, 0.0 * delta, -(_times(m, delta) + b))
    return best, ended & ~force.isnan().any(1)


def _solved(m: Tensor, b: Tensor, pressed: Tensor, free: Tensor) -> Tensor:
    """Δ with the pressed entries as given; NaN if rounding forbids it."""
    right = -b - _times(m, pressed)
    if m.device.type == "cpu":  # as few unknowns as there are
        rows = zip(m, right, pressed, free, strict=True)
        return torch.stack([_solved_alone(*row) for row in rows])
    # Pressed entries stay unknowns of their own: no look at how many there are.
    matrix = torch.where(free[:, :, None] & free[:, None, :], m, 0.0)
    matrix.diagonal(dim1=1, dim2=2).add_((~free).to(m.dtype))
    lower, info = torch.linalg.cholesky_ex(matrix)
    right = torch.where(free, right, pressed)
    solved = torch.cholesky_solve(right[:, :, None], lower)[:, :, 0]
    return torch.where((info == 0)[:, None], solved, math.nan)


def _solved_alone(m: Tensor, right: Tensor, pressed: Tensor, free: Tensor) -> Tensor:
    rest = free.nonzero()[:, 0]
    if len(rest) == 0:
        return pressed
    lower, info = torch.linalg.cholesky_ex(m[rest][:, rest])
    solved = torch.cholesky_solve(right[rest, None], lower)[:, 0]
    return pressed.index_copy(0, rest, torch.where(info == 0, solved, math.nan))


def _times(m: Tensor, v: Tensor) -> Tensor:
    """M v of each."""
    return torch.bmm(m, v[:, :, None])[:, :, 0]


def _quadratic(m: Tensor, b: Tensor, v: Tensor) -> Tensor:
    return ((0.5 * _times(m, v) + b) * v).sum(1)


def _along_slope(m: Tensor, b: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Shortened until it descends: a point along the projected slope (Cauchy point)."""
    curvature, square = (b * _times(m, b)).sum(1), b.square().sum(1)
    length = torch.where(curvature > 0, square / curvature, 1.0)
    powers = torch.arange(_SHORTENINGS, dtype=b.dtype, device=b.device)
    lengths = length[:, None] * 0.25**powers
    steps = -lengths[:, :, None] * b[:, None]
    points = torch.minimum(torch.maximum(steps, low[:, None]), high[:, None])
    values = 0.5 * (points * (points @ m)).sum(2) + (points * b[:, None]).sum(2)
    down = values < 0
    first = down.to(torch.int8).argmax(1)
    place = first[:, None, None].expand(-1, 1, points.shape[2])
    found = points.gather(1, place)[:, 0]
    return torch.where(down.any(1)[:, None], found, 0.0)
