"""The update as a gradient somewhere between the weights before and after training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from leakwatch.attacks.base import SearchResult
from leakwatch.attacks.matching import distances
from leakwatch.attacks.matching.engines import UpdatePath
from leakwatch.attacks.matching.layerwise import LayerwisePath
from leakwatch.attacks.matching.priors import Priors
from leakwatch.attacks.matching.selection import PathFor, UpdatePathName, opened
from leakwatch.attacks.optimizers.first_order import DescentSettings, ScheduleName
from leakwatch.attacks.updates.base import UpdateAttack, UpdateTask
from leakwatch.attacks.updates.descent import (
    Values,
    descend_to_update,
    for_each,
    pieces,
)
from leakwatch.attacks.updates.match import LayeredMatch
from leakwatch.checks import check_choice, check_integer, check_number
from leakwatch.derivatives import GradientMap
from leakwatch.weight_update import WeightUpdate

__all__ = ["SurrogateAttack", "SurrogateObjective"]

# Gradients and cotangents of one piece stay below this, and so do its samples.
_CHUNK_BYTES = 512 * 2**20
_CHUNK_SAMPLES = 80


@final
@dataclass(frozen=True)
class SurrogateAttack(UpdateAttack):
    r"""Takes w_0 − w_T for a gradient at ŵ = α w_0 + (1 − α) w_T.

    .. math:: 1 - \cos\bigl(w_0 - w_T, \nabla_w \ell(\hat w, x)\bigr)
        + \lambda \, \mathrm{TV}(x)

    Zhu, Yao and Blaschko, "Surrogate Model Extension (SME): A Fast and Accurate Weight
    Update Attack on Federated Learning" (ICML 2023), Eq. 5 and Algorithm 1: images and
    α go down together, each by a step of Adam from the gradient at the same point.
    With α fixed at 1 it is their baseline, inverting gradients on the update.

    One evaluation costs one gradient of the local loss and one backward pass through
    it, in which α takes part: dα is the same pass' derivative along w_0 − w_T.

    Args:
        name: recorded in results.
        lr: step size of the images, network-input units.
        steps: evaluations of the gradient.
        schedule: of both step sizes, see
            :func:`leakwatch.attacks.optimizers.first_order.schedule`.
        tv: weight λ of ``matching.priors.total_variation``. The published
            code has 0.01 on half of what is computed here.
        box: whether images are kept in the range of pixels, at the start too.
        alpha: α_0, in [0, 1].
        alpha_lr: step size of α; 0 keeps α_0.
        alpha_every: α moves at every so many steps, as many times as far, since its
            derivative is the only part of a step that inverting gradients does without.
            As published: 1.
        path: ``"layers"`` for all clients at once, ``"plain"`` for any eager network,
            one client after the other, or ``"auto"``.
        chunk_size: attacks evaluated at once; default from images and weights.

    Raises:
        ValueError: for values that make no sense; quotes them.

    Example:
        >>> import torch
        >>> from leakwatch.attacks import PixelScale, Start
        >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(9, 3))
        >>> w = torch.cat([p.detach().flatten() for p in net.parameters()])
        >>> labels = torch.tensor([[0, 2]])
        >>> final = w + 0.01 * torch.randn(1, 30)
        >>> update = WeightUpdate(w, final, labels, (1, 3, 3), samples=2)
        >>> result = SurrogateAttack(steps=5).run(
        ...     GradientMap(net), update, pixels=PixelScale(), start=Start.normal())
        >>> result.images.shape, bool(0 <= result.alpha[0] <= 1)
        (torch.Size([1, 2, 1, 3, 3]), True)
    """

    takes_one_gradient: ClassVar[bool] = True
    name: str = "sme"
    lr: float = 1.0
    steps: int = 1000
    schedule: ScheduleName = "step"
    tv: float = 0.005
    box: bool = True
    alpha: float = 0.5
    alpha_lr: float = 0.001
    alpha_every: int = 8
    path: UpdatePathName = "auto"
    chunk_size: int | None = None

    def __post_init__(self) -> None:
        self._descent()  # checks what both have
        Priors(tv=self.tv)
        if self.chunk_size is not None:
            check_integer("chunk_size", self.chunk_size, example=8)
        check_number("alpha", self.alpha, "[0, 1]", example=0.5)
        check_number("alpha_lr", self.alpha_lr, "[0, inf)", example=1e-3)
        check_integer("alpha_every", self.alpha_every, example=8)
        check_choice("path", self.path, get_args(UpdatePathName))

    def search(self, task: UpdateTask) -> SearchResult:
        """Descends in images and α."""
        with opened(task.gradients, self.path) as path_for:
            objective = SurrogateObjective(
                task.gradients,
                task.update,
                task.labels,
                path_for,
                Priors(tv=self.tv),
                every=self.alpha_every if self.alpha_lr else 0,
                chunk_size=self.chunk_size,
            )
            return descend_to_update(
                task,
                task.first_images(box=self.box),
                objective,
                self._descent(),
                alpha=self.alpha,
                alpha_lr=self.alpha_lr * self.alpha_every,
            )

    @property
    def doubt(self) -> str:
        """That an update of many steps is no gradient, where α is not learned."""
        if self.alpha_lr:
            return ""
        return (
            "A gradient at one place can't be all of an update of many steps; sme "
            "looks for a better place."
        )

    def _descent(self) -> DescentSettings:
        return DescentSettings(
            lr=self.lr, steps=self.steps, schedule=self.schedule, box=self.box
        )


@final
class SurrogateObjective:
    """1 − cos(w_0 − w_T, ∇ℓ(ŵ, x)) plus priors, see :class:`SurrogateAttack`.

    Args:
        gradients: gives the precision.
        update: w_0 and w_T of all clients.
        labels: of all clients.
        path_for: finds the path, see ``matching.selection.opened``.
        priors: weight of the total variation.
        every: the derivative in α is formed at every so many steps, 0 for never.
        chunk_size: attacks at once.
    """

    def __init__(
        self,
        gradients: GradientMap,
        update: WeightUpdate,
        labels: Int[Tensor, "clients N"],
        path_for: PathFor,
        priors: Priors,
        *,
        every: int,
        chunk_size: int | None = None,
    ) -> None:
        dtype, device = gradients.dtype, labels.device
        self._initial = update.initial.to(device, dtype)
        # In the update's own precision: a difference of close numbers.
        self._difference = update.difference.to(device, dtype)
        self._labels = labels
        self._path_for = path_for
        self._path: UpdatePath | LayeredMatch | None = None
        self._priors = priors
        self._every = every
        self._distance = distances.get("cosine")
        if chunk_size is None:
            each = 6 * dtype.itemsize * update.initial.numel()
            chunk_size = max(1, _CHUNK_SAMPLES // update.samples)
            chunk_size = max(1, min(chunk_size, _CHUNK_BYTES // each))
        self._chunk = chunk_size

    def __call__(
        self,
        x: Float[Tensor, "attacks N ..."],
        alpha: Float[Tensor, " attacks"],
        clients: Int[Tensor, " attacks"],
        step: int,
    ) -> Values:
        """See :class:`leakwatch.attacks.updates.descent.UpdateObjective`."""
        learns = self._every > 0 and step % self._every == 0
        # One after the other, so that those of one client share its products.
        order = torch.argsort(clients, stable=True)
        placed = torch.empty_like(order)
        placed[order] = torch.arange(len(order), device=order.device)
        done = [
            self._piece(x[rows], alpha[rows], part, learns)
            for rows, part in pieces(clients[order], order, self._chunk)
        ]
        distance, gradient, slope = (
            (rows[0] if len(rows) == 1 else torch.cat(rows))[placed]
            for rows in zip(*done, strict=True)
        )
        objective = distance + self._priors.add_to(x, gradient)
        return Values(distance, objective, gradient, slope if learns else None)

    def _piece(
        self, x: Tensor, alpha: Tensor, clients: slice, learns: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        y = for_each(self._labels[clients], len(x))
        if self._path is None:
            w = self._weights(alpha, clients)
            path = self._path_for(w, x, y)
            self._path = (
                LayeredMatch(path, self._initial, self._difference)
                if isinstance(path, LayerwisePath)
                else path
            )
        if isinstance(self._path, LayeredMatch):
            match = self._path(x, y, alpha, clients, learns)
            slope = alpha if match.slope is None else match.slope
            return match.distance, match.images, slope
        difference = for_each(self._difference[clients], len(x))
        graph = self._path.graph_at(self._weights(alpha, clients), x, y)
        flat = graph.flat
        distance, cotangent = self._distance.compare(
            flat, self._distance.prepare(difference), torch.empty_like(flat)
        )
        pulled = graph.pull(cotangent, along=difference if learns else None)
        slope = alpha if pulled.slope is None else pulled.slope
        return distance, pulled.images, slope

    def _weights(self, alpha: Tensor, clients: slice) -> Tensor:
        """ŵ of each attack."""
        difference = for_each(self._difference[clients], len(alpha))
        return torch.addcmul(self._initial, difference, alpha[:, None] - 1)
