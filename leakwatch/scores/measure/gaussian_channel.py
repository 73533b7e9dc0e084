"""The linear Gaussian channel from image to noisy gradient, with a Gaussian prior.

With the prior covariance C = L Lᵀ, the channel falls apart into independent ones along
the eigenvectors w_i of Lᵀ H L: a prior variance of 1, a gain μ_i, and an error of L w_i
in the image per unit of error. For C = R²I these are μ_i = λ_i R² and L w_i = R u_i.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from leakwatch.scores.measure.influence_path import InfluencePath
from leakwatch.scores.measure.sample_spectrum import Evidence
from leakwatch.scores.result import ACCURATE, USABLE, Value, judged
from leakwatch.scores.settings import Settings
from leakwatch.status import Status

_WHAT = "the directions that the gradient shows least matter here, and they"
_EPS64 = float(torch.finfo(torch.float64).eps)


@final
@dataclass(frozen=True, eq=False)
class Channel:
    """Independent scalar channels, one per direction, descending in gain.

    Attributes:
        gain: μ_i, ``(d_x,)``; noise variance s² leaves a posterior variance of
            1/(1 + μ_i/s²).
        least: lower bounds of them, given rounding.
        most: upper bounds.
        weight: ‖L w_i‖², the mean squared error in the image per unit of variance.
        basis: L w_i as columns, ``(d_x, d_x)``; ``None`` when there are no
            eigenvectors.
    """

    gain: Float[Tensor, " d_x"]
    least: Float[Tensor, " d_x"]
    most: Float[Tensor, " d_x"]
    weight: Float[Tensor, " d_x"]
    basis: Float[Tensor, "d_x d_x"] | None

    def judged(self, formula: Callable[[Tensor], float]) -> Value:
        """A monotone function of the gains, with the status that rounding gives it."""
        ends = (formula(self.least), formula(self.most))
        return judged(formula(self.gain), min(ends), max(ends), _WHAT)

    def squared_error(self, gain: Tensor, noise_std: float) -> float:
        """Mean squared norm of the best estimator's error, for some gains."""
        return float((self.weight * posterior(gain, noise_std)).sum())


def posterior(gain: Tensor, noise_std: float) -> Tensor:
    """Variance that is left of a prior variance of 1: s²/(s² + μ)."""
    return noise_std**2 / (noise_std**2 + gain)


def channel(evidence: Evidence, settings: Settings) -> Channel | None:
    """The channel of one sample; ``None`` without the spectrum that it needs.

    Args:
        evidence: of the sample.
        settings: the prior.
    """
    if "channel" not in evidence.memo:
        build = _isotropic if settings.prior_covariance is None else _correlated
        evidence.memo["channel"] = build(evidence, settings)
    made: Channel | None = evidence.memo["channel"]
    return made


def _isotropic(evidence: Evidence, settings: Settings) -> Channel | None:
    lam, r = evidence.eigenvalues, settings.prior_std
    if lam is None:
        return None
    low, high = evidence.precision.bounds(lam, evidence.rank)
    basis = None if evidence.eigenvectors is None else evidence.eigenvectors * r
    return Channel(
        lam * r**2, low * r**2, high * r**2, torch.full_like(lam, r**2), basis
    )


def _correlated(evidence: Evidence, settings: Settings) -> Channel | None:
    lam, vectors = evidence.eigenvalues, evidence.eigenvectors
    if lam is None or vectors is None:
        return None
    root = settings.prior_root.to(lam.device)
    half = root.T @ (vectors * lam.sqrt())
    ascending, columns = torch.linalg.eigh(half @ half.T)
    gain, columns = ascending.flip(0).clamp_min(0), columns.flip(1)
    gain[evidence.rank :] = 0.0
    basis = root @ columns
    precision = evidence.precision.scaled(float(torch.linalg.matrix_norm(root, 2)) ** 2)
    low, high = precision.bounds(gain, evidence.rank)
    rounding = len(gain) * _EPS64 * float(gain[0])
    return Channel(
        gain,
        (low - rounding).clamp_min(0),
        torch.where(high > gain, high + rounding, high),
        basis.square().sum(0),
        basis,
    )


def error_for_given(
    evidence: Evidence, settings: Settings, found: Channel, noise_std: float
) -> Value:
    """‖x' − x‖ of the best estimator when the noise is the δ at hand.

    (H/s² + C⁻¹)⁻¹ (Jᵀδ/s² − C⁻¹(x − μ)), the error of the maximum of the posterior;
    or, with ``influence_steps``, the end of the path that begins in this direction.
    """
    basis = found.basis
    if basis is None or evidence.pulled is None:
        return evidence.no_spectrum()
    if evidence.offset is None:
        return Value.without(
            "not computed", "the error for a given delta needs the offset x − μ too"
        )
    # basisᵀ C⁻¹ (x − μ) = Wᵀ L⁻¹ (x − μ), the offset in prior standard deviations.
    if settings.prior_covariance is None:
        whitened = basis.T @ evidence.offset / settings.prior_std**2
    else:
        whitened = torch.linalg.solve(basis, evidence.offset)
    s2 = noise_std**2
    towards = basis.T @ evidence.pulled / s2 - whitened
    doubt = found.weight.sqrt() * evidence.pulled_error / s2

    def size(vector: Tensor, gain: Tensor) -> float:
        return float((basis @ (vector * posterior(gain, noise_std))).norm())

    ends = [size(towards, gain) for gain in (found.least, found.most)]
    slack = size(doubt, found.least)
    linear = judged(
        size(towards, found.gain),
        max(min(ends) - slack, 0.0),
        max(ends) + slack,
        _WHAT,
    )
    return linear if evidence.path is None else _along(evidence.path, linear)


def _along(path: InfluencePath | Status, linear: Value) -> Value:
    """The end of the path; rounding is judged where it begins."""
    if not linear.status.usable:
        return linear
    if isinstance(path, Status):
        return Value(math.nan, path)
    number, left = path.error, path.discretisation
    if not math.isfinite(number):
        return Value.without(
            "failed",
            "on the way of the integrated prediction the gradient or its Jacobian is "
            "not finite; use influence_steps=1",
        )
    if left <= ACCURATE * number:
        return Value(number, linear.status)
    reason = f"the last of its steps may be off by {left:.1e}; raise influence_steps"
    word = "estimated" if left <= USABLE * number else "not converged"
    return Value(number, Status(word, reason))


def noise_for_squared_error(found: Channel, gain: Tensor, wanted: float) -> float:
    """The s at which the mean squared error is ``wanted``; 0 when it is so without.

    Args:
        found: the channel.
        gain: its gains, or bounds of them.
        wanted: below the prior's own Σ ‖L w_i‖².
    """
    shown = gain > 0
    if float(found.weight[~shown].sum()) >= wanted:
        return 0.0
    # In log s² the error is monotone; beyond these ends it is constant.
    low = math.log(float(gain[shown].min())) - 80.0
    high = math.log(float(gain[shown].max())) + 80.0
    for _ in range(100):
        middle = (low + high) / 2
        below = found.squared_error(gain, math.exp(middle / 2)) < wanted
        low, high = (middle, high) if below else (low, middle)
    return math.exp((low + high) / 4)
