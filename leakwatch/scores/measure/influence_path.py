r"""The Bayesian influence function, integrated along the noise.

I²F is a derivative: how the best reconstruction moves with the perturbation δ, at
δ = 0. Its Bayesian form is the solution of a linear problem for the same reason. For a
perturbation that is not small, the gradient's Jacobian changes on the way. Let noise
and prior be switched on together: at time t the attacker has g(x) + tδ, and a prior
whose mean is x + t(μ − x). At t = 0 the best reconstruction is x, and from there it
moves with the velocity of the linear problem at the place that it has reached,

.. math:: \frac{dx}{dt} = \Bigl(\frac{H(x)}{s^2} + C^{-1}\Bigr)^{-1}
    \Bigl(\frac{J(x)^T\delta}{s^2} + C^{-1}(\mu - x_0)\Bigr),

up to terms with second derivatives of the gradient times a residual, which
Gauss–Newton leaves out too. One step of Euler's rule is the linear prediction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from leakwatch.derivatives.jacobian import GradientJacobian
from leakwatch.scores.settings import Settings

__all__ = ["InfluencePath", "follow"]

# Rounding of an eigenvalue that is not small beside the prior's, which is 1.
_NOTICEABLE = 1e-3


@final
@dataclass(frozen=True, eq=False)
class InfluencePath:
    """Where the best reconstruction ends.

    Attributes:
        error: its distance from the true input, pixel units.
        discretisation: estimate of what finitely many steps leave out of the path,
            pixel units: half a step for each change of the velocity, added up over the
            path (for a velocity that changes in one direction only, the error of
            Euler's rule to first order).
    """

    error: float
    discretisation: float


def follow(
    jacobian: GradientJacobian,
    sample: int,
    settings: Settings,
    *,
    delta: Float[Tensor, " d_theta"],
    offset: Float[Tensor, " d_x"],
    max_memory: float | None = None,
) -> InfluencePath:
    """Follows one sample's reconstruction while noise and prior are switched on.

    Args:
        jacobian: at the true inputs.
        sample: which of them.
        settings: ``noise_std``, the prior, and ``influence_steps`` of equal length;
            each takes one Gram matrix at a new image. With 1 the result is
            ``i2f_bayes`` for this δ.
        delta: perturbation of this sample's gradient.
        offset: x − μ, pixel units, float64.
        max_memory: MiB for the Jacobian, as in :meth:`GradientJacobian.gram`.

    Returns:
        The distance, NaN where the path leaves what the network can evaluate.

    Raises:
        ValueError: without ``noise_std``.
    """
    if settings.noise_std is None:
        raise ValueError("an influence path needs noise_std in its settings, got None.")
    steps = settings.influence_steps
    x = jacobian.x[sample : sample + 1]
    step = torch.zeros_like(offset)
    last: Tensor | None = None
    changes = 0.0
    for _ in range(steps):
        moved = x.double() + (step * jacobian.input_scale).view_as(x)
        if not bool(torch.isfinite(moved).all()):
            return InfluencePath(math.nan, math.nan)
        at = jacobian.at_image(sample, moved.to(x)[0])
        velocity = _velocity(at, settings, delta, offset, max_memory)
        if last is not None:
            changes += float((velocity - last).norm())
        last = velocity
        step = step + velocity / steps
    return InfluencePath(float(step.norm()), changes / (2 * steps))


def _velocity(
    at: GradientJacobian,
    settings: Settings,
    delta: Tensor,
    offset: Tensor,
    max_memory: float | None,
) -> Tensor:
    """dx/dt at one image, solved in coordinates where the prior is N(0, I)."""
    noise = settings.noise_std or 1.0
    h = at.gram(0, max_memory=max_memory).h
    pulled = at.normalized_rmatvec(delta[None])[0].double()
    ratio = float(at.scale[0]) / noise
    rank = min(at.shape[1:])
    if settings.prior is None:
        r = settings.prior_std
        towards = ratio / noise * r * pulled - offset / r
        return r * _solve((ratio * r) ** 2 * h, towards, rank)
    root = settings.prior.root.to(offset)
    drawn = torch.linalg.solve_triangular(root, offset[:, None], upper=False)[:, 0]
    towards = ratio / noise * (root.T @ pulled) - drawn
    velocity = root @ _solve(ratio**2 * (root.T @ h @ root), towards, rank)
    return velocity


def _solve(part: Tensor, right: Tensor, rank: int) -> Tensor:
    """Solves with I + a positive semidefinite matrix of at most this rank."""
    if not bool(torch.isfinite(part).all()):
        return torch.full_like(right, math.nan)
    # Eigenvalues that rounding can have made of zero.
    floor = len(part) * torch.finfo(part.dtype).eps * float(part.diagonal().sum())
    if floor < _NOTICEABLE:
        system = part + torch.eye(len(part), dtype=part.dtype, device=part.device)
        return torch.cholesky_solve(right[:, None], torch.linalg.cholesky(system))[:, 0]
    values, vectors = torch.linalg.eigh(part)
    values[: len(values) - rank] = 0.0
    values = torch.where(values > floor, values, torch.zeros_like(values))
    solved: Tensor = vectors @ ((vectors.T @ right) / (1 + values))
    return solved
