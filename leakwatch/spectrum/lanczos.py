"""A few extreme eigenvalues from products alone, by the Lanczos method."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from leakwatch.spectrum._krylov import KrylovBasis
from leakwatch.spectrum._ritz import RitzRecord
from leakwatch.spectrum.operators import (
    SymmetricOperator,
    as_operator,
    own_generator,
)
from leakwatch.spectrum.result import DEFAULT_TOL, Spectrum


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
    k = min(k, operator.size)
    basis = KrylovBasis(operator, limit, own_generator(generator))
    record = RitzRecord(
        operator, k=k, both=which == "both", tol=tol, eigenvectors=eigenvectors
    )
    active = torch.ones_like(basis.failed)
    nowhere = torch.zeros_like(active)
    newest = nowhere
    look = 1
    for step in range(1, limit + 1):
        basis.expand(active)
        active = active & ~basis.failed
        if step < min(look, limit) and not bool((basis.stuck & active).any()):
            basis.advance(active, start=nowhere, newest=newest)
            continue
        # The projected problem costs step³. Looking at every eighth part of growth
        # keeps that below the products, for at most an eighth more of them.
        look = step + max(1, step // 8)
        verdict = record.assess(basis, active)
        active = active & ~verdict.done
        if step == limit or not bool(active.any()):
            break
        newest = verdict.newest
        basis.advance(active, start=verdict.exhausted, newest=newest)
    return record.close(basis)


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
