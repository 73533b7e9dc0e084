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

    One chain q, Hq, H²q, … holds one copy of each eigenvalue. A second chain is started
    from a random vector orthogonal to all before, and the first one waits: its newest
    product has a remainder outside the basis, kept in a *lane* of its own until it is
    that lane's turn. ``loose`` is the length of the remainder of every vector that has
    one, waiting or, where it is rounding, dropped.

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
        self._largest: Float[Tensor, " batch"] = home.new_zeros(batch)
        self.failed: Bool[Tensor, " batch"] = self._largest > 0
        self.matvecs: Int[Tensor, " batch"] = torch.zeros_like(
            self.failed, dtype=torch.int64
        )
        self.chain_start: Int[Tensor, " batch"] = torch.zeros_like(self.matvecs)
        self._draws_used: Int[Tensor, " batch"] = torch.ones_like(self.matvecs)
        # Lane 0 is open from the start; -1 in owner: nothing waits in this lane.
        self._waiting: Float[Tensor, "batch lanes n"] = home.new_zeros(batch, 1, n)
        self._owner: Int[Tensor, "batch lanes"] = self.matvecs[:, None] - 1
        self._lane: Int[Tensor, " batch"] = torch.zeros_like(self.matvecs)
        self._newest: Int[Tensor, " batch"] = torch.zeros_like(self.matvecs)
        first = self._draw(0)
        self.vectors[:, 0] = (first / norm(first)).expand(batch, n)

    @property
    def stuck(self) -> Bool[Tensor, " batch"]:
        """Where no chain can go on: the basis spans an invariant subspace."""
        return (self._owner < 0).all(1)

    def expand(self, active: Bool[Tensor, " batch"]) -> None:
        """Multiply the newest vector by H and project; one product per active sample.

        A sample whose product is not finite joins ``failed``.
        """
        j = self.size
        self.size += 1
        self.matvecs += active
        q = self.vectors[:, : j + 1]
        w, failed = product(self._operator, q[:, j], active)
        self.failed = self.failed | failed
        self._largest = torch.maximum(self._largest, norm(w))
        w, column = orthogonalise(w, q)
        self.projected[:, : j + 1, j] = column
        self._catch(j)
        self.loose[:, j] = norm(w)
        every = torch.arange(len(w), device=w.device)
        self._waiting[every, self._lane] = w
        self._owner[every, self._lane] = torch.where(
            self.loose[:, j] > self._rounding(), j, -1
        )

    def _rounding(self) -> Float[Tensor, " batch"]:
        return BREAKDOWN * self._eps * self._largest

    def _catch(self, j: int) -> None:
        # What vector j catches of a remainder still outside the basis is known by
        # symmetry. Rounding bounds how much can be written off: without ``doubt``,
        # loose² − caught² would cancel to nothing at √eps of what is really left.
        caught = self.projected[:, :j, j]
        loose = self.loose[:, :j]
        outside = loose > 0
        row = self.projected[:, j, :j]
        self.projected[:, j, :j] = torch.where(outside, caught, row)
        safe = torch.where(outside, loose, 1.0)
        doubt = 20.0 * self._eps * self._largest[:, None] / safe
        left = 1.0 - (caught / safe).square() + doubt
        self.loose[:, :j] = loose * left.clamp(0.0, 1.0).sqrt()

    def advance(
        self,
        active: Bool[Tensor, " batch"],
        start: Bool[Tensor, " batch"],
        newest: Bool[Tensor, " batch"],
    ) -> None:
        """Set the next vector.

        Args:
            active: samples that go on.
            start: where a new chain starts; where nothing can go on, one does anyway.
            newest: where the newest chain goes on as long as it can, rather than the
                one that has waited longest.
        """
        j = self.size
        if j == self.vectors.shape[1]:
            self._grow()
        every = torch.arange(len(active), device=active.device)
        never = torch.iinfo(torch.int64).max
        waited = torch.where(self._owner < 0, never, self._owner)
        lane = waited.argmin(1)
        ready = self._owner[every, self._newest] >= 0
        lane = torch.where(newest & ready, self._newest, lane)
        owner = self._owner[every, lane]
        following = self._waiting[every, lane]
        if self._owner.shape[1] > 1:
            following, _ = orthogonalise(following, self.vectors[:, :j])
        length = norm(following)
        # A remainder may have been caught entirely by other chains while it waited.
        go_on = active & ~start & (owner >= 0) & (length > self._rounding())
        fresh = active & ~go_on
        following = following / torch.where(length > 0, length, 1.0)[:, None]
        self.vectors[:, j] = torch.where(go_on[:, None], following, 0.0)

        moved = go_on.nonzero().flatten()
        self.projected[moved, j, owner[moved]] = length[moved]
        self.loose[moved, owner[moved]] = 0.0
        self._owner[moved, lane[moved]] = -1
        self._lane = lane
        if bool(fresh.any()):
            self._start(fresh.nonzero().flatten())

    def _start(self, which: Int[Tensor, " some"]) -> None:
        j = self.size
        drawn = torch.stack([self._draw(int(i)) for i in self._draws_used[which]])
        self._draws_used[which] += 1
        for _ in range(2):
            # Orthogonality is relative to what survives, little near the last vector.
            drawn, _ = orthogonalise(drawn, self.vectors[which, :j])
            drawn = drawn / norm(drawn)[:, None]
        self.vectors[which, j] = drawn
        self.chain_start[which] = j

        free = self._owner[which] < 0
        if not bool(free.any(1).all()):
            batch, _, n = self._waiting.shape
            none = self._owner.new_full((batch, 1), -1)
            self._owner = torch.cat([self._owner, none], dim=1)
            room = self._waiting.new_zeros(batch, 1, n)
            self._waiting = torch.cat([self._waiting, room], dim=1)
            free = self._owner[which] < 0
        lane = free.to(torch.int64).argmax(1)
        self._lane[which] = lane
        self._newest[which] = lane

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


def orthogonalise(
    w: Float[Tensor, "batch n"], q: Float[Tensor, "batch m n"]
) -> tuple[Float[Tensor, "batch n"], Float[Tensor, "batch m"]]:
    """Return w minus its part in the rows of q, and the coefficients of that part."""
    coefficients = w.new_zeros(q.shape[:2])
    for _ in range(_PASSES):
        part = torch.bmm(q, w.unsqueeze(2))
        w = torch.baddbmm(w.unsqueeze(1), part.mT, q, alpha=-1.0).squeeze(1)
        coefficients = coefficients + part.squeeze(2)
    return w, coefficients
