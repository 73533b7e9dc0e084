"""Both ends of the spectrum of H = JᵀJ from products with J and Jᵀ."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from leakwatch.spectrum.golub_kahan import Bidiagonalisation, probable_lower_bound
from leakwatch.spectrum.operators import (
    FactorOperator,
    as_factor,
    forward,
    norm,
    own_generator,
    random_starts,
)
from leakwatch.spectrum.result import DEFAULT_TOL

RISK = 1e-3
"""Probability that λ_min lies below its interval, over the random start."""

_SHARP = 1e-3
_NARROW = 1e-2
_LEADING = 16
_LEADING_RESIDUAL = 1e-3


@final
@dataclass(frozen=True, eq=False)
class Ends:
    """The ends of the spectrum of H, each with what is known about its error.

    Numbers are on the CPU, where they are judged; vectors are where J is.

    Attributes:
        lambda_max: λ_1, float64; NaN for a failed sample.
        residual: ‖Hu − λ_1u‖, absolute.
        converged: whether that residual met the tolerance.
        smallest: ‖J y‖² for a unit vector y that J nearly annuls: λ_min if converged.
            Taken from the steps, without another product, where it was not wanted.
        lower: lower end of the interval of λ_min.
        upper: upper end: ``smallest`` with what rounding may hide.
        floor: what rounding makes of an eigenvalue that is zero.
        sharp: whether the interval is settled: narrow, or at its end below the floor,
            so that more products would tell nothing.
        matvecs: steps spent on each sample, one product with J and one with Jᵀ each.
        leading: up to 16 converged eigenpairs of each sample from the top: values
            (m,) and columns (n, m).
    """

    lambda_max: Float[Tensor, " batch"]
    residual: Float[Tensor, " batch"]
    converged: Bool[Tensor, " batch"]
    smallest: Float[Tensor, " batch"]
    lower: Float[Tensor, " batch"]
    upper: Float[Tensor, " batch"]
    floor: Float[Tensor, " batch"]
    sharp: Bool[Tensor, " batch"]
    matvecs: Int[Tensor, " batch"]
    leading: tuple[tuple[Float[Tensor, " m"], Float[Tensor, "n m"]], ...]

    def status(self, i: int) -> str:
        """Say what λ_min of sample ``i`` is worth.

        Returns:
            "ok" when the interval is within 1 % of itself, "unresolved: …" when
            rounding hides it, else "not converged: …" or "failed: …".
        """
        low, high = float(self.lower[i]), float(self.upper[i])
        if math.isnan(float(self.lambda_max[i])):
            return (
                "failed: a product with J was not finite; look for overflow in the "
                "model or use float64"
            )
        if high - low <= _NARROW * high:
            return "ok"
        if float(self.smallest[i]) <= float(self.floor[i]):
            return (
                f"unresolved: at most {high:.1e}, which rounding can't tell from zero; "
                "use float64 if it matters"
            )
        return (
            f"not converged: between {low:.1e} and {high:.1e} after "
            f"{int(self.matvecs[i])} products; allow more products"
        )


def ends(
    a: Tensor | FactorOperator,
    *,
    smallest: bool | Bool[Tensor, " batch"] = True,
    tol: float = DEFAULT_TOL,
    max_matvecs: int = 300,
    risk: float = RISK,
    generator: torch.Generator | None = None,
) -> Ends:
    """Largest eigenvalue of H = JᵀJ, and an interval for the smallest.

    Golub–Kahan bidiagonalisation from one random start serves both ends. λ_1 takes 10
    to 20 steps. For λ_min:

    - *upper end*: the smallest Ritz vector y, multiplied by J once more. λ_min is at
      most ‖J y‖² whatever happened before, up to the rounding of that one product.
    - *lower end*: the bound of van Dorsselaer et al. (2000) on what a random start can
      have missed; wrong with a probability of at most ``risk``. It turns positive when
      the upper end settles, and it is never more than a bound: 0 until then.
    - both ends are 0 when J has fewer rows than columns.

    With λ_min far below λ_1 the interval closes only when k approaches n, as for every
    method that has products alone: the number of steps grows like
    min(n, √(λ_1/λ_min)). A sample stops early when that number, for the λ_min that is
    still possible, exceeds ``max_matvecs``: then the products would be wasted.

    Args:
        a: J, (rows, n) or (batch, rows, n), float32 or float64, or an operator.
        smallest: whether λ_min is wanted, of all samples or of each; otherwise it stops
            when λ_1 is found, and the interval says what is known by then.
        tol: λ_1 is converged when ‖Hu − λ_1u‖ ≤ tol · λ_1.
        max_matvecs: most steps per sample, one product with J and Jᵀ each.
        risk: probability that the lower end is wrong.
        generator: source of the start; default: a fresh one, equal each time. All
            samples share the start, so none depends on which others are there.

    Returns:
        `Ends`. Residuals and vectors need no further products.

    Raises:
        TypeError: ``a`` is neither a tensor nor an operator.
        ValueError: bad matrices, ``tol`` or ``risk`` outside (0, 1),
            ``max_matvecs < 1``.

    Example:
        >>> import torch
        >>> j = torch.diag(torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64))
        >>> spectrum = ends(j)
        >>> spectrum.lambda_max.round(decimals=9), spectrum.status(0)
        (tensor([9.], dtype=torch.float64), 'ok')
        >>> bool((spectrum.lower <= 1) & (1 <= spectrum.upper))
        True
    """
    factor = as_factor(a)
    for name, number in (("tol", tol), ("risk", risk)):
        if not 0 < number < 1:
            raise ValueError(
                f"{name} is {number}, expected a number between 0 and 1; give e.g. 1e-3"
            )
    if max_matvecs < 1:
        raise ValueError(
            f"max_matvecs is {max_matvecs}, expected at least 1 product; give e.g. 300"
        )
    batch = factor.batch_size
    start = random_starts(factor.size, 1, own_generator(generator))
    chain = Bidiagonalisation(
        factor, start.to(factor.device).expand(batch, -1), max_matvecs
    )
    limit = min(max_matvecs, factor.size)
    wanted = torch.as_tensor(smallest).cpu().expand(batch)
    found = _Found(factor, wanted, tol, limit, risk)
    active = torch.ones(batch, dtype=torch.bool)
    look = 1
    for step in range(1, limit + 1):
        chain.step(active)
        active = active & ~chain.failed
        if step < min(look, limit) and not bool((chain.closed & active).any()):
            continue
        # The small problem costs step³: looking less often keeps it below the products.
        look = step + max(1, step // 8)
        # Those that closed earlier have fewer steps.
        for k in sorted(set(chain.steps[active].tolist())):
            rows = (active & (chain.steps == k)).nonzero()[:, 0]
            active[rows] = ~found.assess(chain, rows) & (step < limit)
        if not bool(active.any()):
            break
    return found.ends(chain)


@final
class _Found:
    """The ends of the spectra as far as the steps went; on the CPU."""

    def __init__(
        self,
        factor: FactorOperator,
        smallest: Bool[Tensor, " batch"],
        tol: float,
        limit: int,
        risk: float,
    ) -> None:
        self._factor, self._smallest, self._tol = factor, smallest, tol
        self._limit, self._risk = limit, risk
        self._eps = float(torch.finfo(factor.dtype).eps)
        batch = len(smallest)
        none = torch.zeros(0, dtype=torch.float64)
        missing = torch.full((batch,), math.nan, dtype=torch.float64)
        self._top, self._residual, self._floor, self._low = (
            missing.clone() for _ in range(4)
        )
        self._lower = torch.zeros_like(missing)
        self._converged = torch.zeros(batch, dtype=torch.bool)
        self._sharp = torch.zeros(batch, dtype=torch.bool)
        # The lowest Ritz vector, and leading values and vectors.
        self._lowest = [none.new_zeros(0, 1)] * batch
        self._leading = [(none, none.new_zeros(0, 0))] * batch

    def assess(self, chain: Bidiagonalisation, rows: Tensor) -> Bool[Tensor, " rows"]:
        """Read the bidiagonal matrices of samples with as many steps; which are done.

        Args:
            chain: the steps.
            rows: the samples.
        """
        samples: list[int] = rows.tolist()
        n, wide = self._factor.size, chain.upper(samples)
        k = wide.shape[1]
        left, sigma, right = torch.linalg.svd(wide[:, :, :k])
        top = sigma[:, 0].square()
        residuals = sigma * wide[:, -1:, -1] * left[:, -1].abs()
        # Products carry rounding of their own, which no recurrence sees.
        residual = residuals[:, 0] + self._eps * top
        closed = chain.closed[rows]
        converged = closed | (residual <= self._tol * top)
        floor = n * self._eps**2 * top
        good = (residuals <= _LEADING_RESIDUAL * sigma.square())[:, :_LEADING]
        counts = good.long().cumprod(1).sum(1).tolist()
        low, lower = sigma[:, -1].square(), self._lower[rows]
        deficient, wanted = self._factor.rows < n, self._smallest[rows]
        done = closed | (converged & ~wanted)
        # It takes as long as the rest: where nobody waits for it, the last one will do.
        due = wanted | done | (k == self._limit)
        if not deficient and bool(due.any()):
            lower = torch.where(due, self._bounded(wide, sigma, lower), lower)
        sharp = (low <= floor) | (low - lower <= _SHARP * low)
        if deficient or k == n:
            sharp = torch.ones_like(sharp)
        for i, sample in enumerate(samples):
            some = slice(counts[i])
            self._lowest[sample] = right[i, -1][:, None]
            self._leading[sample] = sigma[i, some].square(), right[i, some].mT
        self._top[rows], self._residual[rows] = top, residual
        self._floor[rows], self._lower[rows], self._low[rows] = floor, lower, low
        self._converged[rows], self._sharp[rows] = converged, sharp
        hopeless = low * float(self._limit) ** 2 < top
        if self._limit >= n:
            hopeless = torch.zeros_like(hopeless)
        every: Tensor = done | converged & (sharp | hopeless)
        return every

    def _bounded(self, wide: Tensor, sigma: Tensor, lower: Tensor) -> Tensor:
        n, k = self._factor.size, sigma.shape[1]
        low = sigma[:, -1].square()
        if k == n:
            return low
        # A remainder below rounding may hide as much as rounding.
        noise = self._eps * sigma[:, :1]
        diagonal, above = wide.diagonal(0, 1, 2), wide.diagonal(1, 1, 2)
        couplings = diagonal * above.clamp_min(noise)
        bound = probable_lower_bound(sigma.square(), couplings, n, self._risk)
        best: Tensor = torch.maximum(lower, torch.minimum(bound, low))
        return best

    def ends(self, chain: Bidiagonalisation) -> Ends:
        """The result, with one product more for λ_min where it was wanted."""
        factor, ok = self._factor, ~chain.failed
        value, slack = self._low, self._floor.sqrt()
        leading = _lifted(chain, [columns for _, columns in self._leading])
        wanted = self._smallest & ok
        if factor.rows < factor.size:
            value = torch.zeros_like(value)
        elif bool(wanted.any()):
            lowest = torch.cat(_lifted(chain, self._lowest), 1).mT
            lowest = lowest / norm(lowest).clamp_min(0.5)[:, None]
            image, broken = forward(factor, lowest, wanted.to(factor.device))
            square, lost = torch.stack(
                [norm(image.to(torch.float64)).square(), broken.double()]
            ).cpu()
            ok = ok & (lost == 0)
            value = torch.where(wanted, square, value)
        upper = (value.sqrt() + slack).square() if factor.rows >= factor.size else value
        lower = torch.where(
            self._lower > 0, (self._lower.sqrt() - slack).clamp_min(0).square(), 0.0
        )
        lost = torch.where(ok, 0.0, math.nan)
        return Ends(
            lambda_max=self._top + lost,
            residual=self._residual + lost,
            converged=self._converged & ok,
            smallest=value + lost,
            lower=torch.minimum(lower, value) + lost,
            upper=upper + lost,
            floor=self._floor,
            sharp=self._sharp & ok,
            matvecs=chain.steps,
            leading=tuple(
                (values.to(factor.device), vectors)
                for (values, _), vectors in zip(self._leading, leading, strict=True)
            ),
        )


def _lifted(
    chain: Bidiagonalisation, coordinates: list[Float[Tensor, "k m"]]
) -> list[Float[Tensor, "n m"]]:
    """Vectors of each sample from their coordinates in its basis."""
    rows, columns = (max(c.shape[i] for c in coordinates) for i in (0, 1))
    padded = torch.zeros(len(coordinates), columns, rows, dtype=torch.float64)
    for into, c in zip(padded, coordinates, strict=True):
        into[: c.shape[1], : len(c)] = c.mT
    vectors = torch.bmm(padded.to(chain.vectors.device), chain.vectors[:, :rows])
    return [v[: c.shape[1]].mT for v, c in zip(vectors, coordinates, strict=True)]
