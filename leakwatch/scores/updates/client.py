"""All scores of one client's samples at its surrogate."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

import torch
from jaxtyping import Float
from torch import Tensor

from leakwatch.derivatives.jacobian import GradientJacobian
from leakwatch.scores.i2f import psnr
from leakwatch.scores.measure.batches import value_of
from leakwatch.scores.measure.dense import from_matrix
from leakwatch.scores.measure.extremes import pairs
from leakwatch.scores.measure.found import (
    NO_DIRECTION,
    Found,
    rounding,
    times,
)
from leakwatch.scores.measure.plan import LARGEST_EXACT
from leakwatch.scores.measure.sample_spectrum import Precision
from leakwatch.scores.registry import Score
from leakwatch.scores.result import Value
from leakwatch.scores.settings import Settings
from leakwatch.scores.updates.blocks import block_scores, evidence_of, too_large
from leakwatch.scores.updates.joint import JointJacobian, joint_errors
from leakwatch.scores.updates.mismatch import Mismatch
from leakwatch.spectrum import DenseFactor, FactorOperator, ends
from leakwatch.status import Status, describe_error

__all__ = ["ClientScores", "Effort", "score_client"]

_log = logging.getLogger(__name__)

JOINT: Final = ("joint_i2f_bayes", "joint_i2f_bayes_psnr")
_EXACT_TOL: Final = 1e-9
_TOL = {torch.float32: 1e-4, torch.float64: 1e-10}


@final
@dataclass(frozen=True)
class Effort:
    """What scoring may cost.

    Attributes:
        blocks: whether to score each sample as if the others were known.
        joint: whether to score all samples of a client together.
        max_memory: MiB that may be kept of a Jacobian at a time.
        products: most products with J for each matrix-free task.
    """

    blocks: bool = True
    joint: bool = True
    max_memory: float = 2048.0
    products: int = 150


@final
@dataclass(frozen=True, eq=False)
class ClientScores:
    """Scores of one client.

    Attributes:
        samples: score → one value for each sample.
        client: score → the value for all samples as one input.
    """

    samples: dict[str, list[Value]]
    client: dict[str, Value]


def score_client(
    jacobian: GradientJacobian,
    mismatch: Mismatch,
    losses: Float[Tensor, " n"],
    offset: Float[Tensor, "n d_x"],
    scores: Sequence[Score],
    settings: Settings,
    effort: Effort,
) -> ClientScores:
    """Scores of each sample of a client, and of all of them together.

    Args:
        jacobian: of the samples, at the surrogate.
        mismatch: of the surrogate.
        losses: of the samples there.
        offset: X − μ in pixel units.
        scores: to compute.
        settings: noise, prior and pixels.
        effort: what it may cost.

    Returns:
        A value with a status for everything asked; nothing that goes wrong with one
        part keeps the others from being computed.
    """
    measured = [rounding(jacobian, i) for i in range(len(losses))]
    samples: dict[str, list[Value]] = {}
    if effort.blocks:
        rows = block_scores(
            jacobian,
            mismatch,
            losses,
            offset,
            scores,
            settings,
            effort.max_memory,
            measured,
        )
        samples = {s.name: [row[s.name] for row in rows] for s in scores}
    if not effort.joint:
        return _doubted(ClientScores(samples, {}), scores, mismatch)
    try:
        joint = _Joint(jacobian, mismatch, effort, measured)
        errors = joint.errors(offset, settings)
        client = joint.scores(losses, offset, scores, settings)
    except Exception as error:
        _log.warning("leakwatch could not score a client: %s", describe_error(error))
        gone = Value.without("failed", describe_error(error))
        errors = [gone] * len(losses)
        client = {s.name: gone for s in scores}
    d_x = offset.shape[1]
    samples[JOINT[0]] = errors
    samples[JOINT[1]] = [psnr(e, d_x, settings.data_range) for e in errors]
    return _doubted(ClientScores(samples, client), scores, mismatch)


def _doubted(
    found: ClientScores,
    scores: Sequence[Score],
    mismatch: Mismatch,
) -> ClientScores:
    """The same, where δ itself may be rounding."""
    if mismatch.judged:
        return found
    share = 100 * min(mismatch.doubt, 1.0)
    status = Status(
        "estimated",
        f"{share:.0f} % of the mismatch may be rounding, so that this is an order of "
        f"magnitude: the update is nearly the exact gradient of the samples",
    )
    doubted = {s.name for s in scores if "noise" in s.needs} | set(JOINT)

    def value(name: str, given: Value) -> Value:
        ok = given.status.word == "ok"
        return Value(given.number, status) if ok and name in doubted else given

    return ClientScores(
        {k: [value(k, v) for v in row] for k, row in found.samples.items()},
        {k: value(k, v) for k, v in found.client.items()},
    )


@final
class _Joint:
    """The joint Jacobian of one client, dense where it is small."""

    def __init__(
        self,
        jacobian: GradientJacobian,
        mismatch: Mismatch,
        effort: Effort,
        measured: Sequence[float],
    ) -> None:
        n, d_theta, d_x = jacobian.shape
        self._jacobian, self._mismatch, self._effort = jacobian, mismatch, effort
        self._operator = JointJacobian(jacobian)
        self._scale = self._operator.scale
        self._norm = float(mismatch.gradient.norm())
        unit = mismatch.gradient / self._norm if self._norm > 0 else mismatch.gradient
        self._unit: Float[Tensor, " d_theta"] = unit
        ratio = (jacobian.scale / jacobian.scale.max()).tolist()
        self._rounding = math.hypot(
            *(r * m for r, m in zip(ratio, measured, strict=True))
        )
        self._dense: Float[Tensor, "d_theta n"] | None = None
        mib = 2 * d_theta * n * d_x * jacobian.dtype.itemsize / 2**20
        if n * d_x <= LARGEST_EXACT and mib <= effort.max_memory:
            columns = [jacobian.dense(i) / (n * self._scale) for i in range(n)]
            self._dense = torch.cat(columns, dim=1)

    def errors(self, offset: Tensor, settings: Settings) -> list[Value]:
        if settings.noise_std is None:
            return [Value.without("not computed", "needs noise_std")] * len(offset)
        factor: FactorOperator = self._operator
        products, tol = self._effort.products, 1e-3
        if self._dense is not None:
            factor = DenseFactor(self._dense[None])
            products, tol = factor.size, _EXACT_TOL
        return joint_errors(
            factor,
            self._mismatch.delta,
            offset,
            scale=self._scale,
            epsilon=(settings.noise_std / settings.prior_std) ** 2,
            rounding=self._rounding,
            uncertainty=self._mismatch.entry_error,
            products=products,
            tol=tol,
        )

    def scores(
        self,
        losses: Tensor,
        offset: Tensor,
        scores: Sequence[Score],
        settings: Settings,
    ) -> dict[str, Value]:
        size, d_theta = self._operator.size, self._operator.rows
        delta = self._mismatch.delta.to(self._operator.dtype)[None]
        evidence = evidence_of(
            self._by_products() if self._dense is None else self._exactly(self._dense),
            d_x=size,
            d_theta=d_theta,
            loss=float(losses.mean()),
            grad_norm=self._norm,
            pulled=self._operator.backward(delta)[0].double() * self._scale,
            mismatch=self._mismatch,
            offset=offset.reshape(-1),
            why=too_large(size),
        )
        return {s.name: value_of(s, evidence, settings) for s in scores}

    def _exactly(self, dense: Tensor) -> Found:
        j = dense.double()
        return from_matrix(
            j.mT @ j,
            scale=self._scale,
            d_theta=len(j),
            eps=torch.finfo(dense.dtype).eps,
            rounding=self._rounding,
            along=j.mT @ self._unit,
            norm=self._norm,
            eigenvectors=True,
        )

    def _by_products(self) -> Found:
        squared = self._scale**2
        plain = self._ends(JointJacobian(self._jacobian), 0)
        cosine = (NO_DIRECTION, NO_DIRECTION)
        if self._norm > 0:
            factor = squared / self._norm**2
            found = self._ends(JointJacobian(self._jacobian, self._unit), 1)
            cosine = (times(found[0], factor), times(found[1], factor))
        gone = Value.without("not computed", "Σλ is not estimated for several samples")
        return Found(
            lambda_max=times(plain[0], squared),
            lambda_min=times(plain[1], squared),
            cos_max=cosine[0],
            cos_min=cosine[1],
            trace=gone,
            precision=Precision(factor=self._rounding).scaled(squared),
        )

    def _ends(self, factor: JointJacobian, lost: int) -> tuple[Value, Value]:
        # λ_min of so many elements is out of reach of products.
        found = ends(
            factor,
            smallest=False,
            tol=_TOL[factor.dtype],
            max_matvecs=self._effort.products,
        )
        top = float(found.lambda_max[0])
        eps = torch.finfo(factor.dtype).eps
        assumed = eps * math.sqrt(factor.size * max(top, 0.0))
        precision = [Precision(factor=max(self._rounding, assumed))]
        shape = (1, factor.rows, factor.size)
        return pairs(shape, found, precision, factor.rows - lost)[0]
