"""One probe step: each process scores its part of the probes, all of them together."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from torch import device, nn

from leakwatch.callbacks._probing.observing import observing
from leakwatch.derivatives import GradientMap
from leakwatch.probes import ProbeSet
from leakwatch.reporting import LAYERS, Row
from leakwatch.scores import ScoreInputs, ScoreResult, Scoring, Settings
from leakwatch.status import describe_error

__all__ = [
    "ProbeStep",
    "Share",
    "device_of",
    "merge_pictures",
    "merge_rows",
    "merge_spectra",
    "score_probes",
]


@final
@dataclass(frozen=True)
class ProbeStep:
    """One measurement: of which samples, on which network, when, by which process.

    Attributes:
        module: the network, to be left as it is.
        gradients: its gradient map.
        probes: all probes.
        settings: noise, prior and pixels.
        epoch: completed epochs.
        step: optimiser steps.
        rank: of this process, which measures probes rank, rank + world_size, …
        world_size: number of processes.
    """

    module: nn.Module
    gradients: GradientMap
    probes: ProbeSet
    settings: Settings
    epoch: int
    step: int
    rank: int = 0
    world_size: int = 1

    @property
    def picked(self) -> range:
        """Positions of the probes that are this process's part."""
        return range(self.rank, len(self.probes), self.world_size)

    def row(
        self,
        sample: int | None,
        label: int | None,
        quantity: str,
        value: Any,
        status: Any = "ok",
    ) -> Row:
        """A row of the ledger at this moment.

        Args:
            sample: data-set index; ``None`` for all together.
            label: its class.
            quantity: what was measured.
            value: as a number.
            status: as text, or a :class:`leakwatch.Status`.
        """
        return Row(
            self.epoch, self.step, sample, label, quantity, float(value), str(status)
        )


@final
@dataclass
class Share:
    """What one process found out about its part of the probes; plain values only.

    Attributes:
        rows: one per sample and score.
        samples: data-set indices of its probes.
        labels: their classes.
        eigenvalues: ``(samples, d_x)``; ``None`` without a whole spectrum.
        pictures: name → uint8 pictures, ``(samples, height, width, channels)``, and
            other arrays with one row per sample; private.
        attacked: data-set indices of the samples that ``pictures`` show.
        attacked_labels: their classes.
        solver: as used; empty if nothing was scored.
        notes: what the gradient map found out about the module.
        seconds: wall-clock time of scoring.
        spent: seconds that the monitor has taken so far in this process.
        elapsed: seconds since training began.
        error: what stopped the step; empty if nothing did.
    """

    rows: list[Row] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    labels: list[int | None] = field(default_factory=list)
    eigenvalues: npt.NDArray[np.float64] | None = None
    pictures: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    attacked: list[int] = field(default_factory=list)
    attacked_labels: list[int | None] = field(default_factory=list)
    solver: str = ""
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    spent: float = 0.0
    elapsed: float = 0.0
    error: str = ""


def device_of(module: nn.Module) -> device:
    """Where the module's parameters are; in ``setup`` Lightning only announces it."""
    return next(module.parameters()).device


def score_probes(step: ProbeStep, scoring: Scoring, *, layers: bool = False) -> Share:
    """Scores this process's part of the probes; the module is left as it was.

    Args:
        step: what is measured, when, and which part of it by this process.
        scoring: how.
        layers: also the share of each layer in Σλ.

    Returns:
        The share. An exception becomes the status of its values: other processes wait
        for this one, and training goes on. Interrupts pass.
    """
    started = time.perf_counter()
    picked = step.picked
    share = Share(
        samples=[step.probes.index[i] for i in picked],
        labels=[step.probes.labels[i] for i in picked],
    )
    if not share.samples:
        return share
    members = list(zip(share.samples, share.labels, strict=True))
    try:
        part = step.probes.split(step.rank, step.world_size)
        with observing(step.module):
            place = device_of(step.module)
            pixels = part.pixels().double()
            inputs = ScoreInputs(
                step.gradients,
                part.x.to(place),
                part.y.to(place),
                input_scale=part.input_scale(),
                offset=(pixels - part.prior_mean).flatten(1).to(place),
                pixels=pixels.flatten(1).to(place),
            )
            result = scoring.evaluate(inputs, step.settings)
        if result.eigenvalues is not None:
            share.eigenvalues = result.eigenvalues.numpy()
        share.solver, share.notes = result.solver, step.gradients.notes
        share.rows = [
            step.row(sample, label, name, result[name][i], result.status[name][i])
            for i, (sample, label) in enumerate(members)
            for name in result
        ]
        if layers:
            share.rows += _layer_rows(step, result, members)
    except Exception as error:
        share.error = describe_error(error)
        share.eigenvalues = None
        share.rows = [
            step.row(sample, label, score.name, math.nan, f"failed: {share.error}")
            for sample, label in members
            for score in scoring.scores
        ]
    share.seconds = time.perf_counter() - started
    return share


def _layer_rows(
    step: ProbeStep, result: ScoreResult, members: Sequence[tuple[int, int | None]]
) -> list[Row]:
    names = dict.fromkeys(name.rpartition(".")[0] for name in step.gradients.sizes())
    whole = sum(result.traces.values(), torch.zeros(len(members)).double())
    missing = f"not computed: needs solver='exact', and it is {result.solver}"
    failed = "failed: this sample has no Jacobian, or one that is zero"
    rows = []
    for i, (sample, label) in enumerate(members):
        for name in names:
            part = result.traces.get(name)
            share = math.nan if part is None else float(part[i] / whole[i])
            status = "ok" if math.isfinite(share) else failed
            status = missing if part is None else status
            quantity = f"{LAYERS}{name or '(network)'}"
            rows.append(step.row(sample, label, quantity, share, status))
    return rows


def merge_rows(shares: Sequence[Share], index: Sequence[int]) -> list[Row]:
    """The rows of all processes in the order of the probes, as one would have them."""
    place = {sample: i for i, sample in enumerate(index)}
    rows = [row for share in shares for row in share.rows]
    return sorted(rows, key=lambda r: -1 if r.sample is None else place[r.sample])


def merge_spectra(
    shares: Sequence[Share], index: Sequence[int], epoch: int, step: int
) -> dict[str, Any] | None:
    """The eigenvalues of all processes for the ledger; ``None`` if there are none."""
    kept = [
        (share, share.eigenvalues) for share in shares if share.eigenvalues is not None
    ]
    if not kept:
        return None
    samples = np.array([sample for share, _ in kept for sample in share.samples])
    labels = _class_array([label for share, _ in kept for label in share.labels])
    place = {sample: i for i, sample in enumerate(index)}
    order = np.argsort([place[int(sample)] for sample in samples])
    return {
        "eigenvalues": np.concatenate([values for _, values in kept])[order],
        "sample": samples[order],
        "class": labels[order],
        "epoch": epoch,
        "step": step,
    }


def merge_pictures(
    shares: Sequence[Share], index: Sequence[int], epoch: int, step: int
) -> dict[str, Any] | None:
    """The pictures of all processes in the order of the probes, ``None`` without any.

    A picture that one process lacks, after an error, is left out for its samples.
    """
    place = {sample: i for i, sample in enumerate(index)}
    names = list(dict.fromkeys(name for share in shares for name in share.pictures))
    merged: dict[str, Any] = {}
    for name in names:
        held = [share for share in shares if name in share.pictures]
        samples = np.array([s for share in held for s in share.attacked])
        labels = _class_array([y for share in held for y in share.attacked_labels])
        order = np.argsort([place[int(s)] for s in samples])
        merged[name] = np.concatenate([share.pictures[name] for share in held])[order]
        merged["sample"], merged["class"] = samples[order], labels[order]
    return {**merged, "epoch": epoch, "step": step} if merged else None


def _class_array(labels: Sequence[int | None]) -> npt.NDArray[np.int64]:
    """Classes as an array, -1 for none."""
    return np.array([-1 if label is None else label for label in labels], np.int64)
