"""Golub–Kahan bidiagonalisation of a batch of Jacobians, one product pair at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
        vectors: q_1 … q_{k+1}, (batch, slots, n); all other attributes are on the CPU.
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
        self.alpha: Float[Tensor, "batch slots"] = torch.zeros(
            len(start), slots, dtype=torch.float64
        )
        self.beta: Float[Tensor, "batch slots"] = torch.zeros_like(self.alpha)
        self.first: Float[Tensor, " batch"] = self.alpha[:, 0].clone()
        self._scale: Float[Tensor, " batch"] = self.vectors.new_zeros(len(start))
        # β of the step before and p, which lead to the next one.
        self._before: Float[Tensor, " batch"] = self._scale
        self._left: Float[Tensor, "batch rows"] | None = None
        self.failed: Bool[Tensor, " batch"] = torch.zeros(len(start), dtype=torch.bool)
        self.closed: Bool[Tensor, " batch"] = (norm(start) == 0).cpu()
        self.steps: Int[Tensor, " batch"] = torch.zeros_like(
            self.failed, dtype=torch.int64
        )
        self._active = self._mask = ~self.failed

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
        chain._left, chain._before, chain._scale = left, length, length
        chain.first, chain.failed = length.cpu(), failed.cpu()
        return chain

    def step(self, active: Bool[Tensor, " batch"]) -> None:
        """Take one step of the active samples that are neither closed nor failed.

        Args:
            active: on the CPU. What a step says about the samples is brought there
                once, at its end.
        """
        j = self.size
        self.size += 1
        if j + 1 == self.vectors.shape[1]:
            self._grow()
        active = active & ~self.closed & ~self.failed
        self.steps += active
        mask = self._on_device(active)
        u, broken = forward(self._factor, self.vectors[:, j], mask)
        failed, whole = broken, mask & ~broken
        if self._left is not None:
            before = torch.where(whole, self._before, 0.0)
            u = u - before[:, None].to(u.dtype) * self._left
        length = _length(u)
        self._scale = torch.maximum(self._scale, length)
        # Below this J q_j lies in the span of what was there: q_j leads to σ = 0.
        full = whole & (length > self._rounding())
        alpha = torch.where(full, length, 0.0)
        self._left = u / torch.where(full, length, math.inf).to(u.dtype)[:, None]

        w, broken = backward(self._factor, self._left, mask)
        failed = failed | broken
        w, _ = orthogonalise(w, self.vectors[:, : j + 1])
        rest = norm(w)
        self._scale = torch.maximum(self._scale, rest)
        on = full & ~broken & (rest > self._rounding())
        if j + 1 == self._factor.size:
            on = torch.zeros_like(on)
        beta = self._before = torch.where(full & ~broken, rest, 0.0)
        w = w / torch.where(rest > 0, rest, 1.0)[:, None]
        self.vectors[:, j + 1] = torch.where(on[:, None], w, 0.0)
        said = torch.stack([alpha, beta, failed.double(), (whole & ~on).double()]).cpu()
        self.alpha[:, j], self.beta[:, j] = said[0], said[1]
        self.failed = self.failed | (said[2] > 0)
        self.closed = self.closed | (said[3] > 0)

    def upper(self, samples: int | Sequence[int]) -> Float[Tensor, "*batch k k1"]:
        """[B_k, β_k e_k], k × (k + 1), on the CPU, of samples with as many steps."""
        k = self._steps_of(samples)
        alpha, beta = self.alpha[samples, :k], self.beta[samples, :k]
        out = alpha.new_zeros(*alpha.shape, k + 1)
        every = torch.arange(k)
        out[..., every, every] = alpha
        out[..., every, every + 1] = beta
        return out

    def lower(self, sample: int) -> Float[Tensor, "k1 k"]:
        """L_k of one sample, (k + 1) × k, on the CPU."""
        k = self._steps_of(sample)
        alpha, beta = self.alpha[sample, :k], self.beta[sample, :k]
        out = torch.zeros(k + 1, k, dtype=torch.float64)
        every = torch.arange(k)
        out[every, every] = torch.cat([self.first[sample, None], beta])[:k]
        out[every + 1, every] = alpha
        return out

    def _steps_of(self, samples: int | Sequence[int]) -> int:
        one = samples if isinstance(samples, int) else samples[0]
        return int(self.steps[one])

    def _on_device(self, active: Bool[Tensor, " batch"]) -> Bool[Tensor, " batch"]:
        """The same tensor until the samples change, so that operators know it again."""
        if self._mask.device != self.vectors.device or not torch.equal(
            active, self._active
        ):
            self._active, self._mask = active, active.to(self.vectors.device)
        return self._mask

    def _rounding(self) -> Float[Tensor, " batch"]:
        return _BREAKDOWN * self._eps * self._scale

    def _grow(self) -> None:
        old = self.vectors.shape[1]
        more = min(2 * old, self._limit + 1) - old

        def grown(t: Tensor) -> Tensor:
            return torch.cat([t, t.new_zeros(len(t), more, *t.shape[2:])], dim=1)

        self.vectors = grown(self.vectors)
        self.alpha, self.beta = grown(self.alpha), grown(self.beta)


def _length(u: Float[Tensor, "batch rows"]) -> Float[Tensor, " batch"]:
    """Norms in float64: a gradient has millions of entries."""
    if u.dtype == torch.float64:
        return norm(u)
    length: Tensor = torch.linalg.vector_norm(u, dim=1, dtype=torch.float64)
    return length


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
    nodes: Float[Tensor, "*batch k"],
    couplings: Float[Tensor, "*batch k"],
    size: int,
    risk: float,
) -> Float[Tensor, "*batch"]:
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
        The bounds, 0 where nothing better is known.

    Example:
        >>> import torch
        >>> theta = torch.tensor([2.0, 1.0]).double()
        >>> b = torch.full_like(theta, 1e-12)
        >>> bool(probable_lower_bound(theta, b, 10, 1e-3) > 0.999)
        True
    """
    smallest = nodes.amin(-1, keepdim=True)
    known = (smallest > 0) & (couplings > 0).all(-1, keepdim=True)
    component = 1.0 if size == 1 else min(1.0, risk * math.sqrt(math.pi / (2 * size)))
    wanted = couplings.log().sum(-1, keepdim=True) - math.log(component)
    known = known & (nodes.log().sum(-1, keepdim=True) >= wanted)
    if not bool(known.any()):
        return torch.zeros_like(smallest[..., 0])
    # In u = log(θ − t): near θ the bound sits at a distance of many decades.
    high = torch.where(known, smallest, 1.0).log()
    low = high - 80.0
    for _ in range(60):
        middle = (low + high) / 2
        others = (nodes - smallest + middle.exp()).log().sum(-1, keepdim=True)
        beyond = others >= wanted
        low, high = torch.where(beyond, low, middle), torch.where(beyond, middle, high)
    bound = (smallest - high.exp()).clamp_min(0.0)
    return torch.where(known, bound, 0.0)[..., 0]
