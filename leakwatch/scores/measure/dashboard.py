"""The way of dashboards: J along leading components of a prior, and λ_1.

A callback that nobody should notice can't form all of H. What it looks at instead says
how recognisable an image is, see :mod:`leakwatch.scores.measure.components`; a few
products with H from where these tangents lead say λ_1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor

from leakwatch.derivatives.jacobian import GradientJacobian
from leakwatch.scores.measure.components import Components, leading_components
from leakwatch.scores.measure.inputs import ScoreInputs
from leakwatch.scores.measure.plan import Plan
from leakwatch.scores.measure.sample_spectrum import (
    NO_DIRECTION,
    NOT_ASKED,
    NOT_FINITE,
    Precision,
    SampleSpectrum,
)
from leakwatch.scores.result import Value, from_probes, judged
from leakwatch.scores.settings import Settings
from leakwatch.spectrum import Estimate
from leakwatch.status import Status

__all__ = ["from_components"]

# Products with H from the best that the components show.
_PRODUCTS = 5
_NOT_SEEN = Value.without(
    "not computed",
    "the smallest eigenvalues can't be seen from the leading components; use "
    "precision='exact'",
)


def from_components(
    inputs: ScoreInputs, plan: Plan, settings: Settings
) -> Iterator[SampleSpectrum]:
    """What the leading components of the prior tell about each sample.

    Args:
        inputs: the samples.
        plan: what to measure, and the memory for it.
        settings: noise and prior.
    """
    jacobian, prior = inputs.jacobian, settings.prior
    if prior is None:
        raise ValueError("components are those of a prior, and there is none.")
    jacobian.products.most_held = min(plan.held, jacobian.products.most_held)
    found = leading_components(
        jacobian,
        prior,
        None if plan.any_noise else settings.noise_std,
        max_memory=plan.max_memory,
        pixels=inputs.pixels,
        data_range=settings.data_range,
    )
    extremes: Sequence[_Extreme | None] = [None] * len(found)
    if plan.largest:
        largest = max(one.count for one in found)
        extremes = _extremes(jacobian, prior.leading(largest), found, plan)
    # How many digits a network loses is its own property, not that of a sample.
    lost = inputs.part(slice(0, 1)).rounding(directions=1)[0]
    eps, d_x = torch.finfo(jacobian.dtype).eps, jacobian.shape[2]
    norms = jacobian.norm.tolist()
    for i, (one, extreme) in enumerate(zip(found, extremes, strict=True)):
        if not math.isfinite(norms[i]) or not bool(one.gram.isfinite().all()):
            yield SampleSpectrum.failed(NOT_FINITE)
            continue
        scale = float(jacobian.scale[i])
        trace, spread = one.trace
        top = trace / scale**2 if extreme is None else extreme.largest
        precision = Precision.of_products(top, d_x, eps, lost).scaled(scale**2)
        cosine = NOT_ASKED
        if plan.cosine:
            cosine = NO_DIRECTION
            if extreme is not None and norms[i] > 0:
                cosine = extreme.cosine(precision, scale, norms[i])
        rounded = 2 * precision.factor * math.sqrt(trace * d_x)
        yield SampleSpectrum(
            lambda_max=NOT_ASKED
            if extreme is None
            else extreme.value(precision, scale**2),
            lambda_min=_NOT_SEEN,
            cos_max=cosine,
            cos_min=_NOT_SEEN,
            trace=from_probes(
                Estimate(trace, spread, trace, trace),
                Estimate(trace, spread, max(trace - rounded, 0.0), trace + rounded),
                "Σλ",
            ),
            precision=precision,
            components=one,
            scale=scale,
        )


@final
class _Extreme(NamedTuple):
    """λ_1 of H̃ and of its downdate, with their residuals."""

    largest: float
    residual: float
    downdated: float
    apart: float

    def value(self, precision: Precision, unit: float) -> Value:
        """λ_1 of H.

        Args:
            precision: of H.
            unit: H/H̃.
        """
        return _judged(self.largest * unit, self.residual * unit, precision)

    def cosine(self, precision: Precision, scale: float, norm: float) -> Value:
        """The same of the cosine distance's Hessian.

        Args:
            precision: of H.
            scale: J/J̃.
            norm: ‖g‖.
        """
        unit = scale**2
        plain = _judged(self.downdated * unit, self.apart * unit, precision)
        return plain.times(norm**-2)


def _judged(number: float, residual: float, precision: Precision) -> Value:
    if not math.isfinite(number):
        return Value(math.nan, NOT_FINITE)
    wide = 2 * precision.factor * math.sqrt(max(number, 0.0)) + precision.factor**2
    if residual > number:
        reason = (
            f"a lower bound, residual {residual:.1e} after {_PRODUCTS} products; use "
            "precision='exact'"
        )
        return Value(number, Status("not converged", reason))
    value = judged(number, number - wide, number + wide, "the largest eigenvalue")
    if not value.status.usable or residual <= 0.1 * number:
        return value
    reason = (
        f"at least this, and probably within {100 * residual / number:.0f} %, after "
        f"{_PRODUCTS} products; precision='exact' has more"
    )
    return Value(number, Status("estimated", reason))


def _extremes(
    jacobian: GradientJacobian,
    rows: Float[Tensor, "k d_x"],
    found: Sequence[Components],
    plan: Plan,
) -> list[_Extreme]:
    """λ_1 of H̃ of each sample, and of the cosine Hessian.

    Rayleigh and Ritz in the Krylov space of the best that the components have: values
    are lower bounds, and some eigenvalue is within the residual.
    """
    place = jacobian.device
    axes = rows / rows.norm(dim=1, keepdim=True)
    start = torch.stack([_start(one) @ axes[: one.count] for one in found])
    q = start.to(place)
    along = None
    operator = jacobian.normal(cosine=plan.cosine)
    if plan.cosine and operator.along is not None:
        along = operator.along.double()
    plain = jacobian.normal()
    basis: list[Tensor] = []
    images: list[Tensor] = []
    for _ in range(min(_PRODUCTS, q.shape[1])):
        for _ in range(2):
            for other in basis:
                q = q - (q * other).sum(1, keepdim=True) * other
        size = q.norm(dim=1, keepdim=True)
        # What is left may be nothing: then there is no more to be found.
        q = torch.where(size > 1e-12, q / size.clamp_min(1e-300), 0.0)
        image = plain.matvec(q.to(jacobian.dtype)).double()
        basis.append(q)
        images.append(image)
        q = image / image.norm(dim=1, keepdim=True).clamp_min(1e-300)
    v, w = torch.stack(basis, 1), torch.stack(images, 1)  # (batch, m, d_x)
    h = v @ w.mT
    answers = [_top((h + h.mT) / 2, v, w)]
    if along is not None:
        t = (v @ along[:, :, None])[:, :, 0]
        down = w - t[:, :, None] * along[:, None]
        h = v @ down.mT
        answers.append(_top((h + h.mT) / 2, v, down))
    both = torch.cat([torch.stack(a, 1) for a in answers], 1)
    if along is None:
        both = torch.cat([both, torch.full_like(both, math.nan)], 1)
    return [_Extreme(*row) for row in both.tolist()]


def _top(h: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """The largest Ritz value and its residual."""
    lost = ~h.isfinite().all(2).all(1)
    values, vectors = torch.linalg.eigh(h.masked_fill(lost[:, None, None], 0.0))
    top, y = values[:, -1], vectors[:, :, -1:]
    residual = ((w - top[:, None, None] * v) * y).sum(1).norm(dim=1)
    nothing = lost.double().masked_fill(lost, math.nan)
    return top.clamp_min(0) + nothing, residual + nothing


def _start(one: Components) -> Float[Tensor, " k"]:
    """Where the components expect λ_1 of both, in coordinates of unit vectors."""
    sizes = one.norms.diagonal().sqrt()
    g = (one.gram / sizes) / sizes[:, None]
    if not bool(g.isfinite().all()):
        return torch.zeros_like(sizes)
    matrices = [g]
    if one.along is not None:
        along = one.along / sizes
        matrices.append(g - along[:, None] * along)
    tops = [torch.linalg.eigh(m)[1][:, -1] for m in matrices]
    # Of equal sign, so that their sum is not next to nothing.
    return sum((t * t[t.abs().argmax()].sign() for t in tops), torch.zeros_like(sizes))
