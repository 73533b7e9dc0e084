"""One descent for all attacks on updates: images, and α where it is learned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple, Protocol, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from leakwatch.attacks.base import SearchResult
from leakwatch.attacks.matching.objective import Evaluation
from leakwatch.attacks.optimizers.descent import DescentObjective, descend
from leakwatch.attacks.optimizers.first_order import Adam, DescentSettings
from leakwatch.attacks.optimizers.state import DescentState
from leakwatch.attacks.updates.base import UpdateTask
from leakwatch.attacks.verdict import noise_and_grey

__all__ = [
    "Alphas",
    "UpdateObjective",
    "Values",
    "descend_to_update",
    "for_each",
    "pieces",
]


class Values(NamedTuple):
    """The objective of some attacks.

    Attributes:
        distance: of the updates, without priors, ``(attacks,)``.
        objective: what the best step is judged by.
        gradient: of what is minimised, in the images.
        slope: of it in α, ``None`` where α is not learned.
    """

    distance: Float[Tensor, " attacks"]
    objective: Float[Tensor, " attacks"]
    gradient: Float[Tensor, "attacks images ..."]
    slope: Float[Tensor, " attacks"] | None


class UpdateObjective(Protocol):
    """Evaluates attacks in rows."""

    def __call__(
        self,
        x: Float[Tensor, "attacks images ..."],
        alpha: Float[Tensor, " attacks"],
        clients: Int[Tensor, " attacks"],
        step: int,
    ) -> Values:
        """The objective at these images and α.

        Args:
            x: images, network-input units.
            alpha: α of each attack.
            clients: which client each is after.
            step: how many steps were made before.
        """


@final
class Alphas:
    """α of every attack, with an optimiser of its own, and where it was best.

    Zhu, Yao and Blaschko, "Surrogate Model Extension" (ICML 2023), Algorithm 1: one
    step of Adam on α for each on the images, from the gradient at the same point.

    Args:
        start: α_0, in [0, 1].
        like: gives number, precision and device of the attacks.
        lr: step size, in units of α; 0 keeps α where it is.
    """

    def __init__(
        self, start: float, like: Float[Tensor, " attacks"], lr: float
    ) -> None:
        self.now = like.new_full((len(like),), start)
        self.best = self.now.clone()
        self._lr = lr
        self._adam = Adam(self.now[:, None])

    def keep(self, rows: Int[Tensor, " some"], better: Bool[Tensor, " some"]) -> None:
        """Remembers α of those attacks whose images were remembered."""
        self.best[rows] = torch.where(better, self.now[rows], self.best[rows])

    def move(
        self,
        rows: Int[Tensor, " some"],
        slope: Float[Tensor, " some"],
        lr_factor: float,
        lost: Bool[Tensor, " some"],
    ) -> None:
        """One step; attacks that left the finite numbers go back to their best.

        Args:
            rows: the attacks.
            slope: derivative in their α.
            lr_factor: on the step size.
            lost: those that left the finite numbers.
        """
        if not self._lr:
            return
        slopes, back = torch.zeros_like(self.now), torch.zeros_like(self.now).bool()
        slopes[rows] = torch.where(lost, torch.zeros_like(slope), slope)
        back[rows] = lost
        sizes = torch.full_like(self.now, self._lr * lr_factor)
        moved = self._adam.step(
            self.now[:, None].clone(), slopes, slopes[:, None], sizes
        )
        self.now = torch.where(back, self.best, moved[:, 0].clamp(0.0, 1.0))
        if bool(lost.any()):
            self._adam.reset(back)


@final
class _WithAlpha(DescentObjective):
    """An objective whose α goes down together with the images."""

    def __init__(self, objective: UpdateObjective, alphas: Alphas) -> None:
        self._objective, self._alphas = objective, alphas
        self._values: Values | None = None

    def evaluate(self, state: DescentState, step: int) -> Evaluation:
        """See :class:`DescentObjective`."""
        alpha = self._alphas.now[state.rows]
        self._values = self._objective(state.images, alpha, state.target, step)
        return Evaluation(*self._values[:3])

    def keep_best(self, state: DescentState) -> None:
        """Remembers α of the best images so far."""
        self._alphas.keep(state.rows, state.kept)

    def move(self, state: DescentState, lr_factor: float) -> None:
        """One step of α, where its derivative was formed."""
        values = self._values
        if values is not None and values.slope is not None:
            lost = ~torch.isfinite(values.objective)
            self._alphas.move(state.rows, values.slope, lr_factor, lost)


def descend_to_update(
    task: UpdateTask,
    x: Float[Tensor, "restarts clients images ..."],
    objective: UpdateObjective,
    settings: DescentSettings,
    *,
    alpha: float = float("nan"),
    alpha_lr: float = 0.0,
) -> SearchResult:
    """Descends from these images, all clients and restarts at once.

    Args:
        task: what is given, and the limits.
        x: first images.
        objective: what is minimised.
        settings: of the descent.
        alpha: where α starts.
        alpha_lr: its step size, 0 to keep it.

    Returns:
        The best of each restart, with its α, and what images leave that know nothing.
    """
    grid = x.shape[:2]
    alphas = Alphas(alpha, x.flatten(0, 1)[:, 0].flatten(1)[:, 0], alpha_lr)
    result = descend(
        x,
        _WithAlpha(objective, alphas),
        settings,
        task.pixels,
        deadline=task.deadline,
        progress=task.progress,
    )
    result = replace(result, alpha=alphas.best.view(grid))
    base = _uninformed(task, result, objective, settings.steps)
    return replace(result, uninformed=base)


def _uninformed(
    task: UpdateTask, result: SearchResult, objective: UpdateObjective, steps: int
) -> Float[Tensor, " clients"]:
    """The distance that noise or plain grey leaves, whichever is less."""
    assert result.alpha is not None
    like = result.images[0]
    guesses = noise_and_grey(
        tuple(like.shape),
        task.pixels,
        task.update.index,
        dtype=like.dtype,
        device=like.device,
    )
    clients = torch.arange(task.update.clients, device=like.device)
    alpha = result.best_of(result.alpha)
    distances = [
        objective(guess, alpha, clients, steps).distance.double() for guess in guesses
    ]
    return torch.minimum(*distances)


def pieces(clients: Tensor, order: Tensor, size: int) -> Iterator[tuple[Tensor, slice]]:
    """Attacks that are evaluated at once, and the clients that they are after.

    Each client of a piece has equally many attacks in it.

    Args:
        clients: of all attacks, ascending.
        order: where they stand.
        size: most attacks of a piece.
    """
    distinct, counts = torch.unique_consecutive(clients, return_counts=True)
    first, runs = 0, list(zip(distinct.tolist(), counts.tolist(), strict=True))
    while runs:
        client, each = runs[0]
        many = 1
        while (
            many < len(runs)
            and runs[many] == (client + many, each)
            and (many + 1) * each <= size
        ):
            many += 1
        for rows in torch.split(order[first : first + many * each], size):
            yield rows, slice(client, client + many)
        first += many * each
        del runs[:many]


def for_each(t: Tensor, attacks: int) -> Tensor:
    """Rows of clients as rows of their attacks."""
    each = attacks // len(t)
    return t if each == 1 else t.repeat_interleave(each, 0)
