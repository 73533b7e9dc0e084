"""What one dense H tells about a sample, or about several samples taken together."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from leakwatch.scores.measure.found import (
    NO_DIRECTION,
    NOT_ASKED,
    NOT_FINITE,
    SMALL,
    Found,
)
from leakwatch.scores.measure.sample_spectrum import Precision
from leakwatch.scores.result import Value, judged
from leakwatch.spectrum import Spectrum, exact

__all__ = ["from_matrix"]


def from_matrix(
    h: Float[Tensor, "n n"],
    *,
    scale: float,
    d_theta: int,
    eps: float,
    rounding: float,
    along: Float[Tensor, " n"] | None = None,
    norm: float = 0.0,
    eigenvectors: bool = False,
    traces: dict[str, float] | None = None,
) -> Found:
    """Spectra of H = scale² H̃ and of the cosine distance's Hessian.

    Args:
        h: H̃ = J̃ᵀJ̃, float64.
        scale: J/J̃.
        d_theta: rows of J.
        eps: machine precision of J's arithmetic.
        rounding: error of J̃ as measured, ‖ΔJ̃‖_F.
        along: J̃ᵀĝ for the direction ĝ that cosine distance compares with, where its
            Hessian (H − (Jᵀĝ)(Jᵀĝ)ᵀ)/norm² is wanted.
        norm: length of the gradient that has this direction.
        eigenvectors: whether these are wanted.
        traces: name of a module → its part of the trace of H̃.

    Returns:
        What was found, in the units of J; ``failed`` if H̃ is not finite.

    Raises:
        ArithmeticError: if the eigensolver gives no finite eigenvalues.
    """
    n, squared = len(h), scale**2
    directed = along is None or bool(torch.isfinite(along).all())
    if not (directed and bool(torch.isfinite(h).all())):
        return Found.failed(NOT_FINITE)
    spectrum = exact(h, factor_eps=eps, eigenvectors=eigenvectors)
    normalised = _eigenvalues(spectrum, min(d_theta, n))
    precision = Precision.of(float(normalised[0]), n, eps, rounding)
    top, bottom = _ends(normalised * squared, precision.scaled(squared), d_theta)
    cos_max = cos_min = NOT_ASKED
    if along is not None and norm == 0:
        cos_max = cos_min = NO_DIRECTION
    elif along is not None:
        downdated = h - torch.outer(along, along)
        # What rounding did to H, it did to the downdate, however small that became.
        factor = squared / norm**2
        rest = _eigenvalues(exact(downdated, factor_eps=eps), d_theta - 1) * factor
        cos_max, cos_min = _ends(rest, precision.scaled(factor), d_theta - 1)
    vectors = spectrum.eigenvectors
    return Found(
        lambda_max=top,
        lambda_min=bottom,
        cos_max=cos_max,
        cos_min=cos_min,
        trace=Value(float(h.diagonal().sum()) * squared),
        traces={name: t * squared for name, t in (traces or {}).items()},
        eigenvalues=normalised * squared,
        precision=precision.scaled(squared),
        eigenvectors=None if vectors is None else vectors[0],
        norm=norm,
    )


def _eigenvalues(spectrum: Spectrum, rank: int) -> Tensor:
    """All of them, at least 0, and exactly 0 beyond the rank."""
    values = spectrum.eigenvalues[0].clamp_min(0)
    if not bool(torch.isfinite(values).all()):
        raise ArithmeticError("the eigensolver gave no finite eigenvalues")
    values[max(rank, 0) :] = 0.0
    return values


def _ends(lam: Tensor, precision: Precision, rank: int) -> tuple[Value, Value]:
    low, high = precision.bounds(lam, rank)
    ends = []
    for at, what in ((0, "the largest eigenvalue"), (-1, SMALL)):
        ends.append(judged(float(lam[at]), float(low[at]), float(high[at]), what))
    return ends[0], ends[1]
