"""What a probe step comes to: scalars for the loggers, one sentence for people."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from leakwatch.probes import ProbeSet
from leakwatch.reporting import (
    LedgerTable,
    Quantity,
    Row,
    log_scalars,
    summarize,
    without_layers,
)
from leakwatch.reporting.quantities import HEADLINES, knows
from leakwatch.reporting.words import decibels, least

__all__ = ["logged", "scalars_of", "sentence", "time_fraction"]

# More classes than this get keys of their own for the predicted PSNR only.
_MOST_CLASS_KEYS = 20


def time_fraction(spent: float, elapsed: float, epoch: int, step: int) -> Row:
    """Which part of the time of training went into probing.

    Args:
        spent: seconds of probing so far.
        elapsed: seconds of training so far.
        epoch: completed epochs.
        step: optimiser steps taken.
    """
    name = "time_fraction"
    if step == 0:
        status = "undefined: no training yet"
        return Row(epoch, step, None, None, name, math.nan, status)
    return Row(epoch, step, None, None, name, min(spent / max(elapsed, 1e-9), 1.0))


def scalars_of(
    rows: Sequence[Row],
    quantities: Mapping[str, Quantity],
    probes: ProbeSet,
    prefix: str,
) -> dict[str, float]:
    """Log key → number for one probe step, the same in every process.

    Args:
        rows: of the step, of all processes.
        quantities: what is recorded, by name.
        probes: the samples.
        prefix: first part of the keys.
    """
    many = len(set(probes.labels)) > _MOST_CLASS_KEYS
    scalars = log_scalars(
        without_layers(rows),
        quantities,
        probes.class_names,
        per_class=HEADLINES if many else None,
        prefix=prefix,
    )
    return {key: float(value) for key, value in scalars.items()}


def logged(scalars: Mapping[str, float], prefix: str, log: str) -> dict[str, float]:
    """What loggers get, and callbacks that don't ask for a key.

    Args:
        scalars: key → number.
        prefix: first part of the keys.
        log: ``"summary"`` for about ten of them, ``"all"``.
    """
    return {
        key: value
        for key, value in scalars.items()
        if log == "all" or key.startswith(f"{prefix}/")
    }


def sentence(
    rows: Sequence[Row],
    quantities: Mapping[str, Quantity],
    noise_std: float | None,
    prior: str,
) -> str:
    """The line that is printed after a probe step.

    Args:
        rows: of the step.
        quantities: what is recorded, by name.
        noise_std: for which the predictions hold; ``None``: each for its own.
        prior: what they take for known of images.
    """
    table, last = LedgerTable.from_rows(rows), rows[-1]
    seconds = next(row.value for row in rows if row.quantity == "seconds")
    start = f"leakwatch epoch {last.epoch} (step {last.step}):"
    for name in HEADLINES:
        latest = table.last(name)
        if latest is None:
            continue
        summary = summarize(latest[1], quantities[name].sign)
        if summary.used:
            noise = "" if noise_std is None else f" at noise_std={noise_std:g}"
            bound = summary.bounds > 0
            median = least(decibels(summary.median), bound, summary.median_estimated)
            worst = least(decibels(summary.worst), bound, summary.worst_estimated)
            return (
                f"{start} predicted PSNR of an attacker who {knows(name, prior)}"
                f"{noise}: {median} median, {worst} for the worst sample "
                f"({summary.worst_sample}); {seconds:.1f} s"
            )
    return f"{start} probed in {seconds:.1f} s"
