"""What an attacker who knows the defense does before matching gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, final

import torch
from jaxtyping import Float
from torch import Tensor

from leakwatch.checks import check_number
from leakwatch.defenses.base import Shared
from leakwatch.defenses.linear_maps import Chain, LinearMap, Selection, mapped
from leakwatch.derivatives import GradientMap

__all__ = ["Observation", "averaged", "observed"]


@final
@dataclass(frozen=True, eq=False)
class Observation:
    """A message as an adaptive attacker matches it, with the map that goes with it.

    Any attack takes it in place of map and message: with ``leakwatch.attacks``,
    ``SharedGradient(o.message, labels[:, None], shape, noise_std=o.noise_std)`` and
    ``attack.run(o.gradients, …)``. Give the labels; they can't be read from a mapped
    gradient.

    Attributes:
        gradients: x ↦ L g(x).
        message: L g̃, ``(1, rows)``.
        noise_std: standard deviation of the noise left on each entry; 0 for none.
        distance: which distance to match by: ``"cosine"`` where the length of the
            message says no more than that it was clipped.
    """

    gradients: GradientMap
    message: Float[Tensor, "one rows"]
    noise_std: float
    distance: Literal["l2", "cosine"] = "l2"


def observed(
    gradients: GradientMap,
    shared: Shared,
    row: int = 0,
    *,
    queries: int = 1,
    least: float = 1e-3,
) -> Observation:
    """What an attacker who knows the defense matches instead of the message itself.

    - *Noise* of known covariance Σ: L = s(Σ + …)^−½ whitens it; directions with much
      noise and little signal lose their say. For :class:`EigenNoise` this projects the
      noised directions away, and the attacker's prior fills them in.
    - *Pruning*: entries that were set to zero are left out.
    - *Clipping* where it bit: the cosine distance.
    - *Mixing*: the loss is mixed as the defense mixes it, so that what matches is the
      mixture x'; then :meth:`Mixing.unmixed`, or
      :func:`leakwatch.defenses.mixing.estimate` without the partner.

    The naive attacker matches ``shared.gradient`` with the map itself.

    Args:
        gradients: the map that made the gradients.
        shared: what a defense gave.
        row: which message.
        queries: of how many answers to the same query ``shared`` is the mean, see
            :func:`averaged`; only the noise left changes with it.
        least: floor of the noise, relative to the root mean square over entries or to
            the noisiest direction, as rounding and curvature put one.

    Raises:
        IndexError: if there is no such message.
        ValueError: for noise whose covariance is not known (a batch under
            :class:`EigenNoise`), a message without entries, or numbers out of range.
    """
    if not 0 <= row < len(shared.gradient):
        raise IndexError(
            f"row {row} of {len(shared.gradient)} messages; give a position from 0."
        )
    check_number("queries", queries, example=100)
    check_number("least", least, example=1e-3)
    knowledge = shared.knowledge
    if not knowledge.closed_form:
        raise ValueError(
            "the covariance of a batch's noise along directions of its samples is not "
            "known here; protect samples one by one, or attack the message as it is."
        )
    through: LinearMap | None = None
    std = 0.0
    if knowledge.kept is not None:
        index = knowledge.kept[row].nonzero()[:, 0]
        if len(index) == 0:
            raise ValueError(
                f"every entry of message {row} was pruned: there is nothing to match."
            )
        through = Selection(index, knowledge.kept.shape[1])
    if knowledge.covariance is not None:
        white, std = knowledge.covariance.scaled(1 / queries).whitening(row, least)
        through = white if through is None else Chain(through, white)
    if knowledge.mixing is not None:
        gradients = knowledge.mixing.gradient_map(gradients, row)
    message = shared.gradient[row : row + 1]
    clipped = (
        knowledge.clip is not None
        and float(shared.clean[row].double().norm()) > knowledge.clip
    )
    if through is not None:
        gradients = mapped(gradients, through)
        message = through.apply(message.double()).to(message)
    return Observation(gradients, message, std, "cosine" if clipped else "l2")


def averaged(answers: Sequence[Shared]) -> Shared:
    """The mean of answers to the same query: same sample, same weights.

    Independent noise shrinks: the variance by their number, what is known of the
    covariance with it (so leave ``queries`` of :func:`observed` at 1). What a defense
    does in the same way every time, pruning and clipping, stays.

    Args:
        answers: what a defense gave for the same gradients.

    Returns:
        One of them with the mean message.

    Raises:
        ValueError: for no answers, or for answers to different queries.
    """
    if not answers:
        raise ValueError("there is nothing to average; give at least one answer.")
    first = answers[0]
    for other in answers[1:]:
        if not torch.equal(first.clean, other.clean):
            raise ValueError(
                "these are answers to different queries: their clean gradients differ."
            )
        if first.knowledge.mixing is not None:
            raise ValueError(
                "mixtures with other partners are other images; attack each of them, "
                "take the mixing off, and average the reconstructions."
            )
    m = len(answers)
    mean = torch.stack([a.gradient.double() for a in answers]).mean(0)
    knowledge = first.knowledge
    covariance = knowledge.covariance
    return replace(
        first,
        gradient=mean.to(first.gradient),
        variance=first.variance / m,
        knowledge=replace(
            knowledge,
            covariance=None if covariance is None else covariance.scaled(1 / m),
        ),
    )
