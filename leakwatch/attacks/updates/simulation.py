"""The update as what it is: the result of all local steps, simulated."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import final, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from leakwatch.attacks.base import SearchResult
from leakwatch.attacks.matching import distances
from leakwatch.attacks.matching.engines import UpdatePath
from leakwatch.attacks.matching.selection import PathFor, UpdatePathName, opened
from leakwatch.attacks.optimizers.first_order import DescentSettings
from leakwatch.attacks.pixels import PixelScale
from leakwatch.attacks.updates.base import UpdateAttack, UpdateTask
from leakwatch.attacks.updates.descent import Values, descend_to_update
from leakwatch.attacks.updates.local_steps import LocalSteps
from leakwatch.attacks.updates.priors import (
    OrderPrior,
    excess,
    joined,
    order_distance,
    squared_variation,
)
from leakwatch.attacks.updates.simulation_cost import SimulationCost, simulation_cost
from leakwatch.checks import check_choice, check_integer, check_number
from leakwatch.derivatives import GradientMap
from leakwatch.weight_update import LocalTraining, WeightUpdate

__all__ = ["SimulationAttack", "SimulationObjective", "layer_weights", "spread_labels"]


@final
@dataclass(frozen=True)
class SimulationAttack(UpdateAttack):
    r"""Trains on guessed images as the client did, and compares where that ends.

    .. math:: f_t \sum_l e^{-l} \|\Delta_l\|^2 / k + w_\mathrm{tv} \mathrm{TV}^2
        + w_\mathrm{clip} \mathrm{clip} + w_\mathrm{ord} \mathrm{ord}

    with Δ the difference of simulated and shared update over the learning rate, l the
    layer, counted from the input, and k the batches that the guessed images make.
    Dimitrov, Balunović, Konstantinov and Vechev, "Data Leakage in Federated Averaging"
    (DLFA, TMLR 2022), Sections 4.1 and 4.3, with the weights and schedules of their
    code. Where an epoch has several batches, every epoch has images of its own, which
    the order prior draws together, since the client shuffles its samples every epoch in
    an order that nobody knows; in the end they are matched and averaged.

    One evaluation costs E·⌈N/B⌉ gradients and as many backward passes through one
    gradient. Memory is bounded by ``memory_limit``: where the graphs of all steps don't
    fit, some are formed twice (see ``local_steps.LocalSteps``).

    Args:
        name: recorded in results.
        lr: step size of Adam, network-input units.
        decay: factor on it every ``decay_every`` steps, continuously.
        decay_every: see ``decay``.
        steps: evaluations.
        tv: weight of :func:`leakwatch.attacks.updates.priors.squared_variation`.
        clip: weight of :func:`leakwatch.attacks.updates.priors.excess`.
        order: weight of :func:`leakwatch.attacks.updates.priors.order_distance`.
        order_prior: its kind.
        fit: f_t at the start and from the middle on, geometric between.
        every_epoch: whether every epoch has images of its own; otherwise all share one
            set in fixed batches. ``None``: if an epoch has several batches. Where it is
            one, its order changes nothing, and one set says all that there is.
        memory_limit: bytes for weights and graphs of the simulation.
        most_seconds: that all steps may be estimated to take, ``None`` for any; more
            is refused before it starts.
        path: see :class:`leakwatch.attacks.updates.surrogate.SurrogateAttack`.
        chunk_size: attacks simulated at once; default from images and weights.

    Raises:
        ValueError: for values that make no sense; quotes them.
    """

    name: str = "dlfa"
    lr: float = 0.4
    decay: float = 0.995
    decay_every: int = 10
    steps: int = 400
    tv: float = 0.001
    clip: float = 2.0
    order: float = 1000.0
    order_prior: OrderPrior = "l2_mean"
    fit: tuple[float, float] = (1.0, 2.0)
    every_epoch: bool | None = None
    memory_limit: float = 4 * 2**30
    most_seconds: float | None = None
    path: UpdatePathName = "auto"
    chunk_size: int | None = None

    def __post_init__(self) -> None:
        self._descent()  # checks what both have
        if self.chunk_size is not None:
            check_integer("chunk_size", self.chunk_size, example=8)
        for name in ("tv", "clip", "order"):
            check_number(name, getattr(self, name), "[0, inf)", example=1.0)
        for name in ("decay", "decay_every", "memory_limit", "most_seconds"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), "(0, inf]", example=10.0)
        if not all(f > 0 and math.isfinite(f) for f in self.fit):
            raise ValueError(
                f"fit must be two positive numbers, at the start and from the middle "
                f"on, got {self.fit}."
            )
        check_choice("order_prior", self.order_prior, get_args(OrderPrior))
        check_choice("path", self.path, get_args(UpdatePathName))

    def check_update(self, update: WeightUpdate) -> None:
        """Refuses updates whose local training is not known.

        Raises:
            ValueError: there.
        """
        self.training_of(update)

    def search(self, task: UpdateTask) -> SearchResult:
        """Descends in images of every epoch, and joins them.

        Raises:
            ValueError: if the estimate is over a limit.
        """
        update = task.update
        cost = self.cost(task.gradients, update, restarts=task.restarts)
        cost.check(self.memory_limit, self.most_seconds)
        training = self.training_of(update)
        labels = spread_labels(task.labels, training.batch_size)
        x = task.first_images(box=False, sets=self.sets(training, update.samples))
        with opened(task.gradients, self.path) as path_for:
            objective = SimulationObjective(
                self, task.gradients, update, labels, path_for, task.pixels, cost
            )
            result = descend_to_update(task, x, objective, self._descent())
        labels = labels.expand(task.restarts, -1, -1)
        images = joined(result.images.flatten(0, 1), labels.flatten(0, 1))
        images = images.view(*x.shape[:2], *images.shape[1:])
        return replace(result, images=images, labels=labels)

    def cost(
        self, gradients: GradientMap, update: WeightUpdate, *, restarts: int = 1
    ) -> SimulationCost:
        """What a run will take, from one local step that is really made.

        Args:
            gradients: the network.
            update: what the clients shared.
            restarts: tries per client.

        Returns:
            Bytes and seconds.

        Raises:
            ValueError: if the local training is not known.
        """
        training = self.training_of(update)
        return simulation_cost(
            gradients,
            update,
            training,
            path=self.path,
            attacks=update.clients * restarts,
            evaluations=self.steps + 1,
            chunk_size=self.chunk_size,
            memory_limit=self.memory_limit,
        )

    def sets(self, training: LocalTraining, samples: int) -> int:
        """How many images stand for each sample.

        Args:
            training: of the clients.
            samples: N of each.
        """
        every = self.every_epoch
        if every is None:
            every = samples > training.batch_size
        return training.epochs if every else 1

    def fit_weight(self, step: int) -> float:
        """f_t, which grows geometrically until half of the steps are done."""
        first, last = self.fit
        return float(first * (last / first) ** min(1.0, 2 * step / self.steps))

    def training_of(self, update: WeightUpdate) -> LocalTraining:
        """The local training, which must be known.

        Raises:
            ValueError: where it is not.
        """
        if update.training is None:
            raise ValueError(
                f"{self.name} simulates the local steps, so it must know them: give "
                f"the update training=LocalTraining(epochs, batch_size, lr), or use "
                f"'sme', which needs none of them."
            )
        return update.training

    def _descent(self) -> DescentSettings:
        return DescentSettings(
            lr=self.lr,
            steps=self.steps,
            schedule=lambda step, _: self.decay ** (step / self.decay_every),
            box=False,
        )


@final
class SimulationObjective:
    """The objective of a :class:`SimulationAttack`.

    Its values are divided by f_t, so that steps at different f_t can be compared; its
    gradients are not.

    Args:
        attack: the settings.
        gradients: gives precision and the order of weights.
        update: what the clients shared, with the local training.
        labels: of all clients, in the order of the guessed images.
        path_for: finds the path.
        pixels: range of the images.
        cost: says how much is done at once.
    """

    def __init__(
        self,
        attack: SimulationAttack,
        gradients: GradientMap,
        update: WeightUpdate,
        labels: Int[Tensor, "clients N"],
        path_for: PathFor,
        pixels: PixelScale,
        cost: SimulationCost,
    ) -> None:
        training = attack.training_of(update)
        dtype, device = gradients.dtype, labels.device
        self._attack = attack
        self._training = training
        self._samples = update.samples
        self._sets = attack.sets(training, update.samples)
        self._initial = update.initial.to(device, dtype)
        self._difference = update.difference.to(device, dtype)
        self._labels = labels
        self._path_for = path_for
        self._path: UpdatePath | None = None
        self._pixels = pixels
        self._cost = cost
        self._distance = distances.get("cosine")
        self._prepared = self._distance.prepare(self._difference)
        groups = -(-self._sets * update.samples // training.batch_size)
        scale = 1 / (groups * training.lr**2)
        self._weight = layer_weights(gradients.sizes()).to(device, dtype) * scale

    def __call__(
        self,
        x: Float[Tensor, "attacks images ..."],
        alpha: Float[Tensor, " attacks"],
        clients: Int[Tensor, " attacks"],
        step: int,
    ) -> Values:
        """See :class:`leakwatch.attacks.updates.descent.UpdateObjective`."""
        f = self._attack.fit_weight(step)
        pieces = -(-len(x) // self._cost.chunk)
        done = [
            self._piece(*part)
            for part in zip(x.chunk(pieces), clients.chunk(pieces), strict=True)
        ]
        distance, fit, gradient = (
            rows[0] if len(rows) == 1 else torch.cat(rows)
            for rows in zip(*done, strict=True)
        )
        value, slope = self._priors(x)
        return Values(distance, fit + value / f, gradient.mul_(f).add_(slope), None)

    def _piece(self, x: Tensor, clients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Distance, fit and its derivative for some attacks."""
        w = self._initial.expand(len(x), -1)
        y = self._labels[clients]
        if self._path is None:
            first = min(self._training.batch_size, self._samples)
            self._path = self._path_for(w, x[:, :first], y[:, :first])
        steps = LocalSteps(
            self._path, self._training, self._samples, self._sets, self._cost.segment
        )
        simulated = steps(w, x, y)
        moved = w - simulated.final
        apart = self._difference[clients] - moved
        cotangent = apart * self._weight
        fit = torch.linalg.vecdot(apart, cotangent)
        gradient = simulated.pull(cotangent.mul_(2))
        distance, _ = self._distance.compare(
            moved, self._prepared[clients], torch.empty_like(moved)
        )
        return distance, fit, gradient

    def _priors(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Their weighted sum for each attack, and its derivative."""
        attack = self._attack
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            total = leaf.flatten(1).sum(1) * 0
            if attack.tv:
                total = total + attack.tv * squared_variation(leaf)
            if attack.clip:
                total = total + attack.clip * excess(leaf, self._pixels)
            if attack.order:
                kind = attack.order_prior
                total = total + attack.order * order_distance(leaf, self._sets, kind)
            (slope,) = torch.autograd.grad(total.sum(), leaf)
        return total.detach(), slope


def spread_labels(
    labels: Int[Tensor, "clients N"], batch_size: int
) -> Int[Tensor, "clients N"]:
    """An order in which every batch has its share of each class.

    Nobody knows the client's own batches; sorted labels would make the least likely
    ones, of one class each.

    Args:
        labels: of each client.
        batch_size: B.

    Returns:
        The same labels, dealt out to batches one after the other.

    Example:
        >>> spread_labels(torch.tensor([[0, 0, 1, 1, 2]]), batch_size=2)
        tensor([[0, 1, 0, 2, 1]])
    """
    count = labels.shape[1]
    sizes = [min(batch_size, count - i) for i in range(0, count, batch_size)]
    hands: list[list[int]] = [[] for _ in sizes]
    place = 0
    for card in range(count):
        while len(hands[place % len(hands)]) == sizes[place % len(hands)]:
            place += 1
        hands[place % len(hands)].append(card)
        place += 1
    order = torch.tensor([card for hand in hands for card in hand])
    return labels.sort(1).values[:, order.to(labels.device)]


def layer_weights(sizes: Mapping[str, int]) -> Float[Tensor, " d_theta"]:
    """e^−l for every entry, l counting the layers from the input.

    Args:
        sizes: of the parameters by name, in order; those of one module are a layer.

    Returns:
        ``(d_θ,)``, float64.

    Example:
        >>> layer_weights({"0.weight": 1, "0.bias": 1, "2.weight": 1}).tolist()
        [1.0, 1.0, 0.36787944117144233]
    """
    layers = {name.rpartition(".")[0]: None for name in sizes}
    place = {layer: float(i) for i, layer in enumerate(layers)}
    numbers = [
        torch.full((size,), -place[name.rpartition(".")[0]], dtype=torch.float64)
        for name, size in sizes.items()
    ]
    return torch.cat(numbers).exp()
