"""Golub–Kahan bidiagonalisation of a batch of Jacobians, one product pair at a time."""

from __future__ import annotations

import math
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from leakwatch.spectrum.operators import (
    FactorOperator,
    backward,
    forward,
    norm,
    orthogonalise,
)

_BREAKDOWN = 30.0
"""A remainder below this many eps · σ_1 is rounding: the subspace is invariant."""


@final
class Bidiagonalisation:
    """J Q_k = P_k B_k with orthonormal Q_k and upper bidiagonal B_k, for each sample.

    Golub and Kahan (1965), started from the right. B_k has α_1 … α_k on its diagonal
    and β_1 … β_{k−1} above it; the chain's last remainder is β_k q_{k+1}:
    Jᵀ P_k = Q_k B_kᵀ + β_k q_{k+1} e_kᵀ. So B_kᵀB_k is what Lanczos makes of H = JᵀJ
    from the same start, but its singular values are right to eps · σ_1.

    Started from the left at b, as LSQR does (Paige and Saunders 1982), the same steps
    give J Q_k = [p_0, P_k] L_k with p_0 = b/‖b‖ and a lower bidiagonal L_k:
    β_0 … β_{k−1} on its diagonal, α_1 … α_k below it.

    Only the right vectors are kept and re-orthogonalised, against all before and twice.
    The left ones, d_θ numbers each, would not fit memory, and need not: with
    orthonormal right vectors the singular values of B_k are those of J up to a backward
    error of a few eps · σ_1 (Simon and Zha 2000; Barlow 2013).

    Cost: one product with J and one with Jᵀ a step. Memory: 8 · k · n bytes a sample,
    and one left vector in the operator's arithmetic.

    Args:
        factor: J.
        start: q_1, (batch, n), float64 unit vectors; a zero row starts nothing.
        limit: the most steps, at most n.

    Attributes:
        size: k, steps taken.
        vectors: q_1 … q_{k+1}, (batch, slots, n).
        alpha: α_1 … α_k, (batch, slots).
        beta: β_1 … β_k, (batch, slots).
        first: β_0, (batch,); 0 when started from the right.
        steps: steps that each sample took, (batch,).
        closed: samples whose subspace is invariant: a step more would find nothing.
        failed: samples with a product that was not finite.
    """

    def __init__(
        self, factor: FactorOperator, start: Float[Tensor, "batch n"], limit: int
    ) -> None:
        self._factor = factor
        self._limit = min(limit, factor.size)
        self._eps = float(torch.finfo(factor.dtype).eps)
        self.size = 0
        slots = min(self._limit, 15) + 1
        self.vectors: Float[Tensor, "batch slots n"] = start.new_zeros(
            len(start), slots, factor.size, dtype=torch.float64
        )
        self.vectors[:, 0] = start
        self.alpha: Float[Tensor, "batch slots"] = self.vectors[:, :, 0] * 0.0
        self.beta: Float[Tensor, "batch slots"] = torch.zeros_like(self.alpha)
        self.first: Float[Tensor, " batch"] = self.alpha[:, 0].clone()
        self._scale: Float[Tensor, " batch"] = self.first
        self._left: Float[Tensor, "batch rows"] | None = None
        self.failed: Bool[Tensor, " batch"] = torch.zeros_like(
            self._scale, dtype=torch.bool
        )
        self.closed: Bool[Tensor, " batch"] = norm(start) == 0
        self.steps: Int[Tensor, " batch"] = torch.zeros_like(
            self.failed, dtype=torch.int64
        )

    @classmethod
    def from_left(
        cls, factor: FactorOperator, b: Float[Tensor, "batch rows"], limit: int
    ) -> Bidiagonalisation:
        """Start at b, (batch, rows), instead; costs one product with Jᵀ."""
        left, _ = unit(b.detach().to(factor.device, torch.float64))
        left = left.to(factor.dtype)
        every = torch.ones(len(b), dtype=torch.bool, device=factor.device)
        w, failed = backward(factor, left, every)
        length = norm(w)
        chain = cls(factor, w / torch.where(length > 0, length, 1.0)[:, None], limit)
        chain._left, chain.first, chain._scale = left, length, length
        chain.failed = failed
        return chain

    def step(self, active: Bool[Tensor, " batch"]) -> None:
        """Take one step of the active samples that are neither closed nor failed."""
        j = self.size
        self.size += 1
        if j + 1 == self.vectors.shape[1]:
            self._grow()
        active = active & ~self.closed & ~self.failed
        self.steps += active
        u, broken = forward(self._factor, self.vectors[:, j], active)
        self.failed = self.failed | broken
        active = active & ~broken
        if self._left is not None:
            before = self.beta[:, j - 1] if j else self.first
            u = u - before[:, None].to(u.dtype) * self._left
        u, length = unit(torch.where(active[:, None], u, 0.0))
        self._scale = torch.maximum(self._scale, length)
        # Below this J q_j lies in the span of what was there: q_j leads to σ = 0.
        full = active & (length > self._rounding())
        self.alpha[:, j] = torch.where(full, length, 0.0)
        self._left = torch.where(full[:, None], u, 0.0)

        w, broken = backward(self._factor, self._left, full)
        self.failed = self.failed | broken
        w, _ = orthogonalise(w, self.vectors[:, : j + 1])
        rest = norm(w)
        self._scale = torch.maximum(self._scale, rest)
        on = full & ~broken & (rest > self._rounding()) & (j + 1 < self._factor.size)
        self.beta[:, j] = torch.where(full & ~broken, rest, 0.0)
        self.closed = self.closed | (active & ~on)
        w = w / torch.where(rest > 0, rest, 1.0)[:, None]
        self.vectors[:, j + 1] = torch.where(on[:, None], w, 0.0)

    def upper(self, sample: int) -> Float[Tensor, "k k1"]:
        """[B_k, β_k e_k] of one sample, k × (k + 1), on the CPU."""
        k = int(self.steps[sample])
        alpha, beta = self.alpha[sample, :k].cpu(), self.beta[sample, :k].cpu()
        out = torch.zeros(k, k + 1, dtype=torch.float64)
        every = torch.arange(k)
        out[every, every] = alpha
        out[every, every + 1] = beta
        return out

    def lower(self, sample: int) -> Float[Tensor, "k1 k"]:
        """L_k of one sample, (k + 1) × k, on the CPU."""
        k = int(self.steps[sample])
        alpha, beta = self.alpha[sample, :k].cpu(), self.beta[sample, :k].cpu()
        out = torch.zeros(k + 1, k, dtype=torch.float64)
        every = torch.arange(k)
        out[every, every] = torch.cat([self.first[sample, None].cpu(), beta])[:k]
        out[every + 1, every] = alpha
        return out

    def _rounding(self) -> Float[Tensor, " batch"]:
        return _BREAKDOWN * self._eps * self._scale

    def _grow(self) -> None:
        old = self.vectors.shape[1]
        more = min(2 * old, self._limit + 1) - old

        def grown(t: Tensor) -> Tensor:
            return torch.cat([t, t.new_zeros(len(t), more, *t.shape[2:])], dim=1)

        self.vectors = grown(self.vectors)
        self.alpha, self.beta = grown(self.alpha), grown(self.beta)


def unit(u: Float[Tensor, "batch rows"]) -> tuple[Tensor, Float[Tensor, " batch"]]:
    """Return unit vectors in their own arithmetic and float64 lengths.

    Lengths add up in float64: a gradient has millions of entries.
    """
    peak = u.abs().amax(1).to(torch.float64)
    safe = torch.where(peak > 0, peak, 1.0)
    scaled = u / safe.to(u.dtype)[:, None]
    length: Tensor = torch.linalg.vector_norm(scaled, dim=1, dtype=torch.float64)
    divisor = torch.where(length > 0, length, 1.0)
    return scaled / divisor.to(u.dtype)[:, None], length * safe * (peak > 0)


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
