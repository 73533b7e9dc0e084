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

    Attributes:
        lambda_max: λ_1, float64; NaN for a failed sample.
        residual: ‖Hu − λ_1u‖, absolute.
        converged: whether that residual met the tolerance.
        smallest: ‖J y‖² for a unit vector y that J nearly annuls: λ_min if converged.
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
    wanted = [smallest] * batch if isinstance(smallest, bool) else smallest.tolist()
    samples = [_SampleEnds(factor, w, tol, limit, risk) for w in wanted]
    active = torch.ones(batch, dtype=torch.bool, device=factor.device)
    look = 1
    for step in range(1, limit + 1):
        chain.step(active)
        active = active & ~chain.failed
        if step < min(look, limit) and not bool((chain.closed & active).any()):
            continue
        # The small problem costs step³: looking less often keeps it below the products.
        look = step + max(1, step // 8)
        for i in active.nonzero().flatten().tolist():
            active[i] = not samples[i].assess(chain, i) and step < limit
        if not bool(active.any()):
            break
    return _close(factor, chain, samples)


@final
class _SampleEnds:
    """The ends of one sample's spectrum as far as its steps went."""

    def __init__(
        self,
        factor: FactorOperator,
        smallest: bool,
        tol: float,
        limit: int,
        risk: float,
    ) -> None:
        self._n, self._smallest, self._tol = factor.size, smallest, tol
        self._limit, self._risk = limit, risk
        self._eps = float(torch.finfo(factor.dtype).eps)
        self._deficient = factor.rows < factor.size
        self.top, self.residual = math.nan, math.nan
        self.converged = self.sharp = False
        self.lower = 0.0
        self.floor = math.nan
        self.lowest: Tensor = torch.zeros(0, dtype=torch.float64)
        self.leading: Tensor = self.lowest
        self.coordinates: Tensor = self.lowest[:, None]

    def assess(self, chain: Bidiagonalisation, i: int) -> bool:
        """Read the bidiagonal matrix; whether the sample is done."""
        wide = chain.upper(i)
        k = len(wide)
        left, sigma, right = torch.linalg.svd(wide[:, :k])
        rest = float(wide[-1, -1])
        self.top = float(sigma[0]) ** 2
        residuals = sigma * rest * left[-1].abs()
        # Products carry rounding of their own, which no recurrence sees.
        self.residual = float(residuals[0]) + self._eps * self.top
        closed = bool(chain.closed[i])
        self.converged = closed or self.residual <= self._tol * self.top
        self.floor = self._n * self._eps**2 * self.top
        self.lowest = right[-1]
        good = (residuals <= _LEADING_RESIDUAL * sigma.square())[:_LEADING]
        count = int(good.long().cumprod(0).sum())
        self.leading, self.coordinates = sigma[:count].square(), right[:count].mT
        if not self._deficient:
            self._bound(wide, sigma, k)
        low = float(sigma[-1]) ** 2
        self.sharp = (
            self._deficient
            or low <= self.floor
            or low - self.lower <= _SHARP * low
            or k == self._n
        )
        hopeless = low * float(self._limit) ** 2 < self.top and self._limit < self._n
        enough = not self._smallest or self.sharp or hopeless
        return closed or (self.converged and enough)

    def _bound(self, wide: Tensor, sigma: Tensor, k: int) -> None:
        if k == self._n:
            self.lower = float(sigma[-1]) ** 2
            return
        # A remainder below rounding may hide as much as rounding.
        noise = self._eps * float(sigma[0])
        diagonal, above = wide.diagonal(), wide.diagonal(1)
        couplings = diagonal * above.clamp_min(noise)
        bound = probable_lower_bound(sigma.square(), couplings, self._n, self._risk)
        self.lower = max(self.lower, min(bound, float(sigma[-1]) ** 2))


def _close(
    factor: FactorOperator, chain: Bidiagonalisation, samples: list[_SampleEnds]
) -> Ends:
    device = factor.device

    def column(name: str) -> Tensor:
        numbers = [float(getattr(s, name)) for s in samples]
        return torch.tensor(numbers, dtype=torch.float64, device=device)

    def lifted(i: int, coordinates: Tensor) -> Tensor:
        basis = chain.vectors[i, : len(coordinates)]
        return basis.mT @ coordinates.to(device)

    ok = ~chain.failed
    lowest = torch.stack([lifted(i, s.lowest) for i, s in enumerate(samples)])
    lowest = lowest / norm(lowest).clamp_min(0.5)[:, None]
    top, floor, lower = column("top"), column("floor"), column("lower")
    slack = floor.sqrt()
    value = upper = torch.zeros_like(top)
    if factor.rows >= factor.size:
        image, broken = forward(factor, lowest, ok)
        ok = ok & ~broken
        value = norm(image.to(torch.float64)).square()
        upper = (value.sqrt() + slack).square()
    lower = torch.where(lower > 0, (lower.sqrt() - slack).clamp_min(0).square(), 0.0)
    lost = torch.where(ok, 0.0, math.nan)
    return Ends(
        lambda_max=top + lost,
        residual=column("residual") + lost,
        converged=(column("converged") > 0) & ok,
        smallest=value + lost,
        lower=torch.minimum(lower, value) + lost,
        upper=upper + lost,
        floor=floor,
        sharp=(column("sharp") > 0) & ok,
        matvecs=chain.steps,
        leading=tuple(
            (s.leading.to(device), lifted(i, s.coordinates))
            for i, s in enumerate(samples)
        ),
    )
