"""Each sample of a client at its surrogate, as if the attacker knew all others."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from leakwatch.derivatives.jacobian import GradientJacobian
from leakwatch.scores.measure.batches import value_of
from leakwatch.scores.measure.dense import from_matrix
from leakwatch.scores.measure.found import NOT_FINITE, Found
from leakwatch.scores.measure.plan import LARGEST_EXACT
from leakwatch.scores.measure.sample_spectrum import Evidence
from leakwatch.scores.registry import Score
from leakwatch.scores.result import Value
from leakwatch.scores.settings import Settings
from leakwatch.scores.updates.mismatch import Mismatch
from leakwatch.status import Status, describe_error

__all__ = ["block_scores", "evidence_of", "too_large"]


def block_scores(
    jacobian: GradientJacobian,
    mismatch: Mismatch,
    losses: Float[Tensor, " n"],
    offset: Float[Tensor, "n d_x"],
    scores: Sequence[Score],
    settings: Settings,
    max_memory: float,
    measured: Sequence[float],
) -> list[dict[str, Value]]:
    """With J_i/N for J and g_ŵ(X), to which the sample contributes g_i/N, for g.

    Args:
        jacobian: of the samples, at the surrogate.
        mismatch: of the surrogate.
        losses: of the samples there.
        offset: X − μ in pixel units.
        scores: to compute.
        settings: noise, prior and pixels.
        max_memory: MiB that may be kept of a Jacobian at a time.
        measured: ‖ΔJ̃‖_F of each sample, what rounding has moved.

    Returns:
        Score → value, for each sample. One that can't be measured has the status
        ``failed``; the others are unaffected.
    """
    n, d_theta, d_x = jacobian.shape
    size = float(mismatch.gradient.norm())
    unit = mismatch.gradient / size if size > 0 else mismatch.gradient
    along = jacobian.normalized_rmatvec(unit.to(jacobian.dtype).expand(n, -1)).double()
    delta = mismatch.delta.to(jacobian.dtype).expand(n, -1)
    pulled = jacobian.normalized_rmatvec(delta).double()
    rows = []
    for i in range(n):
        scale = float(jacobian.scale[i]) / n
        try:
            found = _block(jacobian, i, along[i], size, scale, max_memory, measured[i])
        except Exception as error:
            found = Found.failed(Status("failed", describe_error(error)))
        evidence = evidence_of(
            found,
            d_x=d_x,
            d_theta=d_theta,
            loss=float(losses[i]),
            grad_norm=float(jacobian.norm[i]) / n,
            pulled=pulled[i] * scale,
            mismatch=mismatch,
            offset=offset[i],
            why=too_large(d_x),
        )
        rows.append({s.name: value_of(s, evidence, settings) for s in scores})
    return rows


def _block(
    jacobian: GradientJacobian,
    i: int,
    along: Tensor,
    size: float,
    scale: float,
    max_memory: float,
    measured: float,
) -> Found:
    d_theta, d_x = jacobian.shape[1:]
    if d_x > LARGEST_EXACT:
        gone = Value.without("not computed", too_large(d_x))
        return Found(gone, gone, gone, gone, gone)
    if not math.isfinite(float(jacobian.norm[i])):
        return Found.failed(NOT_FINITE)
    gram = jacobian.gram(i, max_memory=max_memory)
    return from_matrix(
        gram.h,
        scale=scale,
        d_theta=d_theta,
        eps=torch.finfo(jacobian.dtype).eps,
        rounding=measured,
        along=along,
        norm=size,
        eigenvectors=True,
        traces=gram.traces,
    )


def too_large(n: int) -> str:
    """Why there is no spectrum of n input elements."""
    return (
        f"needs the whole spectrum, which is computed for up to {LARGEST_EXACT} input "
        f"elements and a Jacobian that fits max_memory; there are {n} elements"
    )


def evidence_of(
    found: Found,
    *,
    d_x: int,
    d_theta: int,
    loss: float,
    grad_norm: float,
    pulled: Float[Tensor, " d_x"],
    mismatch: Mismatch,
    offset: Float[Tensor, " d_x"],
    why: str,
) -> Evidence:
    """What was found, with the mismatch for a perturbation, as evidence for scores.

    Args:
        found: by a solver, in the units of J.
        d_x: elements of the input, of one sample or of several together.
        d_theta: rows of J.
        loss: of the sample, or the mean of several.
        grad_norm: ‖g‖.
        pulled: Jᵀδ.
        mismatch: δ and its errors.
        offset: x − μ.
        why: why there is no spectrum, if there is none.
    """
    failure = found.failure
    if failure is None and not bool(torch.isfinite(pulled).all()):
        failure = NOT_FINITE
    # Errors of δ arrive at uᵢ as σᵢ times themselves, at most.
    top = found.lambda_max.number
    arrived = math.sqrt(top) * mismatch.entry_error if top > 0 else 0.0
    error = found.precision.factor * float(mismatch.delta.abs().max())
    return Evidence(
        d_x=d_x,
        loss=Value(loss),
        grad_norm=Value(grad_norm),
        lambda_max=found.lambda_max,
        lambda_min=found.lambda_min,
        cos_max=found.cos_max,
        cos_min=found.cos_min,
        trace=found.trace,
        traces=found.traces,
        eigenvalues=found.eigenvalues,
        precision=found.precision,
        rank=min(d_theta, d_x),
        eigenvectors=found.eigenvectors,
        pulled=pulled,
        pulled_error=error + arrived,
        offset=offset,
        why_no_spectrum=why,
        failure=failure,
    )
