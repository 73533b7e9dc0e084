"""The exact way: one dense Gram matrix per sample tells its whole spectrum."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from leakwatch.scores.measure.inputs import ScoreInputs
from leakwatch.scores.measure.plan import Plan
from leakwatch.scores.measure.sample_spectrum import (
    NO_DIRECTION,
    NOT_ASKED,
    NOT_FINITE,
    Precision,
    SampleSpectrum,
)
from leakwatch.scores.result import Value, judged
from leakwatch.spectrum import Spectrum, exact
from leakwatch.status import Status, describe_error

__all__ = ["SMALLEST", "from_gram", "from_matrix"]

SMALLEST = "the smallest eigenvalue"

_log = logging.getLogger(__name__)


def from_gram(inputs: ScoreInputs, plan: Plan) -> Iterator[SampleSpectrum]:
    """The spectrum of each sample in turn, from its own Gram matrix.

    Args:
        inputs: the samples.
        plan: what to measure, and the memory for it.
    """
    finite = torch.isfinite(inputs.jacobian.norm).tolist()
    rounding = inputs.rounding()
    for i in range(len(inputs)):
        if not finite[i]:
            yield SampleSpectrum.failed(NOT_FINITE)
            continue
        try:
            yield _of_sample(inputs, i, plan, rounding[i])
        except Exception as error:
            reason = describe_error(error)
            _log.warning("leakwatch could not score a sample: %s", reason)
            yield SampleSpectrum.failed(Status("failed", reason))


def _of_sample(
    inputs: ScoreInputs, sample: int, plan: Plan, rounding: float
) -> SampleSpectrum:
    jacobian = inputs.jacobian
    gram = jacobian.gram(sample, max_memory=plan.max_memory)
    scale = float(jacobian.scale[sample])
    spectrum = from_matrix(
        gram.h,
        scale=scale,
        d_theta=jacobian.shape[1],
        eps=torch.finfo(jacobian.dtype).eps,
        rounding=rounding,
        along=gram.along if plan.cosine else None,
        norm=gram.norm * scale,
        eigenvectors=plan.eigenvectors,
        traces=gram.traces,
    )
    if spectrum.failure is not None:
        return spectrum
    if plan.range or plan.matrix:
        h = gram.h * scale**2
        spectrum = replace(spectrum, h=h)
    if plan.range:
        inside = inputs.pixel_range(sample, h, plan.max_memory)
        spectrum = replace(spectrum, pixel_range=inside)
    return replace(spectrum, grad_norm=Value(gram.norm * scale))


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
) -> SampleSpectrum:
    """Spectra of H = scale² H̃ and of the cosine distance's Hessian.

    Args:
        h: H̃ = J̃ᵀJ̃, float64, of one sample or of several taken together.
        scale: J/J̃.
        d_theta: rows of J.
        eps: machine precision of J's arithmetic.
        rounding: error of J̃ as measured, ‖ΔJ̃‖_F.
        along: J̃ᵀĝ for the direction ĝ that cosine distance compares with, where its
            Hessian (H − (Jᵀĝ)(Jᵀĝ)ᵀ)/norm² is wanted (LAVP, Theorem 4).
        norm: length of the gradient that has this direction.
        eigenvectors: whether these are wanted.
        traces: name of a module → its part of the trace of H̃.

    Returns:
        All that H̃ tells, in the units of J; ``failed`` if H̃ is not finite.

    Raises:
        ArithmeticError: if the eigensolver gives no finite eigenvalues.
    """
    n, squared = len(h), scale**2
    directed = along is None or bool(torch.isfinite(along).all())
    if not (directed and bool(torch.isfinite(h).all())):
        return SampleSpectrum.failed(NOT_FINITE)
    spectrum = exact(h, factor_eps=eps, eigenvectors=eigenvectors)
    normalised = _eigenvalues(spectrum, min(d_theta, n))
    precision = Precision.of_matrix(float(normalised[0]), n, eps, rounding)
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
    return SampleSpectrum(
        d_x=n,
        rank=min(d_theta, n),
        lambda_max=top,
        lambda_min=bottom,
        cos_max=cos_max,
        cos_min=cos_min,
        trace=Value(float(h.diagonal().sum()) * squared),
        traces={name: t * squared for name, t in (traces or {}).items()},
        eigenvalues=normalised * squared,
        precision=precision.scaled(squared),
        eigenvectors=None if vectors is None else vectors[0],
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
    top, bottom = (
        judged(float(lam[at]), float(low[at]), float(high[at]), what)
        for at, what in ((0, "the largest eigenvalue"), (-1, SMALLEST))
    )
    return top, bottom
