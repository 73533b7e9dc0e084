"""Power iteration, as the papers use it: a baseline, and a way to reproduce them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from leakwatch.spectrum.operators import (
    SymmetricOperator,
    as_operator,
    norm,
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


def power(
    a: Tensor | SymmetricOperator,
    *,
    iterations: int = 50,
    tol: float | None = None,
    smallest: bool = False,
    generator: torch.Generator | None = None,
) -> Spectrum:
    """Estimate λ_1 by power iteration, and λ_n by power iteration on λ_1 I − H.

    This is the recipe of the paper "LAVP" (section "Implementation of LAVP"), with
    exact products. For λ_1 it takes about five times the products of `lanczos`; for
    λ_n the result is an upper bound, on trained networks 20 to 100 times too large
    after a thousand products, and is nearly always not converged. It exists to
    reproduce published numbers: use `lanczos` for λ_1 and `exact` for λ_n.

    The value is a Rayleigh quotient: an eigenvalue lies within the residual of it, and
    once the vector has settled on an end of the spectrum, within residual² / gap. So it
    may be right to more digits than ``converged`` vouches for; a clustered spectrum
    gives ``False`` although the value is nearly right.
    On an indefinite operator the iteration finds the eigenvalue of largest *absolute*
    value, which need not be the largest.

    Args:
        a: matrices (n, n) or (batch, n, n), float32 or float64, or an operator.
        iterations: products for each end; 50 is what the papers use.
        tol: stop a sample once its residual is at most tol times the value. Default:
            don't stop early, and judge ``converged`` by 1e-6.
        smallest: also estimate λ_n, from a new starting vector.
        generator: source of starting vectors; default: a fresh one, equal each time.
            The global random state is not used.

    Returns:
        `Spectrum` with one eigenvalue per sample and, on request, ``smallest``, which
        counts as converged when λ_1 does, and its own residual is at most tol times
        *itself* or both lie below the floor. Values and residuals belong to the last
        product; none is added to get them. A sample with a product that was not finite
        has NaN and ``converged`` False; the other samples don't notice.

    Raises:
        TypeError: ``a`` is neither a tensor nor an operator.
        ValueError: a bad matrix, ``iterations < 1`` or ``tol <= 0``.

    Example:
        >>> import torch
        >>> h = torch.diag(torch.tensor([4.0, 1.0, 0.5], dtype=torch.float64))
        >>> power(h).lambda_max.round(decimals=9)
        tensor([4.], dtype=torch.float64)
    """
    operator = as_operator(a)
    if iterations < 1:
        raise ValueError(
            f"iterations is {iterations}, expected at least 1 product; give e.g. 50"
        )
    if tol is not None and not 0 < tol < 1:
        raise ValueError(
            f"tol is {tol}, expected a relative residual between 0 and 1; give e.g. "
            f"tol={DEFAULT_TOL}, or None to use all iterations"
        )
    generator = own_generator(generator)
    accept = DEFAULT_TOL if tol is None else tol
    n = operator.size
    active = torch.ones(operator.batch_size, dtype=torch.bool, device=operator.device)

    top = _iterate(operator, iterations, tol, generator, active, _plain)
    value, residual, matvecs = top
    eps = float(torch.finfo(operator.dtype).eps)
    floor = precision_floor(value.abs(), n, eps)
    low = low_residual = low_converged = None
    if smallest:
        shift = value[:, None]

        def shifted(v: Tensor, hv: Tensor) -> Tensor:
            return shift * v - hv

        ready = torch.isfinite(value)
        low, low_residual, more = _iterate(
            operator, iterations, tol, generator, ready, shifted
        )
        matvecs = matvecs + more
        # With λ_1 estimated too low, λ_1 I − H is largest at the wrong end and the
        # iteration settles there: in a cluster it would call λ_1 the smallest.
        low_converged = (residual <= accept * value.abs()) & (
            (low_residual <= accept * low.abs())
            | ((low.abs() <= floor) & (low_residual <= floor))
        )
        low = clamp_rounding(low, floor)
    return Spectrum(
        eigenvalues=clamp_rounding(value, floor)[:, None],
        residuals=residual[:, None],
        converged=(residual <= accept * value.abs())[:, None],
        matvecs=matvecs,
        floor=floor,
        complete=False,
        method="power",
        smallest=low,
        smallest_residual=low_residual,
        smallest_converged=low_converged,
    )


def _plain(v: Tensor, hv: Tensor) -> Tensor:
    return hv


def _iterate(
    operator: SymmetricOperator,
    iterations: int,
    tol: float | None,
    generator: torch.Generator,
    active: Bool[Tensor, " batch"],
    following: Callable[[Tensor, Tensor], Tensor],
) -> tuple[Float[Tensor, " batch"], Float[Tensor, " batch"], Int[Tensor, " batch"]]:
    """Iterate v ← following(v, H v), normalised, and return value, residual, products.

    Value and residual are of H itself also when the iteration is shifted: vᵀHv has no
    cancellation, where λ_1 − vᵀ(λ_1 I − H)v would lose the digits of a small λ_n.
    """
    start = random_vector(operator.size, generator).to(operator.device)
    v = (start / norm(start)).expand(operator.batch_size, -1)
    value = v.new_full((operator.batch_size,), math.nan)
    residual = value.clone()
    matvecs = torch.zeros_like(active, dtype=torch.int64)
    for _ in range(iterations):
        matvecs += active
        hv, failed = product(operator, v, active)
        rayleigh = (v * hv).sum(1)
        distance = norm(hv - rayleigh[:, None] * v)
        value = torch.where(active, rayleigh, value)
        residual = torch.where(active, distance, residual)
        value[failed] = math.nan
        residual[failed] = math.nan
        active = active & ~failed

        w = following(v, hv)
        length = norm(w)
        # Nothing left to multiply: v is an eigenvector, and its value is known.
        active = active & (length > 0)
        if tol is not None:
            active = active & (residual > tol * value.abs())
        if not bool(active.any()):
            break
        v = torch.where(
            active[:, None], w / torch.where(length > 0, length, 1.0)[:, None], v
        )
    return value, residual, matvecs
