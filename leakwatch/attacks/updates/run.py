"""What all attacks on updates have in common: starts, labels, descent, verdict."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeAlias, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from leakwatch.attacks.base import Progress
from leakwatch.attacks.first_order import FirstOrder
from leakwatch.attacks.pixels import PixelScale
from leakwatch.attacks.shared_gradient import SharedGradient
from leakwatch.attacks.start import Start
from leakwatch.attacks.update_result import UpdateReconstruction
from leakwatch.attacks.updates.descent import (
    Alphas,
    Objective,
    UpdateDescent,
    UpdateOutcome,
)
from leakwatch.attacks.updates.labels import client_labels
from leakwatch.attacks.verdict import verdict
from leakwatch.derivatives import GradientMap
from leakwatch.status import Status
from leakwatch.weight_update import WeightUpdate

__all__ = ["Plan", "run"]

_Made: TypeAlias = Callable[[Tensor], AbstractContextManager[Objective]]


def _as_they_are(x: Tensor, labels: Tensor) -> Tensor:
    return x


def _same(labels: Tensor) -> Tensor:
    return labels


@final
@dataclass(frozen=True, eq=False)
class Plan:
    """An attack on updates, prepared.

    Attributes:
        name: recorded in the result.
        settings: of the descent.
        factor: on its step size, of the step.
        objective: opens what is minimised, for labels ``(clients, N)``.
        sets: how many images stand for each sample, one for each epoch or one.
        joined: makes one set of images ``(attacks, sets·N, …)`` with these labels.
        arranged: puts labels in the order in which they are used.
        alpha: where α starts.
        alpha_lr: its step size, 0 to keep it.
        alpha_range: its bounds.
        doubts: what may be wrong beside the labels, for the status.
    """

    name: str
    settings: FirstOrder
    factor: Callable[[int], float]
    objective: _Made
    sets: int = 1
    joined: Callable[[Tensor, Tensor], Tensor] = _as_they_are
    arranged: Callable[[Tensor], Tensor] = _same
    alpha: float = float("nan")
    alpha_lr: float = 0.0
    alpha_range: tuple[float, float] = (0.0, 1.0)
    doubts: str = ""


def run(
    plan: Plan,
    gradients: GradientMap,
    update: WeightUpdate,
    *,
    pixels: PixelScale,
    start: Start,
    seed: int,
    restarts: int,
    time_limit: float | None,
    progress: Progress | None,
    initial: Float[Tensor, "restarts clients images ..."] | None,
) -> UpdateReconstruction:
    """Attacks all clients and restarts at once.

    Args:
        plan: the attack.
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
        ValueError: for an update of another network, bad numbers, or labels that are
            unknown and can't be counted.
    """
    began = time.perf_counter()
    if restarts < 1:
        raise ValueError(f"restarts must be at least 1, got {restarts}.")
    if time_limit is not None and not time_limit > 0:
        raise ValueError(f"time_limit must be positive, got {time_limit} seconds.")
    size = gradients.size
    if update.initial.numel() != size:
        raise ValueError(
            f"the update has {update.initial.numel()} weights, but the module shares "
            f"{size}; was another model, or a frozen part, used?"
        )
    labels, found = client_labels(gradients, update, seed)
    x = start.images(
        initial,
        targets=update.clients,
        images=plan.sets * update.samples,
        shape=update.sample_shape,
        restarts=restarts,
        seed=seed,
        pixels=pixels,
        box=plan.settings.box,
        index=update.index,
        dtype=gradients.dtype,
        device=next(gradients.module.parameters()).device,
    )
    labels = plan.arranged(labels.to(x.device))
    flat = x.flatten(0, 1)
    alphas = Alphas(
        plan.alpha, flat[:, 0].flatten(1)[:, 0], plan.alpha_lr, *plan.alpha_range
    )
    with plan.objective(labels) as objective:
        descent = UpdateDescent(
            plan.settings,
            plan.factor,
            pixels,
            deadline=None if time_limit is None else began + time_limit,
            progress=progress,
        )
        outcome = descent.run(x, objective, alphas)
        base = _uninformed(plan, objective, update, pixels, outcome)
    return _reconstruction(plan, update, labels, found, outcome, base, began)


def _uninformed(
    plan: Plan,
    objective: Objective,
    update: WeightUpdate,
    pixels: PixelScale,
    outcome: UpdateOutcome,
) -> Float[Tensor, " clients"]:
    """The distance that noise or plain grey leaves, whichever is less."""
    like = outcome.images[0]
    noise = Start.uniform().draw(
        targets=update.clients,
        images=like.shape[1],
        shape=update.sample_shape,
        pixels=pixels,
        index=update.index,
        dtype=like.dtype,
        device=like.device,
    )[0]
    bounds = pixels.box(noise)
    middle = noise.new_tensor(0.5) if bounds is None else (bounds[0] + bounds[1]) / 2
    clients = torch.arange(update.clients, device=like.device)
    alpha = outcome.alpha[outcome.distance.argmin(0), clients]
    guesses = (noise, middle.expand(noise.shape).contiguous())
    found = [
        objective(guess, alpha, clients, plan.settings.steps).distance.double()
        for guess in guesses
    ]
    return torch.minimum(*found)


def _reconstruction(
    plan: Plan,
    update: WeightUpdate,
    labels: Int[Tensor, "clients N"],
    found: tuple[Status, ...],
    outcome: UpdateOutcome,
    base: Tensor,
    began: float,
) -> UpdateReconstruction:
    best = outcome.distance.argmin(0)
    every = torch.arange(update.clients, device=best.device)
    loss = outcome.distance[best, every]
    repeated = labels.repeat(len(outcome.images), 1)
    images = plan.joined(outcome.images.flatten(0, 1), repeated)
    images = images.view(*outcome.images.shape[:2], *images.shape[1:])
    shared = SharedGradient(
        update.difference, labels, update.sample_shape, update.samples
    )
    doubts = [
        "" if s.word == "ok" else f"The labels were not given: {s}." for s in found
    ]
    # ‖ĝ − v̂‖ = √(2 (1 − cos)): the measure of the other attacks.
    status = verdict(
        shared,
        (2 * loss).sqrt(),
        base=(2 * base).sqrt(),
        out_of_time=torch.full_like(loss, outcome.late, dtype=torch.bool),
        diverged=outcome.diverged.all(0),
        doubts=tuple(doubts),
    )
    return UpdateReconstruction(
        images=images[best, every],
        labels=labels,
        loss=loss,
        alpha=outcome.alpha[best, every],
        status=tuple(_of_an_update(s, plan.doubts) for s in status),
        restart_images=images,
        restart_loss=outcome.distance,
        restart_alpha=outcome.alpha,
        iterations=outcome.steps,
        seconds=time.perf_counter() - began,
        attack=plan.name,
        history=outcome.history,
    )


def _of_an_update(status: Status, doubt: str) -> Status:
    reason = status.reason.replace("gradient", "update")
    if status.word == "not converged" and doubt:
        reason = f"{reason} {doubt}"
    return Status(status.word, reason)
