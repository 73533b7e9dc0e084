"""Errors of the attackers who don't and who do know the defense, without attacking."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from leakwatch.checks import check_integer, check_number
from leakwatch.defenses.base import Knowledge, Shared
from leakwatch.defenses.covariance import Covariance, linear_error
from leakwatch.defenses.eigen.basis import Basis
from leakwatch.defenses.linear_maps import (
    Chain,
    Deflation,
    LinearMap,
    Scaling,
    Selection,
    mapped,
)
from leakwatch.defenses.mixing import Mixing
from leakwatch.defenses.samples import Samples

__all__ = ["PredictedErrors", "predicted_errors"]


@final
@dataclass(frozen=True, eq=False)
class PredictedErrors:
    """E‖x̂ − x‖² of linearised recovery, squared pixels where their scale is known.

    Divide by d_x for the mean squared error of a pixel.

    Attributes:
        naive: of the attacker who takes all noise for isotropic.
        adaptive: of the attacker who knows the defense; of mixtures, the partner too.
        hidden: directions that are not resolved for the naive attacker, whatever the
            noise. With a prior each counts R² in both errors; without, they count
            nothing, and both errors are of the directions that are left.
        adaptive_hidden: the same for the adaptive attacker, who may see fewer.
    """

    naive: Float[Tensor, " n"]
    adaptive: Float[Tensor, " n"]
    hidden: Int[Tensor, " n"]
    adaptive_hidden: Int[Tensor, " n"]


def predicted_errors(
    shared: Shared,
    samples: Samples,
    *,
    prior_std: float | None = None,
    queries: int = 1,
) -> PredictedErrors:
    r"""Expected squared error of the Gauss–Newton attacker, naive and adaptive.

    Near x the message is g + J(x' − x) + b + noise, with covariance Σ and a part b that
    is not random. Along u_i, with q_i = v_iᵀΣv_i:

    - *naive*: least squares with the noise taken for isotropic, s² = tr Σ/d_θ,
      ε = s²/R²: :math:`\sum_i (\lambda_i (q_i + (v_i^T b)^2) + \epsilon^2 R^2) /
      (\lambda_i + \epsilon)^2`; without a prior Σ (q_i + (v_iᵀb)²)/λ_i. For isotropic
      noise these are the squares of ``i2f_bayes`` and ``i2f``.
    - *adaptive*: :math:`\mathrm{tr}(J^T \Sigma^{-1} J + I/R^2)^{-1}`, with J of what is
      left: pruned entries dropped; where clipping bit, (C/‖g‖)(I − ĝĝᵀ)J, the
      derivative of what is shared. With b known it does no harm. Of a mixture
      αx + (1 − α)x_p, J is that of the mixed loss at the mixture, and its errors are
      divided by α² and its prior variance by as much: R² for what J does not show.

    With a prior of its own shape the adaptive attacker is the best linear one, so its
    error is the least of all linear ones. It is no bound: noise along the v_i leaves
    clean what the gradient does across them, and an attacker who knows the v_i reads
    hidden directions from its curvature, see ``docs/measurements/defenses.md``.

    Args:
        shared: what a defense gave for these samples, one message each.
        samples: the samples.
        prior_std: R, standard deviation of a pixel, for attackers who know what pixels
            are like; ``None`` for those who don't.
        queries: independent answers to the same query that are averaged.

    Returns:
        Both errors.

    Raises:
        ValueError: for messages of batches, or numbers out of range.
    """
    if prior_std is not None:
        check_number("prior_std", prior_std, example=0.25)
    queries = check_integer("queries", queries)
    if len(shared.gradient) != len(samples):
        raise ValueError(
            f"{len(shared.gradient)} messages for {len(samples)} samples; predictions "
            f"are for one sample in each message."
        )
    basis, knowledge = samples.basis, shared.knowledge
    covariance = knowledge.covariance
    if covariance is not None:
        covariance = covariance.scaled(1 / queries)
    if not knowledge.closed_form:
        raise ValueError(
            "the covariance of this noise is not known in closed form; protect samples "
            "one by one."
        )
    naive = _naive(shared, basis, covariance, prior_std)
    hidden = (~basis.resolved).sum(1)
    adaptive, left = _adaptive(shared, samples, covariance, prior_std)
    return PredictedErrors(naive, adaptive, hidden, left)


def _naive(
    shared: Shared, basis: Basis, covariance: Covariance | None, r: float | None
) -> Tensor:
    lam = basis.visible
    arrives = torch.zeros_like(lam)
    eps = torch.zeros_like(lam[:, :1])
    if covariance is not None:
        arrives = arrives + covariance.along(basis)
        if r is not None:
            size = shared.gradient.shape[1]
            eps = (covariance.total / size / r**2)[:, None]
    if shared.bias is not None:
        arrives = arrives + basis.pull(shared.bias).square()
    # Quotients one by one: λ² leaves the range of float64 where λ does not.
    safe = torch.where(basis.resolved, lam + eps, 1.0)
    terms = arrives / safe * (lam / safe)
    if r is not None:
        terms = terms + r**2 * (eps / safe).square()
    unseen = 0.0 if r is None else r**2
    return torch.where(basis.resolved, terms, unseen).sum(1)


def _adaptive(
    shared: Shared,
    samples: Samples,
    covariance: Covariance | None,
    r: float | None,
) -> tuple[Tensor, Tensor]:
    basis, knowledge = samples.basis, shared.knowledge
    hidden = (~basis.resolved).sum(1)
    if knowledge.mixing is not None:
        return _unmixed(knowledge.mixing, samples, r)
    if covariance is None:
        errors = linear_error(torch.zeros_like(basis.eigenvalues), basis, r)
    else:
        errors = covariance.best_error(basis, r)
    for i in range(len(samples)):
        if knowledge.kept is not None and not bool(knowledge.kept[i].any()):
            hidden[i] = basis.resolved.shape[1]
            errors[i] = 0.0 if r is None else r**2 * hidden[i]
            continue
        through = _left(knowledge, shared.clean[i].double(), i)
        if through is None:
            continue
        own = samples.through(mapped(samples.gradients, through), i).basis
        variance = torch.zeros_like(own.eigenvalues)
        if covariance is not None:
            # Only clipping comes with noise, and that is isotropic.
            variance = variance + covariance.total[i] / shared.gradient.shape[1]
        hidden[i] = (~own.resolved).sum()
        errors[i] = linear_error(variance, own, r)[0]
    return errors, hidden


def _unmixed(
    mixing: Mixing, samples: Samples, r: float | None
) -> tuple[Tensor, Tensor]:
    errors, hidden = [], []
    for i in range(len(samples)):
        at = Samples(
            mixing.gradient_map(samples.gradients, i),
            mixing.mixed[i : i + 1],
            mixing.y[i : i + 1],
            input_scale=samples.jacobian.input_scale,
            max_memory=samples.max_memory,
        )
        hidden.append((~at.basis.resolved).sum(1))
        no_noise = torch.zeros_like(at.basis.eigenvalues)
        errors.append(linear_error(no_noise, at.basis, r))
    return torch.cat(errors), torch.cat(hidden)


def _left(knowledge: Knowledge, clean: Tensor, row: int) -> LinearMap | None:
    """What derives the message from the gradient, where it is not the identity."""
    if knowledge.kept is not None:
        if bool(knowledge.kept[row].all()):
            return None
        return Selection(knowledge.kept[row].nonzero()[:, 0], len(clean))
    norm = float(clean.norm())
    if knowledge.clip is None or norm <= knowledge.clip:
        return None
    across = Deflation((clean / norm)[None], clean.new_zeros(1))
    return Chain(across, Scaling(torch.full_like(clean, knowledge.clip / norm)))
