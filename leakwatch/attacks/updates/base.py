"""What all attacks on weight updates have in common: labels, limits, verdict."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor

from leakwatch.attacks.base import (
    AttackTask,
    BaseAttack,
    Progress,
    SearchResult,
    doubts_about,
)
from leakwatch.attacks.pixels import PixelScale
from leakwatch.attacks.result import UpdateReconstruction
from leakwatch.attacks.shared_gradient import SharedGradient
from leakwatch.attacks.start import Start
from leakwatch.attacks.updates.labels import client_labels
from leakwatch.attacks.verdict import EXPLAINED, verdict
from leakwatch.derivatives import GradientMap
from leakwatch.status import Status
from leakwatch.weight_update import WeightUpdate

__all__ = ["UpdateAttack", "UpdateTask"]


@final
@dataclass(frozen=True, eq=False, kw_only=True)
class UpdateTask(AttackTask):
    """One run of an attack on weight updates; clients are its targets.

    Attributes:
        update: what the clients shared. Its own labels may be unknown; those to work
            with are ``labels``.
    """

    update: WeightUpdate

    @property
    def size(self) -> tuple[int, int, tuple[int, ...]]:
        """Clients, samples of each, and the shape of a sample."""
        return self.update.clients, self.update.samples, self.update.sample_shape

    @property
    def names(self) -> tuple[int, ...]:
        """What names each client's random stream."""
        return self.update.index or tuple(range(self.update.clients))


@dataclass(frozen=True)
class UpdateAttack(BaseAttack, ABC):
    """An attack on weight updates; see `leakwatch.attacks.updates` for an example."""

    takes_one_gradient: ClassVar[bool] = False
    """Whether it takes the update for a gradient at one place. What it can explain is
    limited then by how similar such a gradient is, and not by its own steps."""

    @abstractmethod
    def search(self, task: UpdateTask) -> SearchResult:
        """Looks for images, for all clients and restarts.

        Args:
            task: what is given, and the limits.

        Returns:
            The best images of each restart. ``loss`` is 1 − cos between the update and
            the one that the images explain.
        """

    def check_update(self, update: WeightUpdate) -> None:
        """Raises for an update of which too little is known. None by default.

        Raises:
            ValueError: says what is missing, and which attack does without.
        """

    @property
    def doubt(self) -> str:
        """What else may be why an update was not matched; empty for nothing."""
        return ""

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
        """Attacks all clients and restarts at once.

        Args:
            gradients: the network; its own weights are not looked at.
            update: what the clients shared.
            pixels: normalisation and range of the images.
            start: where the attack begins.
            seed: of the random starts; each client has a stream of its own.
            restarts: independent tries for each client.
            time_limit: seconds, ``None`` for no limit.
            progress: called now and then.
            initial: images to begin from instead.

        Returns:
            The best images, and what they are worth.

        Raises:
            ValueError: for an update of another network, or of which the attack must
                know more; a limit that is not positive; labels that are unknown and
                can't be counted.
        """
        began = time.perf_counter()
        deadline = self._begin(restarts, time_limit, start, initial)
        if update.initial.numel() != gradients.size:
            raise ValueError(
                f"the update has {update.initial.numel()} weights, but the module "
                f"shares {gradients.size}; was another model, or a frozen part, used?"
            )
        self.check(gradients.module)
        self.check_update(update)
        labels, label_status = client_labels(gradients, update, seed)
        task = UpdateTask(
            gradients=gradients,
            update=update,
            labels=labels.to(next(gradients.module.parameters()).device),
            pixels=pixels,
            start=start,
            seed=seed,
            restarts=restarts,
            deadline=deadline,
            progress=progress,
            initial=initial,
        )
        result = self.search(task)
        labels = task.labels if result.labels is None else result.best_of(result.labels)
        loss = result.best_of(result.loss)
        alpha = result.alpha
        if alpha is None:
            alpha = torch.full_like(result.loss, torch.nan)
        base = result.uninformed
        status = verdict(
            SharedGradient(
                update.difference, labels, update.sample_shape, update.samples
            ),
            # ‖ĝ − v̂‖ = √(2 (1 − cos)): the measure of the other attacks.
            (2 * loss).sqrt(),
            base=None if base is None else (2 * base).sqrt(),
            out_of_time=result.all_restarts(result.late),
            diverged=result.all_restarts(result.diverged),
            doubts=doubts_about(label_status, "not given"),
            part=EXPLAINED,
        )
        history = result.history
        return UpdateReconstruction(
            images=result.best_of(result.images),
            labels=labels,
            loss=loss,
            alpha=result.best_of(alpha),
            status=tuple(self._of_an_update(s) for s in status),
            restart_images=result.images,
            restart_loss=result.loss,
            restart_alpha=alpha,
            iterations=int(result.steps.max()),
            seconds=time.perf_counter() - began,
            attack=self.name,
            history=result.loss[None] if history is None else history,
        )

    def _of_an_update(self, status: Status) -> Status:
        reason = status.reason.replace("gradient", "update")
        if status.word == "not converged" and self.doubt:
            reason = f"{reason} {self.doubt}"
        return Status(status.word, reason)
