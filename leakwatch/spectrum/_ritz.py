"""Reading eigenvalues off a Krylov basis: how far each is right, and when to stop."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from leakwatch.spectrum._krylov import KrylovBasis
from leakwatch.spectrum.exact import eigh_or_nan
from leakwatch.spectrum.operators import SymmetricOperator, norm
from leakwatch.spectrum.result import Spectrum, clamp_rounding, precision_floor


@final
@dataclass
class RitzPairs:
    """Eigenpairs of the projected operator, descending; rows are active samples."""

    values: Float[Tensor, "active m"]
    vectors: Float[Tensor, "active m m"]
    inner: Float[Tensor, "active m"]  # residual inside the basis: rounding
    outer: Float[Tensor, "active m"]  # residual outside: what more products reduce
    scale: Float[Tensor, " active"]

    @classmethod
    def of(cls, basis: KrylovBasis, index: Tensor) -> RitzPairs:
        """Solve the projected problem of the samples at ``index``, on the CPU."""
        m = basis.size
        projected = basis.projected[index, :m, :m].cpu()
        loose = basis.loose[index, :m].cpu()
        ascending, columns = eigh_or_nan(0.5 * projected + 0.5 * projected.mT)
        values, vectors = ascending.flip(1), columns.flip(2)
        inside = projected @ vectors - vectors * values[:, None]
        return cls(
            values=values,
            vectors=vectors,
            inner=norm(inside, dim=1),
            outer=(loose[:, :, None] * vectors.abs()).sum(1),
            scale=values.abs().amax(1),
        )

    def residuals(self) -> Float[Tensor, "active m"]:
        """Return ‖Hu − λu‖; the two parts are orthogonal."""
        return torch.hypot(self.inner, self.outer)


@final
@dataclass(frozen=True)
class Verdict:
    """How each sample goes on; False for samples that were not assessed."""

    done: Bool[Tensor, " batch"]
    exhausted: Bool[Tensor, " batch"]
    """The chains have settled, and yet an eigenvalue may be missing: start another."""
    newest: Bool[Tensor, " batch"]
    """The newest chain has still to say what was missing: let it go first."""


@final
class RitzRecord:
    """Decides per sample when to stop, and keeps the last assessment of each.

    Args:
        operator: H, for its sizes and arithmetic.
        k: how many of the largest eigenvalues are wanted, at most n.
        both: whether the smallest is wanted as well.
        tol: residual at which an eigenvalue counts as converged, relative.
        eigenvectors: whether ``close`` returns them.
    """

    def __init__(
        self,
        operator: SymmetricOperator,
        *,
        k: int,
        both: bool,
        tol: float,
        eigenvectors: bool,
    ) -> None:
        batch = operator.batch_size
        self._k, self._both, self._tol = k, both, tol
        self._eigenvectors = eigenvectors
        self._n = operator.size
        self._device = operator.device
        self._eps = float(torch.finfo(operator.dtype).eps)
        missing = torch.full((batch, k), math.nan, dtype=torch.float64)
        self._values, self._residuals = missing, missing.clone()
        self._converged = torch.zeros(batch, k, dtype=torch.bool)
        self._smallest = missing[:, 0].clone()
        self._smallest_residual = missing[:, 0].clone()
        self._smallest_converged = self._converged[:, 0].clone()
        self._floor = missing[:, 0].clone()
        self._bound = torch.full((batch,), math.inf, dtype=torch.float64)
        self._known_of = torch.zeros(batch, dtype=torch.int64)
        self._coordinates: list[tuple[Tensor, Tensor]] = []

    def assess(self, basis: KrylovBasis, active: Bool[Tensor, " batch"]) -> Verdict:
        """Record the state of the active samples and say how each goes on."""
        nowhere = torch.zeros_like(active)
        verdict = Verdict(nowhere, nowhere.clone(), nowhere.clone())
        index = active.nonzero().flatten()
        if len(index) == 0:
            return verdict
        ritz = RitzPairs.of(basis, index)
        rows = index.cpu()
        m, k = basis.size, min(self._k, basis.size)
        everything = m == self._n
        slack = self._tol * ritz.scale

        # "Settled" compares only what more products can reduce with the tolerance.
        top = slice(0, k)
        still = ritz.outer[:, top] > torch.maximum(slack[:, None], ritz.inner[:, top])
        top_settled = ~still.any(1)
        known = self._bound_missing(basis, index, ritz)
        placed = ritz.values[:, top] >= (self._bound[rows] - slack)[:, None]
        placed[:, 0] = True
        if everything:
            placed[:] = True
        residuals = ritz.residuals()
        self._values[rows, :k] = ritz.values[:, top]
        self._residuals[rows, :k] = residuals[:, top]
        self._converged[rows, :k] = placed & (residuals[:, top] <= slack[:, None])
        self._floor[rows] = precision_floor(ritz.scale, self._n, self._eps)

        all_placed = placed.all(1) & (m >= self._k)
        finished = top_settled & all_placed
        if self._both:
            finished &= self._assess_smallest(rows, ritz, residuals[:, -1])
        # A chain has to be able to show k values before it can be found wanting; one
        # that can't because its subspace is invariant is stuck, and replaced anyway.
        first = (basis.chain_start[index] == 0).cpu()
        exhausted = top_settled & ~all_placed & (m >= self._k) & (first | known)
        verdict.done[index] = (finished | everything).to(self._device)
        verdict.exhausted[index] = exhausted.to(self._device)
        verdict.newest[index] = (exhausted | (~first & ~known)).to(self._device)
        if self._eigenvectors:
            self._coordinates.append((rows, ritz.vectors[:, :, top].clone()))
        return verdict

    def _bound_missing(
        self, basis: KrylovBasis, index: Tensor, ritz: RitzPairs
    ) -> Bool[Tensor, " active"]:
        """Bound the eigenvalues not found so far by the newest chain's largest.

        A chain that starts at random, orthogonal to everything before, finds the
        largest eigenvalue of the rest first. Known means: its residual is small, or
        small against its distance to the k-th value, which it then can't overtake.
        """
        rows, m = index.cpu(), basis.size
        start = basis.chain_start[index].cpu()
        known = (start > 0) & (self._known_of[rows] == start)
        ask = (start > 0) & ~known
        if self._k == 1 or not bool(ask.any()):
            return known
        projected = basis.projected[index, :m, :m].cpu()
        projected = 0.5 * projected + 0.5 * projected.mT
        old = torch.arange(m) < start[:, None]
        projected[old[:, :, None] | old[:, None, :]] = 0.0
        # Out of the way, below anything that the newest chain can hold.
        below = torch.where(old, -2.0 * ritz.scale[:, None], 0.0)
        values, vectors = eigh_or_nan(projected + torch.diag_embed(below))
        largest = values[:, -1]
        residual = (basis.loose[index, :m].cpu() * vectors[:, :, -1].abs()).sum(1)
        lead = ritz.values[:, min(self._k, m) - 1] - largest
        told = ask & (residual <= torch.maximum(self._tol * ritz.scale, 1e-3 * lead))
        self._known_of[rows] = torch.where(told, start, self._known_of[rows])
        # What a later chain leaves over is part of what an earlier one left over.
        bound = torch.where(told, largest, math.inf)
        self._bound[rows] = torch.minimum(self._bound[rows], bound)
        return known | told

    def _assess_smallest(
        self, rows: Tensor, ritz: RitzPairs, residual: Tensor
    ) -> Bool[Tensor, " active"]:
        value, outer = ritz.values[:, -1], ritz.outer[:, -1]
        floor = self._floor[rows]
        relative = self._tol * value.abs()
        self._smallest[rows] = value
        self._smallest_residual[rows] = residual
        self._smallest_converged[rows] = (residual <= relative) | (
            (value.abs() <= floor) & (residual <= floor)
        )
        negligible = value.abs() + outer <= floor
        return negligible | (outer <= torch.maximum(relative, ritz.inner[:, -1]))

    def close(self, basis: KrylovBasis) -> Spectrum:
        """Return the result; a sample with a failed product has NaN only."""
        failed = basis.failed.cpu()
        for tensor in (
            self._values,
            self._residuals,
            self._floor,
            self._smallest,
            self._smallest_residual,
        ):
            tensor[failed] = math.nan
        self._converged[failed] = False
        self._smallest_converged[failed] = False
        complete = self._k == self._n and bool(self._converged.all())
        vectors = self._vectors(basis) if self._eigenvectors else None

        def there(tensor: Tensor) -> Tensor:
            return tensor.to(self._device)

        return Spectrum(
            eigenvalues=there(clamp_rounding(self._values, self._floor[:, None])),
            residuals=there(self._residuals),
            converged=there(self._converged),
            matvecs=basis.matvecs,
            floor=there(self._floor),
            complete=complete,
            method="lanczos",
            eigenvectors=vectors,
            smallest=(
                there(clamp_rounding(self._smallest, self._floor))
                if self._both
                else None
            ),
            smallest_residual=there(self._smallest_residual) if self._both else None,
            smallest_converged=there(self._smallest_converged) if self._both else None,
        )

    def _vectors(self, basis: KrylovBasis) -> Float[Tensor, "batch n k"]:
        coordinates = torch.zeros(
            len(self._floor), basis.size, self._k, dtype=torch.float64
        )
        for rows, latest in self._coordinates:
            coordinates[rows] = 0.0
            coordinates[rows, : latest.shape[1], : latest.shape[2]] = latest
        vectors = torch.bmm(
            basis.vectors[:, : basis.size].mT, coordinates.to(self._device)
        )
        vectors.mT[torch.isnan(self._values).to(self._device)] = math.nan
        return vectors
