"""How well one gradient can stand for many local steps.

Zhu, Yao & Blaschko, "Surrogate Model Extension" (ICML 2023), section 5.1: the gradients
along the local steps lie mostly in a plane (Figure 3), and so some point between w_0
and w_T has a gradient nearly parallel to w_0 − w_T (Figure 4).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from leakwatch.checks import check_integer
from leakwatch.derivatives.runtime import Criterion, Weights
from leakwatch.derivatives.verification import refuse_stray_reads
from leakwatch.federated.local import ClientUpdate
from leakwatch.federated.objective import Objective
from leakwatch.weight_update import Segment, search_segment

__all__ = ["Segment", "Subspace", "principal_subspace", "segment_similarity"]

# Columns of the step gradients that are cast to float64 at once.
_COLUMNS = 2**16


@final
@dataclass(frozen=True, eq=False)
class Subspace:
    """How much of each step's gradient lies in the best k-dimensional subspace.

    Attributes:
        dimension: k.
        ratios: ‖P_k g_t‖ / ‖g_t‖ of each step, in [0, 1]; NaN where g_t is zero.
        singular_values: all T of them, descending, of the T×d_θ matrix of gradients.
    """

    dimension: int
    ratios: Float[Tensor, " T"]
    singular_values: Float[Tensor, " T"]

    @property
    def shares(self) -> Float[Tensor, " T"]:
        """‖P_k g_t‖² / ‖g_t‖² of each step."""
        return self.ratios.square()

    @property
    def total(self) -> float:
        """Σ_t ‖P_k g_t‖² / Σ_t ‖g_t‖²; no other k-dimensional subspace has more."""
        energy = self.singular_values.square()
        return float(energy[: self.dimension].sum() / energy.sum())

    @property
    def worst(self) -> float:
        """The least ratio of all steps, whose mean over clients is in Table 1."""
        return float(self.ratios[~self.ratios.isnan()].min())


def principal_subspace(
    gradients: Float[Tensor, "T d_theta"], dimension: int = 2
) -> Subspace:
    r"""The first k principal directions of the local steps' gradients.

    Without centring, as in Zhu, Yao & Blaschko (2023), section 5.1: with the singular
    value decomposition :math:`G = U S V^T`, P_k projects on the first k columns of V.
    Taken from the T×T matrix :math:`G G^T = U S^2 U^T` in float64, since

    .. math:: \|P_k g_t\|^2 = \sum_{i \le k} s_i^2 U_{ti}^2,

    so that memory beyond the gradients is T² numbers. Singular values below about
    1e-8 of the largest are rounding.

    The paper's gradients are those of all N samples at each w_t: ``recorded`` of
    ``train_client(..., record="full")``; those of the batches are ``record="steps"``.

    Args:
        gradients: one per local step.
        dimension: k.

    Returns:
        The share of each step's gradient in the subspace.

    Raises:
        TypeError: for no tensor, such as what a training without a record has kept, or
            if k is no integer.
        ValueError: for another shape, k out of range, values that are not finite, or
            gradients that are all zero.

    Example:
        >>> found = principal_subspace(torch.diag(torch.tensor([3.0, 2.0, 1.0])))
        >>> found.ratios.round(decimals=6).tolist(), round(found.total, 4)
        ([1.0, 1.0, 0.0], 0.9286)
    """
    if not isinstance(gradients, Tensor):
        raise TypeError(
            f"gradients must be a tensor of shape (T, d_θ), got a "
            f"{type(gradients).__name__}; train_client(..., record='full') keeps them "
            f"in recorded."
        )
    if gradients.ndim != 2 or 0 in gradients.shape:
        raise ValueError(
            f"gradients must have shape (T, d_θ), one row per local step, got "
            f"{tuple(gradients.shape)}."
        )
    dimension = check_integer("dimension", dimension)
    if dimension > len(gradients):
        raise ValueError(
            f"dimension must be between 1 and the {len(gradients)} steps, got "
            f"{dimension!r}."
        )
    gram = _gram(gradients)
    if not bool(torch.isfinite(gram).all()):
        raise ValueError(
            "the gradients hold NaN or infinity: local training diverged; lower lr."
        )
    if not bool(gram.diagonal().any()):
        raise ValueError("all gradients are zero: there is no direction to find.")
    values, vectors = torch.linalg.eigh(gram)
    values, vectors = values.flip(0).clamp(min=0), vectors.flip(1)
    inside = vectors[:, :dimension].square() @ values[:dimension]
    return Subspace(
        dimension=dimension,
        ratios=(inside / gram.diagonal()).sqrt().clamp(max=1),
        singular_values=values.sqrt(),
    )


def segment_similarity(
    module: nn.Module,
    update: ClientUpdate,
    *,
    points: int = 21,
    criterion: Criterion | None = None,
) -> Segment:
    """How parallel gradients between w_0 and w_T are to the weight update.

    At inference mode, the mode in which attacks and scores evaluate the network. α is
    the share of w_0, as in Equation 5 of Zhu, Yao & Blaschko (2023); their released
    code counts from w_0 instead. The best α is found to about 1e-4.

    Args:
        module: the network; its own weights don't matter, its buffers do.
        update: of one client.
        points: of the grid over α, both ends included.
        criterion: as in training. Default: accurate cross-entropy.

    Returns:
        The cosine over α, and its maximum.

    Raises:
        TypeError: if ``points`` is no integer.
        ValueError: for fewer than 2 points, a client that diverged or did not move, a
            module with another number of weights, or a gradient that is zero at all
            points.

    Example:
        >>> from leakwatch.federated import LocalTraining, train_client
        >>> net, x, y = nn.Linear(3, 2), torch.rand(4, 3), torch.tensor([0, 1, 1, 0])
        >>> update = train_client(net, x, y, LocalTraining(1, batch_size=4, lr=0.1))
        >>> found = segment_similarity(net, update)  # one step: the gradient at w_0
        >>> round(found.at_start, 6), found.best_alpha > 0.9
        (1.0, True)
    """
    points = check_integer("points", points, smallest=2)
    objective = Objective(module, criterion, update.initial.dtype)
    _check_update(update, objective)
    with objective.evaluation(update.x.device.type) as weights:
        refuse_stray_reads(objective.loss, weights, update.x, update.y)
        segment = search_segment(
            lambda alpha: _cosine_at(objective, weights, update, alpha),
            points=points,
            tolerance=1e-4,
        )
    if math.isnan(segment.best):
        raise ValueError(
            f"the gradient of client {update.client} is zero or not finite at all "
            f"{points} points, so that it has no direction there; take more points."
        )
    return segment


def _cosine_at(
    objective: Objective, weights: Weights, update: ClientUpdate, alpha: float
) -> float:
    point = alpha * update.initial + (1 - alpha) * update.final
    gradient = objective.flat_gradient(objective.at(weights, point), update.x, update.y)
    pair = update.difference.double(), gradient.double()
    return float(torch.nn.functional.cosine_similarity(*pair, dim=0, eps=0))


def _check_update(update: ClientUpdate, objective: Objective) -> None:
    if update.diverged:
        raise ValueError(
            f"client {update.client} diverged: its weights hold NaN or infinity."
        )
    if not bool(update.difference.any()):
        raise ValueError(
            f"client {update.client} did not move: w_T is w_0, and no direction is "
            f"parallel to nothing."
        )
    if len(update.initial) != objective.size:
        raise ValueError(
            f"the update has {len(update.initial):,} weights, the module trains "
            f"{objective.size:,}; pass the module that the client trained."
        )


def _gram(gradients: Tensor) -> Tensor:
    """G Gᵀ in float64, a block of columns at a time."""
    gram = gradients.new_zeros(len(gradients), len(gradients), dtype=torch.float64)
    for block in torch.split(gradients, _COLUMNS, 1):
        wide = block.double()
        gram += wide @ wide.mT
    return gram
