"""Where between w_T and w_0 something looks most like a client's weight update."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["Segment", "search_segment"]


@final
@dataclass(frozen=True, eq=False)
class Segment:
    """cos(w_0 − w_T, ∇ℓ(αw_0 + (1−α)w_T)) over α.

    The gradient is that of all N samples. An attack that takes the update for a
    gradient at w_0 has 1 − ``at_start`` as the least loss that the true samples reach;
    one with a learned α has 1 − ``best``.

    Attributes:
        alphas: ascending, from 0 (w_T) to 1 (w_0).
        similarity: the cosine at each of them, in [−1, 1]; NaN where the gradient is
            zero.
        best_alpha: of the largest cosine; NaN where all are NaN.
        best: that cosine.
    """

    alphas: Float[Tensor, " points"]
    similarity: Float[Tensor, " points"]
    best_alpha: float
    best: float

    @property
    def at_start(self) -> float:
        """The cosine at w_0."""
        return float(self.similarity[-1])

    @property
    def at_end(self) -> float:
        """The cosine at w_T."""
        return float(self.similarity[0])


def search_segment(
    similarity: Callable[[float], float], *, points: int, tolerance: float
) -> Segment:
    """The α in [0, 1] with the largest similarity.

    From a grid, then by bounded minimisation between the neighbours of its best point:
    along the segment, similarity has one maximum in all settings of Zhu, Yao &
    Blaschko (ICML 2023, Fig. 4). Costs ``points`` evaluations and about ten more.

    Args:
        similarity: a cosine, of α; NaN where there is no direction.
        points: of the grid, both ends included, at least 2.
        tolerance: of the best α.

    Returns:
        The similarity on the grid, and the best.

    Example:
        >>> found = search_segment(
        ...     lambda a: 1 - (a - 0.3) ** 2, points=5, tolerance=1e-4
        ... )
        >>> round(found.best_alpha, 3), found.at_start
        (0.3, 0.51)
    """
    from scipy.optimize import minimize_scalar

    alphas = [i / (points - 1) for i in range(points)]
    known = [similarity(alpha) for alpha in alphas]
    top = max(range(points), key=lambda i: -_loss(known[i]))
    best_alpha, best = alphas[top], known[top]
    if math.isnan(best):
        best_alpha = math.nan
    else:
        found = minimize_scalar(
            lambda alpha: _loss(similarity(float(alpha))),
            bounds=(alphas[max(top - 1, 0)], alphas[min(top + 1, points - 1)]),
            method="bounded",
            options={"xatol": tolerance},
        )
        # Bounded minimisation never looks at its ends, which may be the best points.
        if -float(found.fun) > best:
            best_alpha, best = float(found.x), -float(found.fun)
    return Segment(
        torch.tensor(alphas, dtype=torch.float64),
        torch.tensor(known, dtype=torch.float64),
        best_alpha,
        best,
    )


def _loss(cosine: float) -> float:
    # The search knows no NaN or infinity: where there is no direction is worse than any
    # cosine.
    return 2.0 if math.isnan(cosine) else -cosine
