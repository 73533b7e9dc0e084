"""The message of a step: gradients of samples as they make up what is consumed."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from leakwatch.defenses import Budget, Defense, Reduction, Samples
from leakwatch.defenses.base import averaging

__all__ = ["clip_factor", "combination", "relative_to"]

# How far a clipped gradient may be from a multiple of the unclipped one.
_PARALLEL = 1e-3


def combination(
    defense: Defense,
    samples: Samples,
    share: Float[Tensor, " n"],
    reduction: Reduction,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor, Tensor, float]:
    """One message for samples that don't have equal parts in it.

    Their gradients, in proportion to their parts, are the rows that the defense
    combines, so that no part is larger than 1. What that leaves to multiply with is 1
    for the mean over equal micro-batches; the budget of `EigenNoise` is stated for the
    message, that of `DPSGD` for a sum or mean before it.

    Args:
        defense: the defense.
        samples: the samples.
        share: the factor on each sample's gradient.
        reduction: how the loss combines samples of a micro-batch.
        generator: random stream.

    Returns:
        Message, clean gradient, expected message, ``(d_θ,)`` each, float64; and
        E‖noise‖² of the message.
    """
    each = samples.gradient
    if defense.needs == "samples":  # what it shares of each is not a multiple of g
        made = defense.protect(each, generator=generator, samples=samples)
        weights, squares = share, share.square()
    else:
        parts = share / averaging(len(samples), reduction)
        most = float(parts.max())
        rows = each * (parts / most).to(each)[:, None]
        budget = _own_budget(defense)
        if budget is not None and budget.unit != "relative":
            scaled = Budget(budget.value / most, budget.unit)
            defense = replace(defense, budget=scaled)  # type: ignore[type-var]
        made = defense.protect_batch(
            rows, generator=generator, samples=samples, reduction=reduction
        )
        weights = torch.tensor([most], dtype=torch.float64, device=share.device)
        squares = weights.square()
    message = weights @ made.gradient.double()
    clean = weights @ made.clean.double()
    mean = clean if made.bias is None else clean + weights @ made.bias.double()
    return message, clean, mean, float(squares.to(made.variance) @ made.variance)


def relative_to(defense: Defense, norm: float) -> Defense:
    """A defense with its relative budget stated for a gradient of this norm.

    Only of one that is shaped by J: its noise is added to the gradient consumed, which
    is another than that of its samples, each alone in inference mode, under BatchNorm
    and dropout. One that isn't a dataclass, or has no relative budget, stays as it is.

    Args:
        defense: the defense.
        norm: ‖g‖ of the gradient consumed, after clipping.

    Example:
        >>> from leakwatch.defenses import EigenNoise
        >>> relative_to(EigenNoise(Budget(0.5)), 3.0).budget
        Budget(value=1.5, unit='norm')
    """
    budget = _own_budget(defense)
    if budget is None or budget.unit != "relative":
        return defense
    absolute = Budget(budget.value * norm, "norm")
    changed: Defense = replace(defense, budget=absolute)  # type: ignore[type-var]
    return changed


def clip_factor(
    before: Float[Tensor, " d_theta"], after: Float[Tensor, " d_theta"]
) -> float:
    """c, where clipping by norm left c · g of a gradient g.

    Args:
        before: g.
        after: what clipping left.

    Raises:
        RuntimeError: if that is no multiple of it.

    Example:
        >>> clip_factor(torch.tensor([3.0, 4.0]), torch.tensor([1.5, 2.0]))
        0.5
    """
    square = float(before.square().sum())
    if square == 0 or torch.equal(before, after):
        return 1.0
    factor = float(before @ after) / square
    if float((after - factor * before).norm()) > _PARALLEL * float(after.norm()):
        raise RuntimeError(
            "clipping changed the direction of the gradient, so that it is no longer "
            "that of the samples; clip by norm (gradient_clip_algorithm='norm')."
        )
    return factor


def _own_budget(defense: Defense) -> Budget | None:
    """That of a defense shaped by J which can be given another."""
    if defense.needs != "jacobian" or not is_dataclass(defense):
        return None
    if not any(field.init and field.name == "budget" for field in fields(defense)):
        return None
    return defense.budget
