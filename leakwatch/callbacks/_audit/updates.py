"""One audit of a communication round: which clients, and what they give away."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from leakwatch.attacks import (
    PixelScale,
    Reconstruction,
    Start,
    UpdateReconstruction,
)
from leakwatch.attacks.clock import TimeShares
from leakwatch.attacks.updates.base import UpdateAttack
from leakwatch.attacks.verdict import EXPLAINED
from leakwatch.callbacks._audit.judging import Judge
from leakwatch.callbacks._audit.plan import UpdatePlan
from leakwatch.callbacks._probing.observing import observing
from leakwatch.callbacks._probing.step import ProbeStep, Share, device_of
from leakwatch.checks import check_integer
from leakwatch.federated import ClientUpdate, client_updates
from leakwatch.progress import teller
from leakwatch.quality.assignment import assign
from leakwatch.scores import UpdateScores, evaluate_update
from leakwatch.status import OK, Status, describe_error
from leakwatch.weight_update import WeightUpdate

__all__ = [
    "audit_round",
    "check_clients",
    "chosen_clients",
]


def audit_round(
    step: ProbeStep, plan: UpdatePlan, members: Mapping[int, Sequence[int]]
) -> Share:
    """Attacks and scores the watched clients that answered in the last round.

    Args:
        step: what is measured and when: a module that keeps the round, and the samples
            of all watched clients.
        plan: how.
        members: client → indices of its samples in the order in which it holds them.

    Returns:
        Rows and pictures; an exception becomes a status.
    """
    started = time.perf_counter()
    audit = _RoundAudit(step, plan, members)
    try:
        audit.run()
    except Exception as error:
        audit.share.error = describe_error(error)
    audit.share.seconds = time.perf_counter() - started
    return audit.share


@final
class _RoundAudit:
    """One audit, in the making."""

    def __init__(
        self, step: ProbeStep, plan: UpdatePlan, members: Mapping[int, Sequence[int]]
    ) -> None:
        probes = step.probes
        self._step, self._plan, self._members = step, plan, members
        self._judge = Judge(probes, step.settings)
        self._label = dict(zip(probes.index, probes.y.tolist(), strict=True))
        self.share = Share(samples=list(probes.index), labels=probes.y.tolist())

    def run(self) -> None:
        done = getattr(self._step.module, "last_round", None)
        now = self._step.epoch
        if done is None or done.number not in (now - 1, now):
            self.share.error = (
                "the module keeps no record of this round, so there is nothing to audit"
            )
            return
        answered = [u for u in done.updates if u.client in self._members]
        for update in answered:
            why = _unfit(update, len(self._members[update.client]))
            if why:
                self._failed([update], why)
        fit = {
            u.client: u for u in answered if not _unfit(u, len(self._members[u.client]))
        }
        if not fit:
            return
        plan = self._plan
        groups = list(
            client_updates(
                list(fit.values()), labels=plan.labels, training=plan.training
            )
        )
        shares = TimeShares(plan.time_limit, len(groups))
        for shared in groups:
            self._group(shared, [fit[client] for client in shared.index or ()], shares)

    # -- clients with equally many samples ------------------------------------------

    def _group(
        self, shared: WeightUpdate, clients: Sequence[ClientUpdate], shares: TimeShares
    ) -> None:
        x = torch.stack([u.x for u in clients])
        y = torch.stack([u.y for u in clients])
        place = device_of(self._step.module)
        for name, values in self._judge.baselines(x.flatten(0, 1).cpu()).items():
            self._of_samples(clients, name, values, [OK] * len(values))
        similarity = [math.nan] * len(clients)
        try:
            with observing(self._step.module):
                scores = self._scored(shared, x.to(place), y.to(place))
            self._record_scores(clients, scores)
            similarity = scores.similarity.tolist()
        except Exception as error:
            self._no_scores(clients, describe_error(error))
        attack = self._plan.attack
        if attack is None:
            return
        try:
            with observing(self._step.module), shares.next() as seconds:
                result = self._attacked(attack, shared, seconds)
            if getattr(attack, "takes_one_gradient", False):
                pairs = zip(result.status, similarity, strict=True)
                result = replace(result, status=tuple(judged(*pair) for pair in pairs))
            self._record_attack(clients, x.cpu(), y.cpu(), result)
        except Exception as error:
            self._no_attack(clients, describe_error(error))

    def _scored(self, shared: WeightUpdate, x: Tensor, y: Tensor) -> UpdateScores:
        pixels = self._judge.pixels.to_pixels(x.double())
        offset = pixels - self._step.probes.prior_mean.to(pixels)
        return evaluate_update(
            self._step.gradients,
            x,
            y,
            shared,
            self._plan.scores,
            self._step.settings,
            offset=offset.flatten(2),
            input_scale=self._step.probes.input_scale(),
            effort=self._plan.effort,
        )

    def _attacked(
        self, attack: UpdateAttack, shared: WeightUpdate, seconds: float | None
    ) -> UpdateReconstruction:
        return attack.run(
            self._step.gradients,
            shared,
            pixels=self._judge.pixels,
            start=Start(self._plan.start),
            seed=self._plan.seed,
            restarts=self._plan.restarts,
            time_limit=seconds,
            progress=teller(attack.name),
        )

    # -- rows ------------------------------------------------------------------------

    def _record_scores(
        self, clients: Sequence[ClientUpdate], scores: UpdateScores
    ) -> None:
        for name in scores:
            statuses = [s for row in scores.status[name] for s in row]
            self._of_samples(clients, name, scores[name].flatten().tolist(), statuses)
        for name in ("alpha", "similarity", "mismatch"):
            values: list[float] = getattr(scores, name).tolist()
            self._of_clients(clients, f"surrogate_{name}", values)
        self.share.notes = scores.notes

    def _record_attack(
        self,
        clients: Sequence[ClientUpdate],
        x: Float[Tensor, "clients N ..."],
        y: Int[Tensor, "clients N"],
        result: UpdateReconstruction,
    ) -> None:
        aligned = _aligned(result, x, y, self._judge.pixels)
        flat = x.flatten(0, 1)
        metrics = tuple(dict.fromkeys([*self._plan.metrics, "psnr"]))
        columns = self._judge.judge(aligned, flat, metrics)
        for name, (values, statuses) in columns.items():
            if name in (*self._plan.metrics, "match", "verdict"):
                self._of_samples(clients, f"audit/random/{name}", values, statuses)
        self._mean_psnr(clients, *columns["psnr"])
        self._of_clients(clients, "alpha", result.alpha.tolist())
        self._of_clients(clients, "loss", result.loss.tolist())
        each = result.seconds / len(clients)
        self._of_clients(clients, "seconds", [each] * len(clients))
        self._keep_pictures(clients, flat, aligned.images)

    def _keep_pictures(
        self, clients: Sequence[ClientUpdate], x: Tensor, images: Tensor
    ) -> None:
        for kind, shown in (("original", x), ("random", images.cpu().to(x.dtype))):
            pictures = self._judge.pictures(shown)
            if pictures is None:
                return
            held = self.share.pictures.get(kind)
            self.share.pictures[kind] = (
                pictures if held is None else np.concatenate([held, pictures])
            )
        samples = [s for u in clients for s in self._members[u.client]]
        self.share.attacked += samples
        self.share.attacked_labels += [self._label[s] for s in samples]

    def _failed(self, clients: Sequence[ClientUpdate], why: str) -> None:
        self._no_scores(clients, why)
        if self._plan.attack is not None:
            self._no_attack(clients, why)

    def _no_scores(self, clients: Sequence[ClientUpdate], why: str) -> None:
        for name in self._plan.score_names:
            self._nothing(clients, name, why)

    def _no_attack(self, clients: Sequence[ClientUpdate], why: str) -> None:
        for name in (*self._plan.metrics, "match", "verdict"):
            self._nothing(clients, f"audit/random/{name}", why)

    def _nothing(self, clients: Sequence[ClientUpdate], name: str, why: str) -> None:
        n = sum(len(self._members[u.client]) for u in clients)
        self._of_samples(clients, name, [math.nan] * n, [Status("failed", why)] * n)

    def _of_samples(
        self,
        clients: Sequence[ClientUpdate],
        name: str,
        values: Sequence[float],
        statuses: Sequence[Status],
    ) -> None:
        samples = [s for u in clients for s in self._members[u.client]]
        self.share.rows += [
            self._step.row(s, self._label[s], name, value, status)
            for s, value, status in zip(samples, values, statuses, strict=True)
        ]

    def _mean_psnr(
        self,
        clients: Sequence[ClientUpdate],
        values: Sequence[float],
        statuses: Sequence[Status],
    ) -> None:
        """Of each client, over its samples whose attack was conclusive."""
        n = len(values) // len(clients)
        for i, client in enumerate(clients):
            mine = slice(i * n, (i + 1) * n)
            pairs = zip(values[mine], statuses[mine], strict=True)
            conclusive = [value for value, status in pairs if status.usable]
            status = "ok"
            if not conclusive:
                status = "undefined: no attack was conclusive, which shows no safety"
            elif len(conclusive) < n:
                status = f"estimated: of {len(conclusive)} of {n} samples, the others' "
                status += "attack was inconclusive"
            mean = math.nan
            if conclusive:
                mean = math.fsum(conclusive) / len(conclusive)
            self._of_clients([client], "psnr", [mean], status)

    def _of_clients(
        self,
        clients: Sequence[ClientUpdate],
        name: str,
        values: Sequence[float],
        status: str = "",
    ) -> None:
        for update, value in zip(clients, values, strict=True):
            own = "ok" if math.isfinite(value) else "undefined: not a finite number"
            quantity = f"update/client-{update.client}/{name}"
            self.share.rows.append(
                self._step.row(None, None, quantity, value, status or own)
            )


def _unfit(update: ClientUpdate, expected: int) -> str:
    """Why this update can't be audited; empty if it can."""
    if update.samples != expected:
        return (
            f"client {update.client} trained on {update.samples} samples, but has "
            f"{expected} in the data set"
        )
    if update.diverged:
        return f"the training of client {update.client} diverged"
    if not bool(update.difference.any()):
        return f"client {update.client} did not move, so it shared nothing"
    return ""


def _aligned(
    result: UpdateReconstruction,
    x: Float[Tensor, "clients N ..."],
    y: Int[Tensor, "clients N"],
    pixels: PixelScale,
) -> Reconstruction:
    """One target per sample, each with the image that the assignment gives it."""
    n = x.shape[1]
    images = result.images.to(x.device, x.dtype)
    order = assign(pixels.to_pixels(images), pixels.to_pixels(x))
    rows = torch.arange(len(x))[:, None]
    flat = images[rows, order].flatten(0, 1)
    loss = result.loss.cpu().repeat_interleave(n)
    return Reconstruction(
        images=flat,
        labels=y.flatten(),
        loss=loss,
        relative=loss,
        status=tuple(s for s in result.status for _ in range(n)),
        iterations=torch.full((len(flat),), result.iterations),
        restart_images=flat[None, :, None],
        restart_loss=loss[None],
        seconds=result.seconds,
        attack=result.attack,
        start="normal",
    )


def judged(status: Status, similarity: float) -> Status:
    """The status of an attack that takes an update for one gradient, by who knows it.

    Args:
        status: of the attack.
        similarity: cosine between the update and the gradient at the true samples,
            with the best α; NaN where it is not known.
    """
    left = math.sqrt(max(2 - 2 * similarity, 0.0)) if similarity == similarity else 0.0
    if status.word != "not converged" or left <= EXPLAINED:
        return status
    return Status(
        "not converged",
        f"one gradient does not explain this update: the true samples themselves leave "
        f"{100 * left:.0f} % of it, so no attack that takes it for one gradient can be "
        f"conclusive; more steps don't help.",
    )


def check_clients(clients: Any) -> tuple[int, ...] | int:
    """Numbers of clients, or how many.

    Raises:
        TypeError: for anything else.
        ValueError: for none, one named twice, or a number below 0.
    """
    if isinstance(clients, int) and not isinstance(clients, bool):
        return check_integer("clients", clients, example=2)
    if isinstance(clients, str | Mapping | bool) or not isinstance(clients, Sequence):
        raise TypeError(
            f"clients must be how many to draw, or their numbers, got {clients!r}; for "
            f"instance clients=2 or clients=[0, 3]."
        )
    numbers = [check_integer("clients", c, smallest=0) for c in clients]
    if not numbers or len(set(numbers)) < len(numbers):
        raise ValueError(
            f"clients must name at least one client, each once, got {list(clients)}."
        )
    return tuple(numbers)


def chosen_clients(
    dataset: Any, clients: tuple[int, ...] | int, seed: int
) -> dict[int, list[int]]:
    """The clients to watch, with the positions of their samples.

    Args:
        dataset: whose ``parts`` are the positions of each client's samples.
        clients: their numbers, or how many to draw of those that have samples.
        seed: of the drawing.

    Raises:
        TypeError: for data that know no clients.
        ValueError: for clients that there are not.
    """
    parts = getattr(dataset, "parts", None)
    if parts is None:
        raise TypeError(
            f"UpdateAudit needs training data that know whose each sample is, but "
            f"{type(dataset).__name__} has no parts; wrap it: "
            f"leakwatch.datamodules.ClientsDataModule(data, 'dirichlet')."
        )
    there = [i for i, part in enumerate(parts) if len(part)]
    if isinstance(clients, int):
        if clients > len(there):
            raise ValueError(
                f"clients={clients} are to be drawn, but there are only {len(there)} "
                f"with samples."
            )
        stream = torch.Generator().manual_seed(seed)
        drawn = torch.randperm(len(there), generator=stream)[:clients]
        numbers = sorted(there[i] for i in drawn.tolist())
    else:
        numbers = list(clients)
        missing = [c for c in numbers if c not in there]
        if missing:
            raise ValueError(
                f"clients={numbers} names clients {missing} that have no samples; "
                f"there are {len(parts)}, numbered from 0."
            )
    return {c: [int(i) for i in parts[c]] for c in numbers}
