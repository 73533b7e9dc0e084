"""A few extreme eigenvalues from products alone, by the Lanczos method."""

from __future__ import annotations

import math
from typing import Literal, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from leakwatch.spectrum.exact import eigh_or_nan
from leakwatch.spectrum.operators import (
    SymmetricOperator,
    as_operator,
    norm,
    orthogonalise,
    own_generator,
    product,
    random_vector,
)
from leakwatch.spectrum.result import (
    DEFAULT_TOL,
    Spectrum,
    clamp_rounding,
    precision_floor,
)

_BREAKDOWN = 100.0
"""A remainder below this many eps · ‖H‖ is rounding: the subspace is invariant."""


def lanczos(
    a: Tensor | SymmetricOperator,
    *,
    k: int = 1,
    which: Literal["largest", "both"] = "largest",
    tol: float = DEFAULT_TOL,
    max_matvecs: int | None = None,
    generator: torch.Generator | None = None,
    eigenvectors: bool = False,
) -> Spectrum:
    """Estimate the k largest eigenvalues, on request the smallest, from products.

    Lanczos (1950) with full re-orthogonalisation, so that no eigenvalue comes twice
    unless it is there twice; about ten products give λ_1 to 1e-8. Samples run in one
    batch and stop one by one: a finished sample is passed as inactive.

    *Multiple eigenvalues.* One chain of products finds every distinct eigenvalue
    once. For k > 1 the solver therefore starts a second chain, orthogonal to the first,
    when the first has settled, and goes on until the largest eigenvalue of what is
    left is known not to belong among the k. Until then only λ_1 counts as converged.
    An invariant subspace (identity, rank one, zero) ends a chain early and is treated
    the same way.

    *The smallest eigenvalue* is found last: `smallest` is an upper bound of λ_n, and a
    residual that is small against λ_1 says nothing about it. It counts as converged
    only with residual ≤ tol · |λ_n|, or when both lie below the floor. Often that
    takes all n products; `exact` is then cheaper.

    *What it can't see*: an eigenvector orthogonal to the starting vector, which has
    probability zero for a random one, and one nearly so, which delays convergence.

    Args:
        a: matrices (n, n) or (batch, n, n), float32 or float64, or an operator.
        k: how many of the largest eigenvalues; n when that is fewer.
        which: "largest", or "both" for the smallest eigenvalue in addition.
        tol: an eigenvalue among the largest is converged when ‖Hu − λu‖ ≤ tol · λ_1.
            With float32 products values below 1e-6 are seldom reached: the sample
            stops once the products' own rounding dominates, unconverged.
        max_matvecs: most products per sample, never more than n. Default: 100 or 3k,
            with "both" 300 or 3k, whichever is larger.
        generator: source of starting vectors; default: a fresh one, equal each time.
            The global random state is not used.
        eigenvectors: also return the vectors, (batch, n, k), unit columns.

    Returns:
        `Spectrum`. ``residuals`` are of the products as computed: they need no further
        product, and contain the products' rounding. An eigenvalue that was not
        found before ``max_matvecs`` is NaN, as is every one of a sample with a product
        that was not finite; the other samples don't notice. ``complete`` only when
        all n were found and converged. Memory: 8 · n · products bytes a sample.

    Raises:
        TypeError: ``a`` is neither a tensor nor an operator.
        ValueError: a bad matrix, ``k < 1``, ``tol <= 0``, ``max_matvecs < 1``, or an
            unknown ``which``.

    Example:
        >>> import torch
        >>> h = torch.diag(torch.tensor([4.0, 4.0, 1.0], dtype=torch.float64))
        >>> lanczos(h, k=2).eigenvalues.round(decimals=9)
        tensor([[4., 4.]], dtype=torch.float64)
    """
    operator = as_operator(a)
    limit = _check(operator, k, which, tol, max_matvecs)
    basis = _Basis(operator, own_generator(generator))
    k = min(k, operator.size)
    both = which == "both"
    samples = [_RitzValues(basis, i, k, both, tol) for i in range(operator.batch_size)]
    active = torch.ones_like(basis.failed)
    lane = torch.zeros_like(basis.matvecs)
    look = 1
    for step in range(1, limit + 1):
        basis.step(lane, active)
        active = active & ~basis.failed
        closed = ~basis.open.gather(1, lane[:, None])[:, 0]
        if step < min(look, limit) and not bool((closed & active).any()):
            continue
        # The projected problem costs step³. Looking at every eighth part of growth
        # keeps that below the products, for at most an eighth more of them.
        look = step + max(1, step // 8)
        for i in active.nonzero().flatten().tolist():
            samples[i].assess()
            active[i] = not samples[i].done
            if step < limit and not samples[i].done:
                lane[i] = samples[i].next_lane()
                look = step + 1 if samples[i].checks else look
        if not bool(active.any()):
            break
    return _close(basis, samples, k, both, eigenvectors)


def _check(
    operator: SymmetricOperator,
    k: int,
    which: str,
    tol: float,
    max_matvecs: int | None,
) -> int:
    if k < 1:
        raise ValueError(f"k is {k}, expected at least 1 eigenvalue; give e.g. k=1")
    if which not in ("largest", "both"):
        raise ValueError(
            f"which is {which!r}, expected 'largest' or 'both' (largest and smallest); "
            "for the whole spectrum use exact()"
        )
    if not 0 < tol < 1:
        raise ValueError(
            f"tol is {tol}, expected a relative residual between 0 and 1; give e.g. "
            f"tol={DEFAULT_TOL}"
        )
    if max_matvecs is None:
        max_matvecs = max(100 if which == "largest" else 300, 3 * k)
    if max_matvecs < 1:
        raise ValueError(
            f"max_matvecs is {max_matvecs}, expected at least 1 product; give e.g. "
            "max_matvecs=100, or None for the default"
        )
    return min(max_matvecs, operator.size)


@final
class _Basis:
    """Orthonormal vectors of each sample, with H Q = Q M + W C.

    The rows of Q have been multiplied by H; those of W, one for each chain or *lane* of
    products q, Hq, H²q, …, wait for it. Products are orthogonalised against all of
    them, and all coefficients are kept, so that the equation holds to float64 rounding
    for the products as they were computed. Residuals follow from M and C without
    further products, and include the rounding, and any asymmetry, of the operator.

    Vectors are float64 even when the products are float32. Products rounded to float32
    perturb H by about eps32 · λ_1, which nothing downstream can repair; but a float32
    basis would lose orthogonality as well, and with it the guarantee that an eigenvalue
    doesn't come twice. Memory: 8 · m · n bytes a sample.

    All samples take their steps together and draw the same random vectors, so that a
    sample's result does not depend on which others are in its batch.

    Attributes:
        vectors: Q, (batch, m, n).
        projected: M, (batch, m, m).
        waiting: W, (batch, lanes, n); zero where a lane is closed.
        coupling: C, (batch, lanes, m). A remainder that is rounding closes its lane and
            counts here all the same.
        open: lanes that can go on.
        failed: samples with a product that was not finite.
        matvecs: products spent on each sample.
    """

    def __init__(self, operator: SymmetricOperator, generator: torch.Generator) -> None:
        batch, n, device = operator.batch_size, operator.size, operator.device
        self.operator = operator
        self._generator = generator
        self._draws: list[Tensor] = []
        self._eps = float(torch.finfo(operator.dtype).eps)
        self.vectors: Float[Tensor, "batch m n"] = torch.zeros(
            batch, 0, n, dtype=torch.float64, device=device
        )
        self.projected: Float[Tensor, "batch m m"] = self.vectors[:, :, :0]
        self.waiting: Float[Tensor, "batch lanes n"] = self.vectors
        self.coupling: Float[Tensor, "batch lanes m"] = self.projected
        self.open: Bool[Tensor, "batch lanes"] = self.vectors[:, :, 0] > 0
        self._largest = self.vectors.new_zeros(batch)
        self.failed: Bool[Tensor, " batch"] = self._largest > 0
        self.matvecs: Int[Tensor, " batch"] = self.failed.to(torch.int64)
        for i in range(batch):
            self.start(i, 0)

    def start(self, sample: int, lane: int) -> None:
        """Start a chain of one sample from a random vector orthogonal to its others."""
        if lane == self.open.shape[1]:
            self.waiting, self.coupling, self.open = (
                torch.cat([t, t.new_zeros(len(t), 1, *t.shape[2:])], 1)
                for t in (self.waiting, self.coupling, self.open)
            )
        while len(self._draws) <= lane:
            drawn = random_vector(self.operator.size, self._generator)
            self._draws.append(drawn.to(self.vectors.device))
        start = self._draws[lane][None]
        others = torch.cat([self.vectors[sample], self.waiting[sample]])[None]
        for _ in range(2):
            # Orthogonality is relative to what survives, little near the last vector.
            start, _ = orthogonalise(start, others)
            start = start / norm(start)[:, None]
        self.waiting[sample, lane] = start[0]
        self.open[sample, lane] = True

    def step(self, lane: Int[Tensor, " batch"], active: Bool[Tensor, " batch"]) -> None:
        """Multiply the vector that waits in a lane of each active sample."""
        m, every = self.vectors.shape[1], torch.arange(len(lane), device=lane.device)
        self.matvecs += active
        q = self.waiting[every, lane]
        self.waiting[every, lane] = 0.0
        self.vectors = torch.cat([self.vectors, q[:, None]], dim=1)
        w, failed = product(self.operator, q, active)
        self.failed = self.failed | failed
        self._largest = torch.maximum(self._largest, norm(w))
        w, parts = orthogonalise(w, torch.cat([self.vectors, self.waiting], dim=1))
        rest = norm(w)

        wider = self.projected.new_zeros(len(lane), m + 1, m + 1)
        wider[:, :m, :m] = self.projected
        self.projected = wider
        self.projected[:, :, m] = parts[:, : m + 1]
        self.projected[:, m, :m] = self.coupling[every, lane]
        self.coupling[every, lane] = 0.0
        self.coupling = torch.cat([self.coupling, parts[:, m + 1 :, None]], dim=2)
        self.coupling[every, lane, m] = rest

        on = active & ~failed & (rest > _BREAKDOWN * self._eps * self._largest)
        self.open[every, lane] = on
        w = w / torch.where(rest > 0, rest, 1.0)[:, None]
        self.waiting[every, lane] = torch.where(on[:, None], w, 0.0)


@final
class _RitzValues:
    """The eigenvalues of one sample as far as its products went.

    One chain holds one copy of each eigenvalue. A chain that starts at random,
    orthogonal to everything before, finds the largest of what is missing first; its
    largest eigenvalue, once known, bounds what is still missing.
    """

    def __init__(
        self, basis: _Basis, place: int, k: int, both: bool, tol: float
    ) -> None:
        self._basis, self._place = basis, place
        self._k, self._both, self._tol = k, both, tol
        self._eps = float(torch.finfo(basis.operator.dtype).eps)
        self._newest, self._began = 0, 0
        # The first chain has nothing to say about what it misses.
        self._told, self._missing = True, math.inf
        # Lanes that waited when the newest chain began, which is orthogonal to them:
        # rounding makes a missing copy grow there, where no chain would find it.
        self._unheard: list[int] = []
        self.checks = False
        self._wanted: Tensor = torch.zeros(0, 0)
        self._incomplete = self.done = False
        missing = torch.full((k,), math.nan, dtype=torch.float64)
        self.values, self.residuals = missing, missing.clone()
        self.converged = torch.zeros(k, dtype=torch.bool)
        self.floor = self.smallest = self.smallest_residual = math.nan
        self.smallest_converged = False
        self.coordinates: Float[Tensor, "m k"] = missing[:0, None]

    def assess(self) -> None:
        """Read the eigenvalues off the projected operator; say whether that is all."""
        n = self._basis.operator.size
        projected = self._basis.projected[self._place].cpu()
        coupling = self._basis.coupling[self._place].cpu()
        ascending, columns = eigh_or_nan(0.5 * projected + 0.5 * projected.mT)
        values, vectors = ascending.flip(0), columns.flip(1)
        m, k = len(values), min(self._k, len(values))
        # The residual inside the basis is rounding; that outside, more products reduce.
        inner = norm(projected @ vectors - vectors * values, dim=0)
        outer = norm(coupling @ vectors, dim=0)
        residuals = torch.hypot(inner, outer)
        scale = float(values.abs().amax())
        slack = self._tol * scale

        settled = bool((outer <= inner.clamp_min(slack))[:k].all())
        self._hear_newest(projected, coupling, scale, float(values[k - 1]))
        placed = values[:k] >= self._missing - slack
        placed[0] = True
        if m == n:
            placed[:] = True
        self.values[:k], self.residuals[:k] = values[:k], residuals[:k]
        self.converged[:k] = placed & (residuals[:k] <= slack)
        self.coordinates = vectors[:, :k]
        self.floor = float(precision_floor(values.abs().amax(), n, self._eps))
        finished = settled and bool(placed.all()) and m >= self._k
        still = self._basis.open[self._place].tolist()
        self._unheard = [lane for lane in self._unheard if still[lane]]
        self.checks = finished and bool(self._unheard)
        finished &= not self._unheard
        self._incomplete = settled and not bool(placed.all()) and m >= self._k
        self._wanted = vectors[:, :k]
        if self._both:
            self._wanted = torch.cat([self._wanted, vectors[:, -1:]], dim=1)
            finished &= self._assess_smallest(
                *(float(t[-1]) for t in (values, inner, outer, residuals))
            )
        self.done = finished or m == n

    def _hear_newest(
        self, projected: Tensor, coupling: Tensor, scale: float, last: float
    ) -> None:
        """Bound what is missing by the largest eigenvalue of the newest chain.

        It is known when its residual is small, or small against its distance to the
        last of the k values, which it then can't overtake.
        """
        if self._told:
            return
        own = projected[self._began :, self._began :]
        ascending, columns = eigh_or_nan(0.5 * own + 0.5 * own.mT)
        largest = float(ascending[-1])
        rest = float((coupling[self._newest, self._began :] @ columns[:, -1]).abs())
        closed = not bool(self._basis.open[self._place, self._newest])
        if closed or rest <= max(self._tol * scale, 1e-3 * (last - largest)):
            self._told = True
            # What a later chain leaves over is part of what an earlier one left over.
            self._missing = min(self._missing, largest)

    def _assess_smallest(
        self, value: float, inner: float, outer: float, residual: float
    ) -> bool:
        relative = self._tol * abs(value)
        self.smallest, self.smallest_residual = value, residual
        self.smallest_converged = residual <= relative or (
            abs(value) <= self.floor and residual <= self.floor
        )
        negligible = abs(value) + outer <= self.floor
        return negligible or outer <= max(relative, inner)

    def next_lane(self) -> int:
        """Where to go on: a new chain, the newest, or the one that is wanted most."""
        ready = self._basis.open[self._place]
        m, waiting = self._basis.vectors.shape[1], int(ready.sum())
        room = m + waiting < self._basis.operator.size
        if waiting == 0 or (self._incomplete and self._told and room):
            self._newest, self._told, self._began = self._newest + 1, False, m
            self._unheard = ready.nonzero().flatten().tolist()
            self._basis.start(self._place, self._newest)
        elif self.checks:
            return self._unheard.pop()
        elif self._told:
            reach = self._basis.coupling[self._place].cpu() @ self._wanted
            return int(norm(reach).masked_fill(~ready.cpu(), -1.0).argmax())
        return self._newest


def _close(
    basis: _Basis, samples: list[_RitzValues], k: int, both: bool, eigenvectors: bool
) -> Spectrum:
    """The result; a sample with a failed product has NaN only."""
    device, failed = basis.vectors.device, basis.failed

    def gathered(name: str, lost: float = math.nan) -> Tensor:
        each = [torch.as_tensor(getattr(s, name), dtype=torch.float64) for s in samples]
        column = torch.stack(each).to(device)
        column[failed] = lost
        return column

    def converged(name: str) -> Tensor:
        return gathered(name, lost=0.0) > 0

    values, floor = gathered("values"), gathered("floor")
    settled = converged("converged")
    vectors = None
    if eigenvectors:
        vectors = basis.vectors.new_full(
            (len(samples), basis.operator.size, k), math.nan
        )
        for i, s in enumerate(samples):
            m, columns = s.coordinates.shape
            lifted = basis.vectors[i, :m].mT @ s.coordinates.to(device)
            vectors[i, :, :columns] = lifted
        vectors[failed] = math.nan
    smallest = smallest_residual = smallest_converged = None
    if both:
        smallest = clamp_rounding(gathered("smallest"), floor)
        smallest_residual = gathered("smallest_residual")
        smallest_converged = converged("smallest_converged")
    return Spectrum(
        eigenvalues=clamp_rounding(values, floor[:, None]),
        residuals=gathered("residuals"),
        converged=settled,
        matvecs=basis.matvecs,
        floor=floor,
        complete=k == basis.operator.size and bool(settled.all()),
        method="lanczos",
        eigenvectors=vectors,
        smallest=smallest,
        smallest_residual=smallest_residual,
        smallest_converged=smallest_converged,
    )
