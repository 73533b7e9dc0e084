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
from leakwatch.scores import Score, ScoreResult, Settings, evaluate
from leakwatch.scores.measure.plan import Solver
from leakwatch.status import describe_error

__all__ = [
    "Share",
    "device_of",
    "measure_share",
    "merge_pictures",
    "merge_rows",
    "merge_spectra",
]


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
    labels: list[int] = field(default_factory=list)
    eigenvalues: npt.NDArray[np.float64] | None = None
    pictures: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    attacked: list[int] = field(default_factory=list)
    attacked_labels: list[int] = field(default_factory=list)
    solver: str = ""
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    spent: float = 0.0
    elapsed: float = 0.0
    error: str = ""


def device_of(module: nn.Module) -> device:
    """Where the module's parameters are; in ``setup`` Lightning only announces it."""
    return next(module.parameters()).device


def measure_share(
    module: nn.Module,
    gradients: GradientMap,
    probes: ProbeSet,
    scores: Sequence[Score],
    settings: Settings,
    *,
    epoch: int,
    step: int,
    rank: int,
    world_size: int,
    solver: Solver,
    max_memory: float,
    products: int,
    layers: bool = False,
) -> Share:
    """Scores probes rank, rank + world_size, …; the module is left as it was.

    Args:
        module: the network.
        gradients: its gradient map.
        probes: all probes.
        scores: what to compute.
        settings: noise, prior and pixels.
        epoch: completed epochs, for the rows.
        step: optimiser steps, for the rows.
        rank: of this process.
        world_size: number of processes.
        solver: as asked for.
        max_memory: MiB for the Jacobian of one sample.
        products: most products with it for each task.
        layers: also the share of each layer in Σλ.

    Returns:
        The share. An exception becomes the status of its values: other processes wait
        for this one, and training goes on. Interrupts pass.
    """
    started = time.perf_counter()
    picked = range(rank, len(probes), world_size)
    share = Share(
        samples=[probes.index[i] for i in picked],
        labels=[int(probes.y[i]) for i in picked],
    )
    if not share.samples:
        return share
    members = list(zip(share.samples, share.labels, strict=True))
    try:
        part = probes.split(rank, world_size)
        with observing(module):
            place = device_of(module)
            result = evaluate(
                gradients,
                part.x.to(place),
                part.y.to(place),
                scores,
                settings,
                solver=solver,
                max_memory=max_memory,
                products=products,
                input_scale=part.input_scale(),
            )
        if result.eigenvalues is not None:
            share.eigenvalues = result.eigenvalues.numpy()
        share.solver, share.notes = result.solver, gradients.notes
        share.rows = [
            Row(
                epoch,
                step,
                sample,
                label,
                name,
                float(result[name][i]),
                str(result.status[name][i]),
            )
            for i, (sample, label) in enumerate(members)
            for name in result
        ]
        if layers:
            share.rows += _layer_rows(gradients, result, members, epoch, step)
    except Exception as error:
        share.error = describe_error(error)
        share.eigenvalues = None
        share.rows = [
            Row(epoch, step, sample, label, score.name, float("nan"), status)
            for status in [f"failed: {share.error}"]
            for sample, label in members
            for score in scores
        ]
    share.seconds = time.perf_counter() - started
    return share


def _layer_rows(
    gradients: GradientMap,
    result: ScoreResult,
    members: Sequence[tuple[int, int]],
    epoch: int,
    step: int,
) -> list[Row]:
    names = dict.fromkeys(name.rpartition(".")[0] for name in gradients.sizes())
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
            rows.append(Row(epoch, step, sample, label, quantity, share, status))
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
    labels = np.array([label for share, _ in kept for label in share.labels])
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
        labels = np.array([y for share in held for y in share.attacked_labels])
        order = np.argsort([place[int(s)] for s in samples])
        merged[name] = np.concatenate([share.pictures[name] for share in held])[order]
        merged["sample"], merged["class"] = samples[order], labels[order]
    return {**merged, "epoch": epoch, "step": step} if merged else None
