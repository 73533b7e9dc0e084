"""(JᵀJ + εI)⁻¹Jᵀb for every ε from one Krylov space."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor

from leakwatch.spectrum.golub_kahan import Bidiagonalisation, unit
from leakwatch.spectrum.operators import FactorOperator, as_factor


class DampedDistance(NamedTuple):
    """‖x(ε) − c‖ for one damping, and how far it may be off.

    Attributes:
        value: the norm.
        error: bound of what the iteration has left out, infinite if there is none.
        gradient: ‖Jᵀ(b − Jx) − εx‖, the residual of the normal equations.
        misfit: ‖b − Jx‖.
        length: ‖x‖.
    """

    value: float
    error: float
    gradient: float
    misfit: float
    length: float


@final
@dataclass(frozen=True, eq=False)
class DampedSolution:
    """x(ε) = (H + εI)⁻¹Jᵀb of one sample, for every ε ≥ 0.

    In the basis V_k of the Krylov space, where J V_k = U_{k+1} L with L lower
    bidiagonal, x(ε) minimises ‖L y − ‖b‖e_1‖² + ε‖y‖² (LSQR: Paige and Saunders 1982,
    whose damping is √ε). The space does not depend on ε, so neither do the products.

    Attributes:
        lower: L.
        length: ‖b‖.
        next: α_{k+1} β_{k+1}, what couples the space to the rest; 0 when it is
            invariant.
        centre: coordinates of the point c, zero unless one was given.
        outside: what of ‖c‖ lies outside of the space.
        basis: rows of V_kᵀ, where they were kept.
    """

    lower: Float[Tensor, "rows k"]
    length: float
    next: float
    centre: Float[Tensor, " k"]
    outside: float
    basis: Float[Tensor, "k n"] | None = None

    @property
    def products(self) -> int:
        """Products with J and with Jᵀ spent."""
        return self.lower.shape[1]

    @property
    def sigma(self) -> Float[Tensor, " k"]:
        """Singular values of L."""
        return self._svd[1]

    @cached_property
    def _svd(self) -> tuple[Tensor, Tensor, Tensor]:
        """Left coordinates of ‖b‖e_1, singular values, right vectors as columns."""
        left, sigma, right = torch.linalg.svd(self.lower, full_matrices=False)
        return left[0] * self.length, sigma, right.mT

    def at(
        self, epsilon: float, lower: float = 0.0, *, shift: float = 0.0
    ) -> DampedDistance:
        """‖x(ε) − c‖.

        Args:
            epsilon: the damping, in units of the eigenvalues of H.
            lower: a lower bound of λ_min. The error of x is at most its residual over
                ε + λ_min.
            shift: what to add to the singular values that are inverted, to see what
                an error of J does.
        """
        along, sigma, right = self._svd
        lengths = self._lengths(epsilon, shift)
        y = right @ lengths
        inside = float((along - sigma * lengths).square().sum())
        beyond = max(self.length**2 - float(along.square().sum()), 0.0)
        gradient = self.next * float(y[-1].abs()) if len(y) else 0.0
        least = epsilon + lower
        error = 0.0 if gradient == 0 else math.inf
        if gradient > 0 and least > 0:
            error = gradient / least
        return DampedDistance(
            value=math.hypot(float((y - self.centre).norm()), self.outside),
            error=error,
            gradient=gradient,
            misfit=math.sqrt(inside + beyond),
            length=float(y.norm()),
        )

    def vector(self, epsilon: float, *, shift: float = 0.0) -> Float[Tensor, " n"]:
        """x(ε) itself, float64.

        Args:
            epsilon: the damping, in units of the eigenvalues of H.
            shift: see :meth:`at`.

        Raises:
            ValueError: if the basis was not kept.
        """
        if self.basis is None:
            raise ValueError("the basis was not kept; use damped(..., keep=True).")
        y = self._svd[2] @ self._lengths(epsilon, shift)
        return self.basis.mT @ y.to(self.basis.device)

    def earlier(self, steps: int) -> DampedSolution:
        """The solution after fewer products, to see what the last ones changed.

        Knows nothing of the centre.

        Args:
            steps: how many, from 0 to ``products``.

        Raises:
            ValueError: if the basis was not kept, or for another number of steps.
        """
        if self.basis is None:
            raise ValueError("the basis was not kept; use damped(..., keep=True).")
        if not 0 <= steps <= self.products:
            raise ValueError(
                f"steps must be between 0 and {self.products}, got {steps}."
            )
        if steps == self.products:
            return self
        coupling = self.lower[steps, steps] * self.lower[steps, steps - 1]
        return DampedSolution(
            lower=self.lower[: steps + 1, :steps],
            length=self.length,
            next=float(coupling) if steps else 0.0,
            centre=self.centre.new_zeros(steps),
            outside=0.0,
            basis=self.basis[:steps],
        )

    def _lengths(self, epsilon: float, shift: float) -> Tensor:
        along, sigma, _ = self._svd
        system = (sigma + shift).clamp_min(0.0).square() + epsilon
        safe = torch.where(system > 0, system, 1.0)
        return torch.where(system > 0, sigma * along / safe, 0.0)

    def amplification(self, epsilon: float, lower: float, size: int) -> float:
        """√Σ 1/(λ_i + ε)², what unit errors of Jᵀb along all n directions become.

        Args:
            epsilon: the damping.
            lower: a lower bound of λ_min, for the directions outside of the space.
            size: n.
        """
        inside = float((1 / (self.sigma.square() + epsilon)).square().sum())
        outside = size - len(self.sigma)
        if outside and epsilon + lower <= 0:
            return math.inf
        rest = outside / (epsilon + lower) ** 2 if outside else 0.0
        return math.sqrt(inside + rest)


def damped(
    a: Tensor | FactorOperator,
    b: Float[Tensor, "batch rows"],
    *,
    epsilons: Sequence[float] | Float[Tensor, "batch m"] = (0.0,),
    centre: Float[Tensor, "batch n"] | None = None,
    lower: Float[Tensor, " batch"] | None = None,
    tol: float = 1e-3,
    max_matvecs: int = 300,
    keep: bool = False,
) -> list[DampedSolution | None]:
    """Solve (JᵀJ + εI) x = Jᵀb without forming H.

    Golub–Kahan bidiagonalisation started at b, as in LSQR (Paige and Saunders 1982)
    and LSMR (Fong and Saunders 2011), right vectors re-orthogonalised. Every ε is then
    solved on the small bidiagonal matrix.

    Args:
        a: J, (rows, n) or (batch, rows, n), or an operator.
        b: right-hand sides, (batch, rows).
        epsilons: the dampings, the same for all samples or some for each, at which the
            iteration judges when to stop; the result can be asked for any other.
        centre: points c whose distance from x is wanted instead of ‖x‖.
        lower: a lower bound of λ_min of each sample: without it, undamped solutions
            have an error bound only once the space is exhausted.
        tol: a sample is done when the error bound of every ε is below tol · ‖x − c‖.
        max_matvecs: most products with J per sample, and with Jᵀ.
        keep: keep the basis of the space, k · n numbers, for the vectors x(ε).

    Returns:
        One `DampedSolution` per sample, None where a product was not finite.

    Raises:
        TypeError: ``a`` is neither a tensor nor an operator.
        ValueError: bad matrices, another shape of ``b``, a negative damping, or
            ``max_matvecs < 1``.

    Example:
        >>> import torch
        >>> j = torch.diag(torch.tensor([2.0, 1.0], dtype=torch.float64))
        >>> b = torch.tensor([[2.0, 1.0]], dtype=torch.float64)
        >>> x = damped(j, b)[0]  # JᵀJx = Jᵀb at (1, 1); with ε = 1 at (4/5, 1/2)
        >>> round(x.at(0.0).value ** 2, 9), round(x.at(1.0).value ** 2, 9)
        (2.0, 0.89)
    """
    factor = as_factor(a)
    batch, rows, n = factor.batch_size, factor.rows, factor.size
    if b.shape != (batch, rows):
        raise ValueError(
            f"b has shape {tuple(b.shape)}, expected one row per sample, "
            f"{(batch, rows)}"
        )
    wanted = (
        epsilons.tolist()
        if isinstance(epsilons, Tensor)
        else [list(epsilons) for _ in range(batch)]
    )
    if len(wanted) != batch or min(map(min, wanted)) < 0 or max_matvecs < 1:
        raise ValueError(
            f"got epsilons={epsilons} and max_matvecs={max_matvecs}, expected dampings "
            "of at least 0, or a row of them per sample, and at least 1 product"
        )
    if centre is None:
        centre = torch.zeros(batch, n, dtype=torch.float64, device=factor.device)
    bounds = [0.0] * batch if lower is None else lower.tolist()
    limit = min(max_matvecs, n)
    chain = Bidiagonalisation.from_left(factor, b, limit)
    lengths = unit(b.to(torch.float64))[1].tolist()
    active = ~chain.closed & ~chain.failed
    look = 1
    while bool(active.any()) and chain.size < limit:
        chain.step(active)
        active = active & ~chain.closed & ~chain.failed
        if chain.size < look:
            continue
        look = chain.size + max(1, chain.size // 8)
        near = _near(chain, centre)
        for i in active.nonzero().flatten().tolist():
            solution = _solution(chain, i, lengths[i], near[i])
            active[i] = not all(
                _settled(solution, e, bounds[i], tol) for e in wanted[i]
            )
    near = _near(chain, centre)
    return [
        None
        if bool(chain.failed[i])
        else _solution(chain, i, lengths[i], near[i], keep=keep)
        for i in range(batch)
    ]


def _near(
    chain: Bidiagonalisation, centre: Float[Tensor, "batch n"]
) -> list[tuple[Float[Tensor, " k"], float]]:
    """Coordinates of each centre in the space of its sample, and what lies outside."""
    # Beyond the steps of a sample the rows of its basis are zero, or not yet its own.
    steps = chain.steps.to(centre.device)
    place = torch.arange(chain.size, device=centre.device)
    basis = chain.vectors[:, : chain.size] * (place < steps[:, None])[:, :, None]
    inside = torch.bmm(basis, centre[:, :, None])
    outside = (centre - torch.bmm(basis.mT, inside)[:, :, 0]).norm(dim=1)
    both = torch.cat([inside[:, :, 0], outside[:, None]], 1).cpu()
    return [
        (row[:k], float(row[-1]))
        for row, k in zip(both, chain.steps.tolist(), strict=True)
    ]


def _settled(
    solution: DampedSolution, epsilon: float, lower: float, tol: float
) -> bool:
    distance = solution.at(epsilon, lower)
    return distance.error <= tol * distance.value


def _solution(
    chain: Bidiagonalisation,
    i: int,
    length: float,
    near: tuple[Float[Tensor, " k"], float],
    *,
    keep: bool = False,
) -> DampedSolution:
    """What the space of one sample holds."""
    lower = chain.lower(i)
    k = lower.shape[1]
    coupling = 0.0
    if k and not bool(chain.closed[i]):
        coupling = float(chain.alpha[i, k - 1] * chain.beta[i, k - 1])
    return DampedSolution(
        lower=lower,
        length=length,
        next=coupling,
        centre=near[0],
        outside=near[1],
        basis=chain.vectors[i, :k].clone() if keep else None,
    )
