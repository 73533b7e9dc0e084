"""One audit: attacks on this process's part of the chosen probes, as rows."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, final

from torch import Tensor

from leakwatch.attacks import SharedGradient, Start
from leakwatch.attacks.clock import TimeShares
from leakwatch.callbacks._audit.judging import Judge
from leakwatch.callbacks._audit.plan import (
    Audit,
    Kind,
    chosen,
    with_prior,
)
from leakwatch.callbacks._audit.sharing import share_gradients
from leakwatch.callbacks._probing.observing import observing
from leakwatch.callbacks._probing.step import ProbeStep, Share, device_of
from leakwatch.progress import teller
from leakwatch.status import OK, Status, describe_error

__all__ = ["attack_probes"]


def attack_probes(step: ProbeStep, audit: Audit, share: Share) -> None:
    """Attacks this process's part of the chosen probes and adds rows to its share.

    Args:
        step: what is measured and when; its settings give data range and prior.
        audit: how to attack.
        share: gets rows and pictures; an exception becomes a status.
    """
    started = time.perf_counter()
    mine = step.picked
    picked = [i for i in chosen(step.probes, audit.samples) if i in mine]
    if not picked:
        return
    try:
        _ProbeAudit(step, audit, share, picked).run()
    except Exception as error:
        share.error = share.error or describe_error(error)
    share.seconds += time.perf_counter() - started


@final
class _ProbeAudit:
    """One audit, in the making."""

    def __init__(
        self, step: ProbeStep, audit: Audit, share: Share, picked: Sequence[int]
    ) -> None:
        probes = step.probes
        self._step, self._share = step, share
        self._audit = with_prior(audit, probes, step.settings)
        self._judge = Judge(probes, step.settings)
        self._place = device_of(step.module)
        self._x, self._y = probes.x[picked], probes.y[picked]
        self._members = [(probes.index[i], probes.labels[i]) for i in picked]
        self._pictures: dict[str, Any] = {}

    def run(self) -> None:
        everyone = range(len(self._members))
        for name, values in self._judge.baselines(self._x).items():
            self._record(name, values, [OK] * len(values), everyone)
        self._keep_pictures("original", self._x)
        shared, good, failed = self._shared()
        shares = TimeShares(self._audit.time_limit, len(self._audit.attacks))
        for kind in self._audit.attacks:
            why = failed
            try:
                if shared is not None:
                    self._attacked(kind, shared, good, shares)
            except Exception as error:
                text = describe_error(error)
                self._share.error = self._share.error or text
                why = dict.fromkeys(everyone, text)
            if why:
                self._no_attack(kind, why)
        if self._pictures:
            self._share.pictures |= self._pictures
            self._share.attacked = [sample for sample, _ in self._members]
            self._share.attacked_labels = [label for _, label in self._members]

    def _shared(self) -> tuple[SharedGradient | None, list[int], dict[int, str]]:
        """Gradients, whose they are, and why there are none of the others."""
        why = "the gradient of this sample is not finite"
        shared: SharedGradient | None = None
        good: list[int] = []
        try:
            with observing(self._step.module):
                shared, good = share_gradients(
                    self._step.gradients,
                    self._x.to(self._place),
                    self._y.to(self._place),
                    [sample for sample, _ in self._members],
                    self._audit,
                )
        except Exception as error:
            why = self._share.error = describe_error(error)
        others = (i for i in range(len(self._members)) if i not in good)
        return shared, good, dict.fromkeys(others, why)

    def _attacked(
        self,
        kind: Kind,
        shared: SharedGradient,
        good: Sequence[int],
        shares: TimeShares,
    ) -> None:
        audit, x = self._audit, self._x[good]
        near = kind == "near"
        start = Start(audit.start)
        begun = None
        if near:
            start = Start.near(x.to(self._place), audit.radius)
            begun = self._judge.start_psnr(x, audit.radius, audit.seed, shared.index)
        attack = audit.attacks[kind]
        title = f"{attack.name}, {kind} start"
        with observing(self._step.module), shares.next() as seconds:
            result = attack.run(
                self._step.gradients,
                shared,
                pixels=self._judge.pixels,
                start=start,
                seed=audit.seed,
                restarts=1 if near else audit.restarts,
                time_limit=seconds,
                progress=teller(title),
            )
        columns = self._judge.judge(result, x, audit.metrics, begun)
        images = self._x.clone().fill_(math.nan)
        images[good] = result.images.to("cpu", x.dtype)
        self._keep_pictures(kind, images)
        for name, (values, statuses) in columns.items():
            self._record(f"audit/{kind}/{name}", values, statuses, good)

    def _no_attack(self, kind: Kind, why: Mapping[int, str]) -> None:
        nothing = [math.nan] * len(why)
        statuses = [Status("failed", text) for text in why.values()]
        for name in (*self._audit.metrics, "match", "verdict"):
            self._record(f"audit/{kind}/{name}", nothing, statuses, list(why))

    def _keep_pictures(self, name: str, images: Tensor) -> None:
        pictures = self._judge.pictures(images)
        if pictures is not None:
            self._pictures[name] = pictures

    def _record(
        self,
        name: str,
        values: Sequence[float],
        statuses: Sequence[Status],
        which: Sequence[int],
    ) -> None:
        self._share.rows += [
            self._step.row(*self._members[i], name, value, status)
            for i, value, status in zip(which, values, statuses, strict=True)
        ]
