"""Σλ from products with J alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from leakwatch.spectrum._lower import random_starts
from leakwatch.spectrum.factor_operators import FactorOperator, as_factor, forward
from leakwatch.spectrum.operators import norm
from leakwatch.spectrum.spectral_measure import complement


def trace(
    a: Tensor | FactorOperator,
    *,
    probes: int = 20,
    known: Sequence[tuple[Float[Tensor, " m"], Float[Tensor, "n m"]]] | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Float[Tensor, " batch"], Float[Tensor, " batch"]]:
    """The trace of H = JᵀJ and its standard error.

    Hutchinson's estimator on unit vectors z: n · E‖Jz‖² = Σλ. It needs no product with
    Jᵀ, so a probe costs half of a product with H. With leading eigenvectors, known from
    the search for λ_1, only the rest is estimated, as in Hutch++ (Meyer, Musco, Musco
    and Woodruff 2021). XTrace (Epperly, Tropp and Webber 2024) needs products with H:
    at equal cost it was less exact on the Jacobians of the networks tried here.

    Args:
        a: J, (rows, n) or (batch, rows, n), or an operator.
        probes: random vectors, at least 2, one product with J each.
        known: leading eigenvalues and eigenvectors of each sample, as from ``ends``.
        generator: source of the vectors, shared by all samples; default: a fresh one,
            equal each time.

    Returns:
        Estimates and standard errors, float64; NaN where a product was not finite.

    Raises:
        TypeError: ``a`` is neither a tensor nor an operator.
        ValueError: bad matrices, or fewer than 2 probes.

    Example:
        >>> import torch
        >>> j = torch.diag(torch.linspace(1, 2, 50, dtype=torch.float64))
        >>> value, error = trace(j)
        >>> bool((value - j.square().sum()).abs() < 4 * error)
        True
    """
    factor = as_factor(a)
    if probes < 2:
        raise ValueError(
            f"probes is {probes}, expected at least 2: one has no standard error; give "
            "e.g. probes=20"
        )
    batch, n, device = factor.batch_size, factor.size, factor.device
    generator = torch.Generator().manual_seed(1) if generator is None else generator
    draws = random_starts(n, probes, generator).to(device)
    active = torch.ones(batch, dtype=torch.bool, device=device)
    sums = torch.zeros(batch, dtype=torch.float64, device=device)
    left = torch.full_like(sums, n)
    if known is not None:
        for i, (values, _) in enumerate(known):
            sums[i], left[i] = values.sum(), n - len(values)
    squares = []
    for draw in draws:
        z = draw.expand(batch, -1)
        if known is not None:
            z = torch.stack([complement(draw, vectors) for _, vectors in known])
        image, failed = forward(factor, z, active)
        active = active & ~failed
        squares.append(left * norm(image.to(torch.float64)).square())
    drawn = torch.stack(squares)
    lost = torch.where(active, 0.0, math.nan)
    return (
        sums + drawn.mean(0) + lost,
        drawn.std(0) / math.sqrt(probes) + lost,
    )
