"""Sums over all eigenvalues, from random starts: stochastic Lanczos quadrature."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from leakwatch.spectrum.golub_kahan import Bidiagonalisation
from leakwatch.spectrum.operators import (
    FactorOperator,
    as_factor,
    forward,
    norm,
    random_starts,
)
from leakwatch.spectrum.spectral_measure import (
    Function,
    Moment,
    Probe,
    SpectralMeasure,
    complement,
    gap,
)

Wanted: TypeAlias = tuple[Moment, Function]
"""What a rule has to integrate: against dμ (0) or λ dμ (1), and a function of λ."""


def quadrature(
    a: Tensor | FactorOperator,
    *,
    probes: int = 5,
    depth: int = 20,
    known: Sequence[tuple[Float[Tensor, " m"], Float[Tensor, "n m"]]] | None = None,
    lower: Float[Tensor, " batch"] | None = None,
    functions: Sequence[Sequence[Wanted]] | None = None,
    tol: float = 1e-2,
    generator: torch.Generator | None = None,
) -> list[SpectralMeasure | None]:
    """Stochastic quadrature of the spectrum of H = JᵀJ, for sums Σ f(λ_i).

    Ubaru, Chen and Saad (2017), on bidiagonal matrices instead of tridiagonal ones, so
    that small eigenvalues keep their digits. Starts are uniform on the unit sphere.
    With ``known`` they are orthogonal to the leading eigenvectors, whose eigenvalues
    then enter exactly: the largest part of the variance of Σλ lies there. That is the
    idea of Hutch++ (Meyer, Musco, Musco and Woodruff 2021); here the low-rank part
    costs nothing, for it comes from the search for λ_1.

    Args:
        a: J, (rows, n) or (batch, rows, n), or an operator.
        probes: random starts, at least 2.
        depth: most steps from each start, one product with J and Jᵀ each.
        known: leading eigenvalues and eigenvectors of each sample, as from ``ends``.
        lower: a lower bound of λ_min of each sample, which sharpens bounds of Σ 1/λ.
        functions: what will be integrated, for each sample; a start is done once the
            bracket of each function is within ``tol``. Without, it takes ``depth``
            steps.
        tol: relative width of a bracket that is enough.
        generator: source of the starts; default: a fresh one, equal each time. All
            samples draw the same, so none depends on which others are there.

    Returns:
        One `SpectralMeasure` per sample, None where a product was not finite.

    Raises:
        TypeError: ``a`` is neither a tensor nor an operator.
        ValueError: bad matrices, ``probes < 2`` or ``depth < 1``.

    Example:
        >>> import torch
        >>> j = torch.diag(torch.linspace(1, 2, 50, dtype=torch.float64))
        >>> estimate = quadrature(j)[0].estimate(lambda lam: 1 / lam)
        >>> truth = float((1 / j.diagonal() ** 2).sum())
        >>> abs(estimate.value - truth) < 4 * estimate.error
        True
    """
    factor = as_factor(a)
    if probes < 2 or depth < 1:
        raise ValueError(
            f"got probes={probes} and depth={depth}, expected at least 2 random starts "
            "(one has no standard error) and 1 step; give e.g. probes=5, depth=20"
        )
    batch, n, device = factor.batch_size, factor.size, factor.device
    if generator is None:
        # Not the start of `ends`, whose vectors the starts are made orthogonal to.
        generator = torch.Generator().manual_seed(1)
    draws = random_starts(n, probes, generator).to(device)
    if known is None:
        none = draws.new_zeros(0)
        known = [(none, none[:, None].expand(0, n).mT)] * batch
    bounds = [0.0] * batch if lower is None else lower.tolist()
    starts: list[list[Probe]] = [[] for _ in range(batch)]
    failed = torch.zeros(batch, dtype=torch.bool)
    products = torch.zeros(batch, dtype=torch.int64)
    for draw in draws:
        start = torch.stack([complement(draw, vectors) for _, vectors in known])
        start = start * ~failed.to(device)[:, None]
        chain = Bidiagonalisation(factor, start, depth)
        _run(chain, bounds, min(depth, n), functions, tol)
        failed = failed | chain.failed
        products += chain.steps
        for i in (~failed).nonzero().flatten().tolist():
            if int(chain.steps[i]):
                starts[i].append(_probe(chain, i, bounds[i]))
    return [
        None
        if bool(failed[i])
        else SpectralMeasure(
            n, known[i][0].cpu(), tuple(starts[i]) or (_EMPTY,) * 2, int(products[i])
        )
        for i in range(batch)
    ]


def _run(
    chain: Bidiagonalisation,
    bounds: list[float],
    limit: int,
    functions: Sequence[Sequence[Wanted]] | None,
    tol: float,
) -> None:
    active = ~chain.closed
    for step in range(1, limit + 1):
        if not bool(active.any()):
            return
        chain.step(active)
        active = active & ~chain.failed & ~chain.closed
        if functions is None or step == limit:
            continue
        for i in active.nonzero().flatten().tolist():
            if functions[i]:
                probe = _probe(chain, i, bounds[i])
                gaps = [gap(probe, f, moment) for moment, f in functions[i]]
                active[i] = max(gaps) > tol


def _probe(chain: Bidiagonalisation, i: int, lower: float) -> Probe:
    return Probe.of(chain.upper(i), closed=bool(chain.closed[i]), lower=lower)


_EMPTY = Probe.of(torch.zeros(1, 2, dtype=torch.float64), closed=True)


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
