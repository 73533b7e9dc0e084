"""The update as what it is: the result of all local steps, simulated."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import final, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from leakwatch.attacks.base import Progress
from leakwatch.attacks.first_order import FirstOrder
from leakwatch.attacks.matching.priors import Priors
from leakwatch.attacks.matching.update_selection import UpdatePathName, opened
from leakwatch.attacks.pixels import PixelScale
from leakwatch.attacks.settings import refuse_unknown
from leakwatch.attacks.start import Start
from leakwatch.attacks.update_result import UpdateReconstruction
from leakwatch.attacks.updates.matching import SimulationObjective
from leakwatch.attacks.updates.priors import OrderPrior, joined
from leakwatch.attacks.updates.run import Plan, run
from leakwatch.attacks.updates.simulation_cost import SimulationCost, simulation_cost
from leakwatch.derivatives import GradientMap
from leakwatch.weight_update import LocalTraining, WeightUpdate

__all__ = ["SimulationAttack", "spread_labels"]


@final
@dataclass(frozen=True)
class SimulationAttack:
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
        self._settings()  # checks what both have
        for name in ("tv", "clip", "order"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be finite and at least 0, got {value}.")
        for name in ("decay", "decay_every", "memory_limit", "most_seconds"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive, got {value}.")
        if not all(f > 0 and math.isfinite(f) for f in self.fit):
            raise ValueError(
                f"fit must be two positive numbers, at the start and from the middle "
                f"on, got {self.fit}."
            )
        if self.order_prior not in get_args(OrderPrior):
            raise ValueError(
                f"unknown order_prior {self.order_prior!r}; choose from "
                f"{', '.join(get_args(OrderPrior))}."
            )
        if self.path not in get_args(UpdatePathName):
            raise ValueError(
                f"path must be 'auto', 'layers' or 'plain', got {self.path!r}."
            )

    def run(
        self,
        gradients: GradientMap,
        update: WeightUpdate,
        *,
        pixels: PixelScale,
        start: Start,
        seed: int = 0,
        restarts: int = 1,
        time_limit: float | None = None,
        progress: Progress | None = None,
        initial: Float[Tensor, "restarts clients images ..."] | None = None,
    ) -> UpdateReconstruction:
        """Attacks all clients, see :func:`leakwatch.attacks.updates.run.run`.

        Raises:
            ValueError: also if the local training is not known, or the estimate is
                over a limit.
        """
        training = self._training(update)
        cost = self.cost(gradients, update, restarts=restarts)
        cost.check(self.memory_limit, self.most_seconds)

        @contextmanager
        def objective(
            labels: Int[Tensor, "clients N"],
        ) -> Iterator[SimulationObjective]:
            with opened(gradients, self.path) as path_for:
                yield SimulationObjective(
                    self, gradients, update, labels, path_for, pixels, cost
                )

        plan = Plan(
            name=self.name,
            settings=self._settings(),
            factor=lambda step: self.decay ** (step / self.decay_every),
            objective=objective,
            sets=self.sets(training, update.samples),
            joined=joined,
            arranged=lambda labels: spread_labels(labels, training.batch_size),
        )
        return run(
            plan,
            gradients,
            update,
            pixels=pixels,
            start=start,
            seed=seed,
            restarts=restarts,
            time_limit=time_limit,
            progress=progress,
            initial=initial,
        )

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
        training = self._training(update)
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

    def changed(self, **fields: object) -> SimulationAttack:
        """The same attack with other settings.

        Args:
            fields: of this class.

        Returns:
            A new attack.

        Raises:
            ValueError: for a field that there isn't; lists those that there are.
        """
        refuse_unknown(self.name, fields, self.__dataclass_fields__)
        return replace(self, **fields)  # type: ignore[arg-type]

    def _training(self, update: WeightUpdate) -> LocalTraining:
        if update.training is None:
            raise ValueError(
                f"{self.name} simulates the local steps, so it must know them: give "
                f"the update training=LocalTraining(epochs, batch_size, lr), or use "
                f"'sme', which needs none of them."
            )
        return update.training

    def _settings(self) -> FirstOrder:
        return FirstOrder(
            name=self.name,
            lr=self.lr,
            steps=self.steps,
            schedule="constant",
            priors=Priors(),
            box=False,
            chunk_size=self.chunk_size,
        )


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
