"""The exact way: one dense Gram matrix per sample tells its whole spectrum."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from leakwatch.scores.measure.inputs import ScoreInputs
from leakwatch.scores.measure.plan import Plan
from leakwatch.scores.measure.sample_spectrum import (
    NO_DIRECTION,
    NOT_FINITE,
    Precision,
    SampleSpectrum,
)
from leakwatch.scores.result import Value, judged
from leakwatch.spectrum import Spectrum, exact, lanczos
from leakwatch.status import Status, describe_error

__all__ = ["SMALLEST", "Formed", "from_gram", "from_matrices"]

SMALLEST = "the smallest eigenvalue"
# Samples whose H are solved together: several copies of each, in a part of the memory
# that the Jacobian of one may take, or of this.
_COPIES = 6
_GROUP_BYTES = 512 * 2**20
# Residual of λ_1 of the cosine Hessian, where it is all that can be resolved.
_TOL = 1e-10

_log = logging.getLogger(__name__)


def from_gram(inputs: ScoreInputs, plan: Plan) -> Iterator[SampleSpectrum]:
    """The spectrum of each sample, from its own Gram matrix; several at once.

    Args:
        inputs: the samples.
        plan: what to measure, and the memory for it.
    """
    size = _COPIES * 8 * inputs.jacobian.shape[2] ** 2
    limit = _GROUP_BYTES if plan.max_memory is None else plan.max_memory * 2**20 / 4
    group = max(1, int(limit / size))
    finite = torch.isfinite(inputs.jacobian.norm).tolist()
    rounding, scales = inputs.rounding(), inputs.jacobian.scale.tolist()
    for start in range(0, len(inputs), group):
        rows = range(start, min(start + group, len(inputs)))
        failed: dict[int, SampleSpectrum] = {}
        formed: dict[int, Formed] = {}
        for i in rows:
            try:
                if finite[i]:
                    formed[i] = _formed(inputs, i, plan, rounding[i], scales[i])
                else:
                    failed[i] = SampleSpectrum.failed(NOT_FINITE)
            except Exception as error:
                reason = describe_error(error)
                _log.warning("leakwatch could not score a sample: %s", reason)
                failed[i] = SampleSpectrum.failed(Status("failed", reason))
        solved = from_matrices(
            list(formed.values()),
            d_theta=inputs.jacobian.shape[1],
            eps=torch.finfo(inputs.jacobian.dtype).eps,
            eigenvectors=plan.eigenvectors,
        )
        for (i, one), spectrum in zip(formed.items(), solved, strict=True):
            if spectrum.failure is None:
                h = one.h.mul_(one.scale**2) if plan.range or plan.matrix else None
                spectrum = replace(spectrum, h=h, grad_norm=Value(one.norm))
            failed[i] = spectrum
        formed.clear()
        for i in rows:
            spectrum = failed.pop(i)
            if plan.range and spectrum.h is not None:
                inside = inputs.pixel_range(i, spectrum.h, plan.max_memory)
                spectrum = replace(spectrum, pixel_range=inside)
            yield spectrum


def _formed(
    inputs: ScoreInputs, sample: int, plan: Plan, rounding: float, scale: float
) -> Formed:
    gram = inputs.jacobian.gram(sample, max_memory=plan.max_memory)
    along = gram.along if plan.cosine else None
    return Formed(gram.h, scale, rounding, along, gram.norm * scale, gram.traces)


@final
@dataclass(frozen=True, eq=False)
class Formed:
    """H̃ = J̃ᵀJ̃ of one sample, or of several taken together, and what goes with it.

    Attributes:
        h: H̃, float64.
        scale: J/J̃.
        rounding: error of J̃ as measured, ‖ΔJ̃‖_F.
        along: J̃ᵀĝ for the direction ĝ that cosine distance compares with, where its
            Hessian (H − (Jᵀĝ)(Jᵀĝ)ᵀ)/norm² is wanted (LAVP, Theorem 4).
        norm: length of the gradient that has this direction.
        traces: name of a module → its part of the trace of H̃.
    """

    h: Float[Tensor, "n n"]
    scale: float
    rounding: float
    along: Float[Tensor, " n"] | None = None
    norm: float = 0.0
    traces: dict[str, float] = field(default_factory=dict)


def from_matrices(
    formed: Sequence[Formed], *, d_theta: int, eps: float, eigenvectors: bool = False
) -> list[SampleSpectrum]:
    """Spectra of H = scale² H̃ and of the cosine distance's Hessian.

    Args:
        formed: of each sample.
        d_theta: rows of J.
        eps: machine precision of J's arithmetic.
        eigenvectors: whether these are wanted; eigenvalues are then left where they
            are, otherwise they come to the CPU.

    Returns:
        All that each H̃ tells, in the units of J; ``failed`` where it is not finite,
        or the eigensolver fails.
    """
    if not formed:
        return []
    n = len(formed[0].h)
    spectrum = exact(
        torch.stack([one.h for one in formed]),
        factor_eps=eps,
        eigenvectors=eigenvectors,
    )
    values = _eigenvalues(spectrum, min(d_theta, n))
    read = torch.stack([_summary(one) for one in formed]).tolist()
    vectors, here = spectrum.eigenvectors, values.cpu()
    usable = torch.isfinite(here).all(1).tolist()
    out: list[SampleSpectrum] = []
    for i, one in enumerate(formed):
        trace, finite = read[i]
        if not finite or not usable[i]:
            why = Status("failed", "the eigensolver gave no finite eigenvalues")
            out.append(SampleSpectrum.failed(why if finite else NOT_FINITE))
            continue
        squared = one.scale**2
        precision = Precision.of_matrix(float(here[i, 0]), n, eps, one.rounding)
        ends = _ends(here[i] * squared, precision.scaled(squared), d_theta)
        out.append(
            SampleSpectrum(
                d_x=n,
                rank=min(d_theta, n),
                lambda_max=ends[0],
                lambda_min=ends[1],
                trace=Value(trace * squared),
                traces={name: t * squared for name, t in one.traces.items()},
                eigenvalues=(here if vectors is None else values)[i] * squared,
                precision=precision.scaled(squared),
                eigenvectors=None if vectors is None else vectors[i],
            )
        )
    del values, vectors, spectrum
    return _with_cosine(formed, out, d_theta, eps)


def _summary(one: Formed) -> Float[Tensor, " 2"]:
    """Trace of H̃, and whether all is finite."""
    parts = [one.h] if one.along is None else [one.h, one.along]
    ends = torch.cat([torch.stack(torch.aminmax(part)) for part in parts])
    finite = ends.isfinite().all()
    return torch.stack([one.h.diagonal().sum(), finite.to(one.h.dtype)])


def _with_cosine(
    formed: Sequence[Formed], plain: list[SampleSpectrum], d_theta: int, eps: float
) -> list[SampleSpectrum]:
    """The same with the ends of the cosine Hessian, where they are wanted."""
    out = list(plain)
    whole: list[int] = []
    ends: list[int] = []
    lost: set[int] = set()
    for i, (one, spectrum) in enumerate(zip(formed, plain, strict=True)):
        if spectrum.failure is not None or one.along is None:
            continue
        if one.norm == 0:
            out[i] = replace(spectrum, cos_max=NO_DIRECTION, cos_min=NO_DIRECTION)
            continue
        # It lies below H, and rounding does as much to it: where λ_min of H can't be
        # told from zero, its own can't be.
        full = d_theta > len(one.h)
        if full and spectrum.lambda_min.status.word == "unresolved":
            lost.add(i)
        # On a GPU each product is waited for, and all eigenvalues cost no more.
        few = i in lost or (full and one.h.device.type == "cpu")
        (ends if few else whole).append(i)
    if ends:
        matrices = _downdated(formed, ends)
        tops = lanczos(matrices, tol=_TOL)
        found = tops.lambda_max.cpu()
        sure = (tops.converged[:, 0] & (tops.lambda_max > 0)).cpu()
        bottom = torch.zeros_like(found)
        rest = [k for k, i in enumerate(ends) if i not in lost and bool(sure[k])]
        if rest:
            bottom[rest] = _smallest(matrices[rest]).cpu()
            sure &= bottom.isfinite()
        for k, i in enumerate(ends):
            if not sure[k]:
                whole.append(i)
                continue
            out[i] = _cosine(formed[i], plain[i], found[k], bottom[k], d_theta)
            if i in lost:
                out[i] = replace(out[i], cos_min=plain[i].lambda_min)
        del matrices
    if whole:
        downdated = exact(_downdated(formed, whole), factor_eps=eps)
        rows = _eigenvalues(downdated, d_theta - 1).cpu()
        for i, values in zip(whole, rows, strict=True):
            out[i] = _cosine(formed[i], plain[i], values[0], values[-1], d_theta)
    return out


@final
@dataclass(frozen=True, eq=False)
class _Inverse:
    """v ↦ (L Lᵀ)⁻¹v, for the other end of a spectrum."""

    lower: Float[Tensor, "batch n n"]

    @property
    def batch_size(self) -> int:
        return len(self.lower)

    @property
    def size(self) -> int:
        return self.lower.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.lower.dtype

    @property
    def device(self) -> torch.device:
        return self.lower.device

    def matvec(self, v: Tensor, active: Tensor | None = None) -> Tensor:
        return torch.cholesky_solve(v[:, :, None], self.lower)[:, :, 0]


def _smallest(matrices: Float[Tensor, "rows n n"]) -> Float[Tensor, " rows"]:
    """Smallest eigenvalues, NaN where rounding hides or products don't find them.

    The largest of the inverse, by products with its Cholesky factor: as far off as an
    eigensolver's, a few units of float64 times λ_1.
    """
    lower, info = torch.linalg.cholesky_ex(matrices)
    good = (info == 0) & lower.diagonal(dim1=1, dim2=2).isfinite().all(1)
    eye = torch.eye(lower.shape[1], dtype=lower.dtype, device=lower.device)
    found = lanczos(_Inverse(torch.where(good[:, None, None], lower, eye)), tol=_TOL)
    sure = good & found.converged[:, 0] & (found.lambda_max > 0)
    return torch.where(sure, 1 / found.lambda_max, math.nan)


def _downdated(formed: Sequence[Formed], rows: list[int]) -> Float[Tensor, "rows n n"]:
    return torch.stack(
        [
            torch.addr(formed[i].h, along, along, alpha=-1.0)
            for i in rows
            if (along := formed[i].along) is not None
        ]
    )


def _cosine(
    one: Formed, plain: SampleSpectrum, top: Tensor, bottom: Tensor, d_theta: int
) -> SampleSpectrum:
    values = torch.stack([top, bottom])
    if not bool(torch.isfinite(values).all()):
        why = "the eigensolver gave no finite eigenvalues"
        return SampleSpectrum.failed(Status("failed", why))
    # What rounding did to H, it did to the downdate, however small that became.
    precision = plain.precision.scaled(one.norm**-2)
    lam = values * (one.scale / one.norm) ** 2
    # The smallest is exactly zero where the gradient has fewer entries than the image.
    rank = d_theta - 1 if d_theta > len(one.h) else min(d_theta - 1, 1)
    cos_max, cos_min = _ends(lam, precision, rank)
    return replace(plain, cos_max=cos_max, cos_min=cos_min)


def _eigenvalues(spectrum: Spectrum, rank: int) -> Float[Tensor, "batch n"]:
    """All of them, at least 0, and exactly 0 beyond the rank."""
    values = spectrum.eigenvalues.clamp_min(0)
    values[:, max(rank, 0) :] = 0.0
    return values


def _ends(lam: Tensor, precision: Precision, rank: int) -> tuple[Value, Value]:
    low, high = precision.bounds(lam, rank)
    top, bottom = (
        judged(float(lam[at]), float(low[at]), float(high[at]), what)
        for at, what in ((0, "the largest eigenvalue"), (-1, SMALLEST))
    )
    return top, bottom
