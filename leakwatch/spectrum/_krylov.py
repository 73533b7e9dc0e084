"""An orthonormal basis, grown one product at a time, and H projected on it."""

from __future__ import annotations

from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from leakwatch.spectrum.operators import (
    SymmetricOperator,
    norm,
    product,
    random_vector,
)

BREAKDOWN = 100.0
"""A remainder below this many eps · ‖H‖ is rounding: the subspace is invariant."""

_PASSES = 2
"""Gram-Schmidt passes: "twice is enough" (Giraud et al. 2005), also near breakdown."""


@final
class KrylovBasis:
    """Krylov vectors q_1 … q_m of a batch, with every coefficient of H q_j kept.

    The basis is float64 even when the products are float32. Products rounded to
    float32 perturb H by about eps32 · λ_1, which nothing downstream can repair; but a
    float32 basis would lose orthogonality as well, and with it the guarantee that an
    eigenvalue doesn't come twice. The cost is memory (8 · m · n bytes a sample).

    Because w = H q_j is orthogonalised against *all* of q_1 … q_j and the coefficients
    are kept, H Q = Q M + R holds to float64 rounding for the products as they were
    computed, R being orthogonal to Q. Residuals follow from M and R without further
    products, and include the rounding, and any asymmetry, of the operator.

    A chain can be cut: the next vector is then random, orthogonal to all before. What
    H q_j has outside the basis at a cut is remembered in ``loose``. Cuts are how a
    second copy of a multiple eigenvalue is found, since one chain holds exactly one.

    All samples share vector slots (the m-th product fills slot m − 1 of every active
    sample), and they draw the same random vectors, so that a sample's result does not
    depend on which others share its batch.

    Args:
        operator: H.
        limit: the most vectors that will be asked for, at most n.
        generator: source of the random vectors.
    """

    def __init__(
        self, operator: SymmetricOperator, limit: int, generator: torch.Generator
    ) -> None:
        batch, n = operator.batch_size, operator.size
        self._operator = operator
        self._limit = limit
        self._generator = generator
        self._draws: list[Tensor] = []
        self._eps = float(torch.finfo(operator.dtype).eps)
        self.size = 0
        home = torch.zeros(
            batch, min(limit, 16), n, dtype=torch.float64, device=operator.device
        )
        self.vectors: Float[Tensor, "batch slots n"] = home
        slots = home.shape[1]
        self.projected: Float[Tensor, "batch slots slots"] = home.new_zeros(
            batch, slots, slots
        )
        self.loose: Float[Tensor, "batch slots"] = home.new_zeros(batch, slots)
        self._remainder: Float[Tensor, "batch n"] = home.new_zeros(batch, n)
        self._largest: Float[Tensor, " batch"] = home.new_zeros(batch)
        self.tail: Float[Tensor, " batch"] = home.new_zeros(batch)
        self.failed: Bool[Tensor, " batch"] = self.tail > 0
        self.broken: Bool[Tensor, " batch"] = self.tail > 0
        self.cuts: Int[Tensor, " batch"] = torch.zeros_like(
            self.failed, dtype=torch.int64
        )
        self.chain_start: Int[Tensor, " batch"] = torch.zeros_like(self.cuts)
        self.matvecs: Int[Tensor, " batch"] = torch.zeros_like(self.cuts)
        first = self._draw(0)
        self.vectors[:, 0] = (first / norm(first)).expand(batch, n)

    def expand(self, active: Bool[Tensor, " batch"]) -> None:
        """Multiply the newest vector by H and project; one product per active sample.

        Sets ``tail`` (‖what H q has outside the basis‖), ``broken`` (that it is
        rounding) and ``failed`` (the product was not finite).
        """
        j = self.size
        self.size += 1
        self.matvecs += active
        q = self.vectors[:, : j + 1]
        w, failed = product(self._operator, q[:, j], active)
        self.failed = self.failed | failed
        self._largest = torch.maximum(self._largest, norm(w))
        w, column = _orthogonalise(w, q)
        self.projected[:, : j + 1, j] = column
        self._remainder = w
        self.tail = norm(w)
        self.broken = self.tail <= BREAKDOWN * self._eps * self._largest

        # A cut vector's product was dropped outside the basis of its time. What of it
        # the new vector catches is known by symmetry, and no longer outside. Rounding
        # of what was caught bounds how much can be written off: without that term
        # loose² − caught² would cancel to nothing at √eps of the true remainder.
        caught = self.projected[:, :j, j]
        loose = self.loose[:, :j]
        cut = loose > 0
        row = self.projected[:, j, :j]
        self.projected[:, j, :j] = torch.where(cut, caught, row)
        safe = torch.where(cut, loose, 1.0)
        doubt = 20.0 * self._eps * self._largest[:, None] / safe
        left = 1.0 - (caught / safe).square() + doubt
        self.loose[:, :j] = loose * left.clamp(0.0, 1.0).sqrt()

    def advance(
        self, active: Bool[Tensor, " batch"], cut: Bool[Tensor, " batch"]
    ) -> None:
        """Set the next vector: the remainder, or a random one where ``cut``."""
        j = self.size
        if j == self.vectors.shape[1]:
            self._grow()
        go_on = active & ~cut
        step = torch.where(self.tail > 0, self.tail, 1.0)
        following = torch.where(go_on[:, None], self._remainder / step[:, None], 0.0)
        self.projected[:, j, j - 1] = torch.where(go_on, self.tail, 0.0)
        self.loose[:, j - 1] = torch.where(cut, self.tail, 0.0)
        if bool(cut.any()):
            self.cuts += cut
            self.chain_start[cut] = j
            which = cut.nonzero().flatten()
            fresh = torch.stack([self._draw(int(c)) for c in self.cuts[which]])
            fresh, _ = _orthogonalise(fresh, self.vectors[which, :j])
            fresh = fresh / norm(fresh)[:, None]
            # Orthogonality is relative to what survives, little near the last vector.
            fresh, _ = _orthogonalise(fresh, self.vectors[which, :j])
            following[which] = fresh / norm(fresh)[:, None]
        self.vectors[:, j] = following

    def _draw(self, index: int) -> Tensor:
        while len(self._draws) <= index:
            drawn = random_vector(self._operator.size, self._generator)
            self._draws.append(drawn.to(self._operator.device))
        return self._draws[index]

    def _grow(self) -> None:
        old = self.size
        new = min(2 * old, self._limit)
        batch, _, n = self.vectors.shape
        vectors = self.vectors.new_zeros(batch, new, n)
        vectors[:, :old] = self.vectors
        projected = self.vectors.new_zeros(batch, new, new)
        projected[:, :old, :old] = self.projected
        loose = self.vectors.new_zeros(batch, new)
        loose[:, :old] = self.loose
        self.vectors, self.projected, self.loose = vectors, projected, loose


def _orthogonalise(
    w: Float[Tensor, "batch n"], q: Float[Tensor, "batch m n"]
) -> tuple[Float[Tensor, "batch n"], Float[Tensor, "batch m"]]:
    """Return w minus its part in the rows of q, and the coefficients of that part."""
    coefficients = w.new_zeros(q.shape[:2])
    for _ in range(_PASSES):
        part = torch.bmm(q, w.unsqueeze(2))
        w = torch.baddbmm(w.unsqueeze(1), part.mT, q, alpha=-1.0).squeeze(1)
        coefficients = coefficients + part.squeeze(2)
    return w, coefficients
