"""The engine of the published attacks: many gradient-matching descents at once."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import final, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from leakwatch.attacks.base import Progress
from leakwatch.attacks.labels.infer import LabelMethod, infer_labels
from leakwatch.attacks.matching import distances
from leakwatch.attacks.matching.objective import MatchingProblem, PathName
from leakwatch.attacks.matching.priors import BatchStatistics, Priors
from leakwatch.attacks.optimizers.descent import Descent, Outcome
from leakwatch.attacks.optimizers.first_order import (
    OptimizerName,
    ScheduleName,
    schedule,
)
from leakwatch.attacks.pixels import PixelScale
from leakwatch.attacks.result import Reconstruction
from leakwatch.attacks.settings import refuse_unknown
from leakwatch.attacks.shared_gradient import SharedGradient
from leakwatch.attacks.start import Start, stream
from leakwatch.attacks.verdict import mismatch, uninformed, verdict
from leakwatch.derivatives import GradientMap

__all__ = ["FirstOrder"]


@final
@dataclass(frozen=True)
class FirstOrder:
    """Descends on the distance between gradients, for all targets and restarts at once.

    Minimises D(g(x), g*) plus priors. The presets in
    :mod:`leakwatch.attacks.presets` are instances of it.

    Args:
        name: recorded in results.
        distance: ``"l2"``, ``"cosine"`` or ``"l1"``, see
            :func:`leakwatch.attacks.matching.distances.get`.
        optimizer: ``"adam"``, ``"sgd"`` with momentum, or ``"lbfgs"``.
        lr: step size, network-input units for Adam; first trial length for L-BFGS.
        momentum: of ``"sgd"``.
        signed: whether the gradient of the objective is replaced by its signs.
        schedule: of the step size: ``"constant"``, ``"step"`` or ``"cosine"``, see
            :func:`leakwatch.attacks.optimizers.first_order.schedule`.
        steps: evaluations of the gradient per attack.
        priors: weights of total variation, norm and BatchNorm statistics.
        box: whether images are kept in the range of pixels, where that is known; not
            with L-BFGS.
        relative: whether the distance is divided by ‖g*‖² (L2) or ‖g*‖ (L1), so that
            the priors weigh the same for all samples.
        layer_weights: factors of the layers' parts of the distance, see
            :class:`MatchingProblem`.
        statistics: the client's own batch statistics, if the attacker is granted them.
        joint_labels: whether the labels are optimised together with the images; known
            labels are not looked at then.
        label_method: how unknown labels are inferred otherwise, see
            :func:`leakwatch.attacks.labels.infer.infer_labels`.
        tolerance: attacks are finished when the gradient is matched to this relative
            error. Default: 20 times the rounding error of the arithmetic.
        patience: attacks are finished when their objective has not improved for this
            many steps. Default: never.
        path: see :class:`MatchingProblem`.
        chunk_size: attacks evaluated at once.

    Raises:
        ValueError: for values that make no sense; quotes them.

    Example:
        >>> import torch
        >>> from leakwatch.attacks import PixelScale, SharedGradient, Start
        >>> net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Sigmoid(),
        ...                           torch.nn.Linear(8, 3))
        >>> gradients = GradientMap(net, dtype=torch.float64)
        >>> x, y = torch.rand(2, 6), torch.tensor([0, 2])
        >>> settings = FirstOrder(optimizer="lbfgs", distance="l2", box=False, steps=20)
        >>> found = settings.run(
        ...     gradients, SharedGradient.of(gradients, x, y),
        ...     pixels=PixelScale(), start=Start.normal(), seed=0, restarts=2)
        >>> found.images.shape, len(found.status)
        (torch.Size([2, 6]), 2)
    """

    name: str = "first-order"
    distance: str = "cosine"
    optimizer: OptimizerName = "adam"
    lr: float = 0.1
    momentum: float = 0.9
    signed: bool = False
    schedule: ScheduleName = "step"
    steps: int = 1000
    priors: Priors = field(default_factory=Priors)
    box: bool = True
    relative: bool = False
    layer_weights: Mapping[str, float] | Sequence[float] | None = None
    statistics: BatchStatistics | None = None
    joint_labels: bool = False
    label_method: str = "auto"
    tolerance: float | None = None
    patience: int | None = None
    path: PathName = "auto"
    chunk_size: int | None = None

    def __post_init__(self) -> None:
        distances.get(self.distance)
        schedule(self.schedule)
        if self.optimizer not in ("adam", "sgd", "lbfgs"):
            raise ValueError(
                f"unknown optimizer {self.optimizer!r}; choose from adam, sgd, lbfgs."
            )
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ValueError(f"lr must be positive and finite, got {self.lr}.")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum}.")
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}.")
        if self.chunk_size is not None and self.chunk_size < 1:
            raise ValueError(f"chunk_size must be at least 1, got {self.chunk_size}.")
        if self.label_method not in get_args(LabelMethod):
            raise ValueError(
                f"unknown label_method {self.label_method!r}; choose from "
                f"{', '.join(get_args(LabelMethod))}."
            )
        if self.patience is not None and self.patience < 1:
            raise ValueError(f"patience must be at least 1, got {self.patience}.")
        if self.tolerance is not None and not self.tolerance >= 0:
            raise ValueError(f"tolerance must be at least 0, got {self.tolerance}.")
        if self.optimizer == "lbfgs" and (self.signed or self.box):
            raise ValueError(
                "L-BFGS builds on differences of gradients of an unconstrained "
                "objective; use signed=False and box=False with it, or "
                "optimizer='adam'."
            )

    def run(
        self,
        gradients: GradientMap,
        shared: SharedGradient,
        *,
        pixels: PixelScale,
        start: Start,
        seed: int = 0,
        restarts: int = 1,
        time_limit: float | None = None,
        progress: Progress | None = None,
        initial: Float[Tensor, "restarts targets images ..."] | None = None,
    ) -> Reconstruction:
        """Attacks all targets. See :class:`leakwatch.attacks.base.Attack`.

        Raises:
            ValueError: if the shared gradients are not this module's, ``initial`` has
                another shape, or the BatchNorm prior meets a network without
                BatchNorm.
        """
        began = time.perf_counter()
        if restarts < 1:
            raise ValueError(f"restarts must be at least 1, got {restarts}.")
        if time_limit is not None and not time_limit > 0:
            raise ValueError(f"time_limit must be positive, got {time_limit} seconds.")
        device = next(gradients.module.parameters()).device
        labels, doubts = self._labels(gradients, shared)
        x = start.images(
            initial,
            targets=shared.targets,
            images=shared.images,
            shape=shared.sample_shape,
            restarts=restarts,
            seed=seed,
            pixels=pixels,
            box=self.box,
            index=shared.index,
            dtype=gradients.dtype,
            device=device,
        )
        problem = MatchingProblem(
            gradients,
            shared,
            self.distance,
            layer_weights=self.layer_weights,
            batch_norm=self.priors.batch_norm,
            first_layer=self.priors.first_layer,
            statistics=self.statistics,
            relative=self.relative,
            soft_targets=self.joint_labels,
            path=self.path,
            chunk_size=self.chunk_size,
        )
        with problem.opened() as matcher:
            descent = Descent(
                self,
                problem,
                matcher,
                pixels,
                deadline=None if time_limit is None else began + time_limit,
                progress=progress,
            )
            logits = None
            if self.joint_labels:
                classes = matcher.classes(x[0, 0, 0])
                logits = _first_logits(shared, restarts, classes, seed).to(x)
            outcome = descent.run(x, labels, logits)
        return self._reconstruction(
            gradients, shared, pixels, start, outcome, labels.to(device), doubts, began
        )

    def _labels(
        self, gradients: GradientMap, shared: SharedGradient
    ) -> tuple[Tensor, tuple[str, ...]]:
        """Labels ``(targets, images)``, and what may be wrong with them."""
        none = ("",) * shared.targets
        if self.joint_labels:
            return torch.zeros(shared.targets, shared.images, dtype=torch.long), none
        if shared.labels is not None:
            return shared.labels, none
        method: LabelMethod = self.label_method  # type: ignore[assignment]
        found = infer_labels(shared, gradients, method)
        return found.labels, tuple(
            "" if s.word == "ok" else f"The labels were inferred: {s}."
            for s in found.status
        )

    def _reconstruction(
        self,
        gradients: GradientMap,
        shared: SharedGradient,
        pixels: PixelScale,
        start: Start,
        outcome: Outcome,
        labels: Tensor,
        doubts: tuple[str, ...],
        began: float,
    ) -> Reconstruction:
        best = outcome.distance.argmin(0)
        every = torch.arange(shared.targets, device=best.device)
        images = outcome.images[best, every]
        if outcome.logits is not None:
            labels = outcome.logits[best, every].argmax(-1)
        found = mismatch(gradients, shared, images, labels)
        bases = uninformed(gradients, shared, labels, pixels)
        which = 1 if self.distance == "cosine" else 0
        status = verdict(
            shared,
            found[which],
            base=bases[which],
            whole=found[0],
            out_of_time=outcome.unfinished.all(0),
            diverged=outcome.diverged.all(0),
            doubts=doubts,
        )
        single = shared.images == 1
        return Reconstruction(
            images=images[:, 0] if single else images,
            labels=labels[:, 0] if single else labels,
            loss=outcome.distance[best, every],
            relative=found[0],
            status=status,
            iterations=outcome.steps[best, every],
            restart_images=outcome.images,
            restart_loss=outcome.distance,
            seconds=time.perf_counter() - began,
            attack=self.name,
            start=start.name,
            practical=start.practical,
            history=outcome.history,
        )

    def changed(self, **fields: object) -> FirstOrder:
        """The same attack with other settings.

        Args:
            fields: of this class, and ``tv``, ``l2``, ``batch_norm``, ``first_layer``
                of its priors.

        Returns:
            A new attack.

        Raises:
            ValueError: for a field that there isn't; lists those that there are.

        Example:
            >>> FirstOrder().changed(tv=1e-3, steps=10).priors.tv
            0.001
        """
        own = {name for name in self.__dataclass_fields__ if name != "priors"}
        inner = set(Priors.__dataclass_fields__)
        refuse_unknown(self.name, fields.keys() - {"priors"}, own | inner)
        priors = fields.pop("priors", self.priors)
        if not isinstance(priors, Priors):
            raise ValueError(f"priors must be Priors(...), got {priors!r}.")
        terms = {k: fields.pop(k) for k in list(fields) if k in inner}
        changes: dict[str, object] = {**fields, "priors": replace(priors, **terms)}  # type: ignore[arg-type]
        return replace(self, **changes)  # type: ignore[arg-type]


def _first_logits(
    shared: SharedGradient, restarts: int, classes: int, seed: int
) -> Tensor:
    """N(0, 1) for each class, from streams of their own beside those of the images."""
    names = range(shared.targets) if shared.index is None else shared.index
    rows = [
        [
            torch.randn(
                shared.images,
                classes,
                dtype=torch.float64,
                generator=stream(seed, name, r, 1),
            )
            for name in names
        ]
        for r in range(restarts)
    ]
    return torch.stack([torch.stack(row) for row in rows])
