"""How small the smallest eigenvalue can be, given what a random start has seen."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from leakwatch.spectrum.operators import random_vector


def probable_lower_bound(
    nodes: Float[Tensor, " k"],
    couplings: Float[Tensor, " k"],
    size: int,
    risk: float,
) -> float:
    """Return a lower bound of the smallest eigenvalue of H ⪰ 0, true but for a risk.

    Lanczos from a unit vector q_1 gives q_{k+1} = p_k(H) q_1 with the polynomial
    p_k(t) = ∏(t − θ_i)/∏b_i over Ritz values θ and off-diagonals b. Along the
    eigenvector x_n this reads |p_k(λ_n)| · |x_nᵀq_1| = |x_nᵀq_{k+1}| ≤ 1. Below all θ,
    |p_k| falls towards the smallest of them, so λ_n is at least the t where
    |p_k(t)| = 1/|x_nᵀq_1|. For q_1 uniform on the sphere |x_nᵀq_1| is below
    risk · √(π/2n) with a probability of at most ``risk``. That bound adapts to the
    spectrum, and one and the same event makes it hold at every step k.

    van Dorsselaer, Hochstenbruck, van der Vorst: "Computing probabilistic bounds for
    extreme eigenvalues of symmetric matrices with the Lanczos method", SIAM J. Matrix
    Anal. Appl. 22 (2000); the a-priori form is Kuczyński and Woźniakowski (1992).

    Args:
        nodes: Ritz values θ_1 … θ_k, at least 0, any order.
        couplings: b_1 … b_k, the last one to the vector not yet multiplied; positive.
        size: n.
        risk: probability that the bound is wrong.

    Returns:
        The bound, 0 where nothing better is known.

    Example:
        >>> import torch
        >>> theta = torch.tensor([2.0, 1.0]).double()
        >>> b = torch.full_like(theta, 1e-12)
        >>> probable_lower_bound(theta, b, 10, 1e-3) > 0.999
        True
    """
    smallest = float(nodes.min())
    if smallest <= 0 or not bool((couplings > 0).all()):
        return 0.0
    component = 1.0 if size == 1 else min(1.0, risk * math.sqrt(math.pi / (2 * size)))
    wanted = float(couplings.log().sum()) - math.log(component)

    def reached(t: float) -> bool:
        return float((nodes - t).log().sum()) >= wanted

    if not reached(0.0):
        return 0.0
    # In u = log(θ − t): near θ the bound sits at a distance of many decades.
    low, high = math.log(smallest) - 80.0, math.log(smallest)
    for _ in range(60):
        middle = (low + high) / 2
        gap = math.exp(middle)
        others = (nodes - smallest + gap).log().sum()
        if float(others) >= wanted:
            high = middle
        else:
            low = middle
    return max(smallest - math.exp(high), 0.0)


def random_starts(
    size: int, count: int, generator: torch.Generator
) -> Float[Tensor, "count n"]:
    """Draw unit vectors uniformly from the sphere, float64."""
    drawn = torch.stack([random_vector(size, generator) for _ in range(count)])
    lengths: Tensor = torch.linalg.vector_norm(drawn, dim=1, keepdim=True)
    return drawn / lengths
