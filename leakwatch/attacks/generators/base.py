"""What attacks with a generator have in common."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar, final

import torch
from jaxtyping import Int
from torch import Tensor

from leakwatch.attacks.base import Progress
from leakwatch.attacks.generators.search import Found
from leakwatch.attacks.labels.infer import infer_labels
from leakwatch.attacks.pixels import PixelScale
from leakwatch.attacks.result import Reconstruction
from leakwatch.attacks.shared_gradient import SharedGradient
from leakwatch.attacks.start import Start
from leakwatch.attacks.verdict import mismatch, uninformed, verdict
from leakwatch.derivatives import GradientMap

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = ["Plan", "changed", "check_start", "labels_of", "reconstruction"]

_Attack = TypeVar("_Attack", bound="DataclassInstance")


@final
@dataclass
class Plan:
    """Targets times restarts as one batch of attacks, the clock, and progress.

    Args:
        shared: what the attacker is given.
        restarts: tries per target.
        steps: of all phases together.
        time_limit: seconds.
        progress: told now and then.
    """

    shared: SharedGradient
    restarts: int
    steps: int
    time_limit: float | None = None
    progress: Progress | None = None
    begun: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        if self.restarts < 1:
            raise ValueError(f"restarts must be at least 1, got {self.restarts}.")
        if self.time_limit is not None and not self.time_limit > 0:
            raise ValueError(f"time_limit must be positive, got {self.time_limit}.")

    @property
    def attacks(self) -> int:
        """Targets times restarts; the targets of one restart follow each other."""
        return self.restarts * self.shared.targets

    @property
    def targets(self) -> Int[Tensor, " attacks"]:
        """The target of each attack."""
        return torch.arange(self.shared.targets).repeat(self.restarts)

    @property
    def places(self) -> list[tuple[int, int]]:
        """(name of the target's random stream, restart) of each attack."""
        names = self.shared.index or tuple(range(self.shared.targets))
        return [(name, r) for r in range(self.restarts) for name in names]

    @property
    def deadline(self) -> float:
        """When to stop, as ``time.perf_counter()`` counts."""
        return math.inf if self.time_limit is None else self.begun + self.time_limit

    def tick(self, before: int = 0) -> Callable[[int, Tensor], None]:
        """Reports steps of a phase that begins after ``before`` others."""

        def report(step: int, loss: Tensor) -> None:
            if self.progress is not None:
                best = loss.view(-1, self.shared.targets).amin(0).median()
                self.progress(before + step, self.steps, float(best))

        return report


def check_start(start: Start, name: str, initial: object) -> None:
    """Raises unless the attack can begin there.

    Args:
        start: where the caller wants it to begin.
        name: of the attack.
        initial: images to begin from, if any.

    Raises:
        ValueError: for anything but a normal start.
    """
    if start.name != "normal" or initial is not None:
        what = f"start {start.name!r}" if initial is None else "images of yours"
        raise ValueError(
            f"{name} begins with random latents and generators, not at {what}; use "
            f"Start.normal()."
        )


def changed(attack: _Attack, fields: dict[str, object]) -> _Attack:
    """The same attack with other settings.

    Args:
        attack: a dataclass.
        fields: names and new values.

    Raises:
        ValueError: for a field that there isn't; lists those that there are.
    """
    known = [f.name for f in dataclasses.fields(attack)]
    unknown = [name for name in fields if name not in known]
    if unknown:
        raise ValueError(
            f"unknown setting {', '.join(unknown)} of a {type(attack).__name__}; "
            f"choose from {', '.join(known)}."
        )
    return dataclasses.replace(attack, **fields)


def labels_of(
    shared: SharedGradient, gradients: GradientMap
) -> tuple[Int[Tensor, "targets images"], tuple[str, ...]]:
    """Labels that are known, or else inferred, and what may be wrong with them."""
    if shared.labels is not None:
        return shared.labels, ("",) * shared.targets
    found = infer_labels(shared, gradients)
    return found.labels, tuple(
        "" if s.word == "ok" else f"The labels were inferred: {s}."
        for s in found.status
    )


def reconstruction(
    plan: Plan,
    gradients: GradientMap,
    pixels: PixelScale,
    found: Found,
    labels: Int[Tensor, "targets images"],
    doubts: tuple[str, ...],
    name: str,
    distance: str,
) -> Reconstruction:
    """The best restart of each target, judged.

    Args:
        plan: of the attack.
        gradients: the map.
        pixels: range of the images.
        found: of all attacks.
        labels: of each target.
        doubts: what may be wrong with them, empty for nothing.
        name: of the attack.
        distance: that it minimised; cosine only matches the direction.

    Returns:
        The result, see :func:`leakwatch.attacks.verdict.verdict`.
    """
    shape = (plan.restarts, plan.shared.targets)
    loss = found.loss.view(shape)
    # A generator may leave the range of pixels.
    images = pixels.clamp(found.images.view(*shape, *found.images.shape[1:]))
    best = loss.argmin(0)
    at = torch.arange(shape[1], device=best.device)
    chosen = images[best, at]
    labels = labels.to(chosen.device)
    rests = mismatch(gradients, plan.shared, chosen, labels)
    bases = uninformed(gradients, plan.shared, labels, pixels)
    which = 1 if distance == "cosine" else 0
    status = verdict(
        plan.shared,
        rests[which],
        base=bases[which],
        whole=rests[0],
        out_of_time=torch.full((shape[1],), found.stopped),
        diverged=torch.tensor(found.broken).view(shape).all(0),
        doubts=doubts,
    )
    single = plan.shared.images == 1
    return Reconstruction(
        images=chosen[:, 0] if single else chosen,
        labels=labels[:, 0] if single else labels,
        loss=loss[best, at],
        relative=rests[0],
        status=status,
        iterations=found.steps.view(shape)[best, at],
        restart_images=images,
        restart_loss=loss,
        seconds=time.perf_counter() - plan.begun,
        attack=name,
        start="normal",
        practical=True,
        history=found.history.view(-1, *shape),
    )
