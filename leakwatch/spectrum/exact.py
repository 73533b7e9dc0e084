"""All eigenvalues of dense matrices, by a float64 eigensolver."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]  # not in __all__

from leakwatch.spectrum.operators import (
    SymmetricOperator,
    as_batch,
    as_operator,
    check_matrices,
    check_symmetry,
    exactly_symmetric,
    finite_samples,
    norm,
    product,
)
from leakwatch.spectrum.result import (
    EPS64,
    Spectrum,
    clamp_rounding,
    precision_floor,
)


def exact(
    a: Tensor | SymmetricOperator,
    *,
    eigenvectors: bool = False,
    arithmetic_eps: float | None = None,
    factor_eps: float | None = None,
) -> Spectrum:
    """Compute all eigenvalues, in float64 whatever the arithmetic of the input.

    The only solver that gets the smallest eigenvalue right whatever the spectrum. A
    float32 *eigensolver* would be the largest error of λ_min, so there is none; the
    rounding that the input already carries is stated through the floor.

    An operator's matrix is taken from its ``dense()``, or formed by n products for the
    whole batch. Samples are solved together: the work needs a few times the memory of
    the matrices, which the caller bounds by its batch.

    Cost: 4/3 n³ operations a sample, about 9 n³ with eigenvectors.

    Args:
        a: matrices (n, n) or (batch, n, n), float32 or float64, or an operator.
        eigenvectors: also return the eigenvectors, (batch, n, n).
        arithmetic_eps: relative error of the entries of H. Default: the machine
            epsilon of the input's dtype. Give it when float64 entries come from float32
            work.
        factor_eps: relative error of the entries of J when H = JᵀJ was formed in
            float64 from it, e.g. ``torch.finfo(torch.float32).eps`` for float32
            tangents: its effect is squared, so far smaller eigenvalues are resolved.

    Returns:
        `Spectrum` with ``complete=True``. ``residuals`` are ‖Hu − λu‖ when eigenvectors
        are asked for; otherwise the bound n · eps64 · λ_1 of a backward-stable solver.
        ``matvecs`` is n when the matrix was formed by products, else 0. Values in
        [−floor, 0) are set to 0; more negative ones are kept, they say that H is not
        positive semi-definite. A sample that is not finite, or on which the eigensolver
        fails, has NaN and ``converged`` False; the other samples don't notice.

    Raises:
        TypeError: ``a`` is neither a tensor nor an operator.
        ValueError: not square, wrong dtype, not symmetric, or a negative epsilon.

    Example:
        >>> import torch
        >>> exact(torch.tensor([[2.0, 1.0], [1.0, 2.0]])).eigenvalues.round(decimals=9)
        tensor([[3., 1.]], dtype=torch.float64)
    """
    for name, eps in (("arithmetic_eps", arithmetic_eps), ("factor_eps", factor_eps)):
        if eps is not None and not 0 <= eps < 1:
            raise ValueError(
                f"{name} is {eps}, expected a relative error in [0, 1); give e.g. "
                "torch.finfo(torch.float32).eps"
            )
    matrices, matvecs, input_eps = _dense(a)
    n = matrices.shape[1]
    finite = finite_samples(matrices)
    if exactly_symmetric(matrices) and bool(finite.all()):
        h = matrices.to(torch.float64)
    else:
        if isinstance(a, Tensor):
            check_symmetry(matrices)
        h = torch.where(finite[:, None, None], matrices, 0.0).to(torch.float64)
        h = 0.5 * h + 0.5 * h.mT
    lost = torch.where(finite, 0.0, math.nan).to(torch.float64)[:, None]
    vectors = None
    if eigenvectors:
        ascending, columns = eigh_or_nan(h)
        values, vectors = ascending.flip(1) + lost, columns.flip(2) + lost[:, :, None]
        residuals = norm(h @ vectors - vectors * values[:, None], dim=1)
    else:
        values = eigvalsh_or_nan(h).flip(1) + lost
        residuals = (n * EPS64 * values.abs().amax(1, keepdim=True)).expand_as(values)

    if arithmetic_eps is None:
        # With a factor the matrix is as good as its own dtype; without, an operator
        # that multiplies in float32 doesn't become better by a float64 dense().
        own = float(torch.finfo(matrices.dtype).eps)
        arithmetic_eps = own if factor_eps is not None else max(own, input_eps)
    scale = values.abs().amax(1)
    floor = precision_floor(scale, n, arithmetic_eps, factor_eps or 0.0)
    return Spectrum(
        eigenvalues=clamp_rounding(values, floor[:, None]),
        residuals=residuals,
        converged=torch.isfinite(values),
        matvecs=torch.full_like(finite, matvecs, dtype=torch.int64),
        floor=floor,
        complete=True,
        method="exact",
        eigenvectors=vectors,
    )


def _dense(a: Tensor | SymmetricOperator) -> tuple[Tensor, int, float]:
    """Return matrices, products spent on each, and the epsilon of the input."""
    if isinstance(a, Tensor):
        matrices = as_batch(a).detach()
        check_matrices(matrices)
        return matrices, 0, float(torch.finfo(matrices.dtype).eps)
    operator = as_operator(a)
    eps = float(torch.finfo(operator.dtype).eps)
    shape = (operator.batch_size, operator.size, operator.size)
    dense = getattr(operator, "dense", None)
    if dense is not None:
        matrices = dense().detach()
        check_matrices(matrices)
        if matrices.shape != shape:
            raise ValueError(
                f"dense() returned shape {tuple(matrices.shape)}, expected {shape}"
            )
        return matrices, 0, eps
    return _by_products(operator), operator.size, eps


def _by_products(operator: SymmetricOperator) -> Float[Tensor, "batch n n"]:
    batch, n = operator.batch_size, operator.size
    unit = torch.zeros(batch, n, dtype=torch.float64, device=operator.device)
    columns = unit.new_zeros(batch, n, n)
    active = torch.ones(batch, dtype=torch.bool, device=operator.device)
    for j in range(n):
        unit[:, j] = 1.0
        columns[:, :, j], failed = product(operator, unit, active)
        unit[:, j] = 0.0
        columns[failed] = math.nan
        active = active & ~failed
    return columns


def eigvalsh_or_nan(h: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n"]:
    """Return ascending eigenvalues, or NaN where LAPACK gives up."""
    if h.ndim > 2 and h.device.type == "cpu":  # where it takes them one by one
        return torch.stack([eigvalsh_or_nan(one) for one in h])
    try:
        values: Tensor = torch.linalg.eigvalsh(h)
        return values
    except LinAlgError:
        if h.ndim > 2:
            return torch.stack([eigvalsh_or_nan(one) for one in h])
        return torch.full_like(h[0], math.nan)


def eigh_or_nan(
    h: Float[Tensor, "*batch n n"],
) -> tuple[Float[Tensor, "*batch n"], Float[Tensor, "*batch n n"]]:
    """Return ascending eigenvalues and eigenvectors, NaN where LAPACK gives up."""
    try:
        if h.ndim == 2 or h.device.type != "cpu":
            values, vectors = torch.linalg.eigh(h)
            return values, vectors
    except LinAlgError:
        if h.ndim == 2:
            return torch.full_like(h[0], math.nan), torch.full_like(h, math.nan)
    each = [eigh_or_nan(one) for one in h]
    return torch.stack([v for v, _ in each]), torch.stack([u for _, u in each])
