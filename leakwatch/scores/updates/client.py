"""All scores of one client's samples at its surrogate."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, final

import torch
from jaxtyping import Float
from torch import Tensor

from leakwatch.scores.batches import value_of
from leakwatch.scores.i2f import psnr
from leakwatch.scores.measure.dense import Formed, from_matrices
from leakwatch.scores.measure.inputs import ScoreInputs
from leakwatch.scores.measure.matrix_free import end_values
from leakwatch.scores.measure.plan import LARGEST_EXACT
from leakwatch.scores.measure.sample_spectrum import (
    NO_DIRECTION,
    NOT_FINITE,
    Precision,
    SampleSpectrum,
)
from leakwatch.scores.registry import Score
from leakwatch.scores.result import Value
from leakwatch.scores.settings import Settings
from leakwatch.scores.updates.joint import JointJacobian, joint_errors
from leakwatch.scores.updates.surrogate import Mismatch
from leakwatch.spectrum import DenseFactor, FactorOperator, ends
from leakwatch.status import Status, describe_error

__all__ = ["JOINT", "ClientScores", "Effort", "score_client"]

_log = logging.getLogger(__name__)

JOINT: Final = ("joint_i2f_bayes", "joint_i2f_bayes_psnr")
_EXACT_TOL: Final = 1e-9
_NO_RANGE: Final = Status(
    "not computed", "the range of pixels is not counted in scores of updates"
)
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
        samples: score → value, of each sample.
        client: score → the value for all samples as one input.
    """

    samples: list[dict[str, Value]]
    client: dict[str, Value]

    @classmethod
    def failed(
        cls, error: Exception, scores: Sequence[Score], n: int, effort: Effort
    ) -> ClientScores:
        """No number for any of the n samples, and why."""
        gone = Value.without("failed", describe_error(error))
        names = [s.name for s in scores]
        each = (*(names if effort.blocks else ()), *(JOINT if effort.joint else ()))
        return cls(
            [dict.fromkeys(each, gone) for _ in range(n)],
            dict.fromkeys(names, gone) if effort.joint else {},
        )


def score_client(
    inputs: ScoreInputs,
    mismatch: Mismatch,
    scores: Sequence[Score],
    settings: Settings,
    effort: Effort,
) -> ClientScores:
    """Scores of each sample of a client, and of all of them together.

    Args:
        inputs: the samples, with their offset, at the surrogate.
        mismatch: of the surrogate.
        scores: to compute.
        settings: noise, prior and pixels.
        effort: what it may cost.

    Returns:
        A value with a status for everything asked; nothing that goes wrong with one
        part keeps the others from being computed.

    Raises:
        ValueError: for inputs without an offset.
    """
    offset = inputs.offset
    if offset is None:
        raise ValueError("scores of a client need the offset x − μ, got None.")
    rounding = inputs.rounding()
    samples: list[dict[str, Value]] = [{} for _ in rounding]
    if effort.blocks:
        blocks = _blocks(inputs, offset, mismatch, effort, rounding)
        for values, spectrum in zip(samples, blocks, strict=True):
            values.update({s.name: value_of(s, spectrum, settings) for s in scores})
    client: dict[str, Value] = {}
    if effort.joint:
        try:
            joint = _Joint(inputs, offset, mismatch, effort, rounding)
            errors = joint.errors(settings)
            spectrum = joint.spectrum()
            client = {s.name: value_of(s, spectrum, settings) for s in scores}
        except Exception as error:
            reason = describe_error(error)
            _log.warning("leakwatch could not score a client: %s", reason)
            gone = Value.without("failed", reason)
            errors = [gone] * len(samples)
            client = {s.name: gone for s in scores}
        for values, joint_error in zip(samples, errors, strict=True):
            values[JOINT[0]] = joint_error
            values[JOINT[1]] = psnr(joint_error, offset.shape[1], settings.data_range)
    return _doubted(ClientScores(samples, client), scores, mismatch)


def _doubted(
    result: ClientScores, scores: Sequence[Score], mismatch: Mismatch
) -> ClientScores:
    """The same, where δ itself may be rounding."""
    if mismatch.judged:
        return result
    share = 100 * min(mismatch.doubt, 1.0)
    status = Status(
        "estimated",
        f"{share:.0f} % of the mismatch may be rounding, so that this is an order of "
        f"magnitude: the update is nearly the exact gradient of the samples",
    )
    doubted = {s.name for s in scores if "noise" in s.needs} | set(JOINT)

    def rough(values: dict[str, Value]) -> dict[str, Value]:
        return {
            name: Value(value.number, status)
            if name in doubted and value.status.word == "ok"
            else value
            for name, value in values.items()
        }

    return ClientScores([rough(row) for row in result.samples], rough(result.client))


# -- each sample, as if the attacker knew all others -----------------------------------


def _blocks(
    inputs: ScoreInputs,
    offset: Float[Tensor, "n d_x"],
    mismatch: Mismatch,
    effort: Effort,
    rounding: Sequence[float],
) -> Iterator[SampleSpectrum]:
    """With J_i/N for J and g_ŵ(X), to which the sample contributes g_i/N, for g.

    A sample that can't be measured has a ``failure``; the others are unaffected.
    """
    jacobian = inputs.jacobian
    n, d_theta, d_x = jacobian.shape
    size, unit = mismatch.direction
    along = jacobian.normalized_rmatvec(unit.to(jacobian.dtype).expand(n, -1)).double()
    delta = mismatch.delta.to(jacobian.dtype).expand(n, -1)
    pulled = jacobian.normalized_rmatvec(delta).double()
    for i in range(n):
        scale = float(jacobian.scale[i]) / n
        if d_x > LARGEST_EXACT:
            spectrum = SampleSpectrum.without(
                Value.without("not computed", _too_large(d_x))
            )
        elif not math.isfinite(float(jacobian.norm[i])):
            spectrum = SampleSpectrum.failed(NOT_FINITE)
        else:
            try:
                gram = jacobian.gram(i, max_memory=effort.max_memory)
                spectrum = from_matrices(
                    [Formed(gram.h, scale, rounding[i], along[i], size, gram.traces)],
                    d_theta=d_theta,
                    eps=torch.finfo(jacobian.dtype).eps,
                    eigenvectors=True,
                )[0]
            except Exception as error:
                spectrum = SampleSpectrum.failed(
                    Status("failed", describe_error(error))
                )
        yield _with_mismatch(
            replace(
                spectrum,
                d_x=d_x,
                rank=min(d_theta, d_x),
                loss_of=functools.partial(Value, float(inputs.losses[i])),
                grad_norm=Value(float(jacobian.norm[i]) / n),
            ),
            mismatch,
            pulled[i] * scale,
            offset[i],
        )


def _with_mismatch(
    spectrum: SampleSpectrum, mismatch: Mismatch, pulled: Tensor, offset: Tensor
) -> SampleSpectrum:
    """The same, with the mismatch for a perturbation."""
    largest = float(mismatch.delta.abs().max())
    return replace(
        spectrum.perturbed(pulled, offset, largest, mismatch.entry_error),
        why_no_spectrum=_too_large(spectrum.d_x),
        pixel_range=_NO_RANGE,
    )


def _too_large(n: int) -> str:
    """Why there is no spectrum of n input elements."""
    return (
        f"needs the whole spectrum, which is computed for up to {LARGEST_EXACT} input "
        f"elements and a Jacobian that fits max_memory; there are {n} elements"
    )


# -- all samples together --------------------------------------------------------------


@final
class _Joint:
    """The joint Jacobian of one client, dense where it is small."""

    def __init__(
        self,
        inputs: ScoreInputs,
        offset: Float[Tensor, "n d_x"],
        mismatch: Mismatch,
        effort: Effort,
        rounding: Sequence[float],
    ) -> None:
        jacobian = inputs.jacobian
        n, d_theta, d_x = jacobian.shape
        self._inputs, self._offset, self._mismatch = inputs, offset, mismatch
        self._products = effort.products
        self._operator = JointJacobian(jacobian)
        self._scale = self._operator.scale
        self._norm, self._unit = mismatch.direction
        ratio = (jacobian.scale / jacobian.scale.max()).tolist()
        self._rounding = math.hypot(
            *(r * one for r, one in zip(ratio, rounding, strict=True))
        )
        self._dense: Float[Tensor, "d_theta n"] | None = None
        mib = 2 * d_theta * n * d_x * jacobian.dtype.itemsize / 2**20
        if n * d_x <= LARGEST_EXACT and mib <= effort.max_memory:
            columns = [jacobian.dense(i) / (n * self._scale) for i in range(n)]
            self._dense = torch.cat(columns, dim=1)

    def errors(self, settings: Settings) -> list[Value]:
        """Error in each sample of the best estimator of all of them."""
        if settings.noise_std is None:
            nothing = Value.without("not computed", "needs noise_std")
            return [nothing] * len(self._offset)
        factor: FactorOperator = self._operator
        products, tol = self._products, 1e-3
        if self._dense is not None:
            factor = DenseFactor(self._dense[None])
            products, tol = factor.size, _EXACT_TOL
        return joint_errors(
            factor,
            self._mismatch.delta,
            self._offset,
            scale=self._scale,
            epsilon=(settings.noise_std / settings.prior_std) ** 2,
            rounding=self._rounding,
            uncertainty=self._mismatch.entry_error,
            products=products,
            tol=tol,
        )

    def spectrum(self) -> SampleSpectrum:
        """What is known of all samples as one input."""
        delta = self._mismatch.delta.to(self._operator.dtype)[None]
        dense = self._dense
        return _with_mismatch(
            replace(
                self._by_products() if dense is None else self._exactly(dense),
                d_x=self._operator.size,
                rank=min(self._operator.rows, self._operator.size),
                loss_of=functools.partial(Value, float(self._inputs.losses.mean())),
                grad_norm=Value(self._norm),
            ),
            self._mismatch,
            self._operator.backward(delta)[0].double() * self._scale,
            self._offset.reshape(-1),
        )

    def _exactly(self, dense: Tensor) -> SampleSpectrum:
        j = dense.double()
        along = j.mT @ self._unit
        formed = Formed(j.mT @ j, self._scale, self._rounding, along, self._norm)
        eps = torch.finfo(dense.dtype).eps
        return from_matrices([formed], d_theta=len(j), eps=eps, eigenvectors=True)[0]

    def _by_products(self) -> SampleSpectrum:
        squared = self._scale**2
        jacobian = self._inputs.jacobian
        plain = self._ends(JointJacobian(jacobian), 0)
        cos_max = cos_min = NO_DIRECTION
        if self._norm > 0:
            factor = squared / self._norm**2
            cosine = self._ends(JointJacobian(jacobian, self._unit), 1)
            cos_max, cos_min = (value.times(factor) for value in cosine)
        return SampleSpectrum(
            lambda_max=plain[0].times(squared),
            lambda_min=plain[1].times(squared),
            cos_max=cos_max,
            cos_min=cos_min,
            trace=Value.without(
                "not computed", "Σλ is not estimated for several samples"
            ),
            precision=Precision(factor=self._rounding).scaled(squared),
        )

    def _ends(self, factor: JointJacobian, lost: int) -> tuple[Value, Value]:
        # λ_min of so many elements is out of reach of products.
        extremes = ends(
            factor,
            smallest=False,
            tol=_TOL[factor.dtype],
            max_matvecs=self._products,
        )
        top, eps = float(extremes.lambda_max[0]), torch.finfo(factor.dtype).eps
        precision = Precision.of_products(top, factor.size, eps, self._rounding)
        zero = factor.rows - lost < factor.size
        return end_values(extremes, [precision], zero=zero)[0]
