"""What an audit comes to: how many were recovered, and which scores foresaw it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from leakwatch.callbacks._audit.plan import Kind
from leakwatch.reporting import Column, LedgerTable, Row
from leakwatch.reporting.quantities import SPEARMAN
from leakwatch.reporting.statistics.achieved import (
    Achieved,
    achieved,
    conclusive_values,
)
from leakwatch.reporting.statistics.correlation import spearman

__all__ = ["conclusions", "sentence"]

_COMPARED = ("psnr", "ssim", "lpips_vgg", "lpips_alex", "lpips_squeeze")


def conclusions(
    rows: Sequence[Row],
    predictors: Sequence[str],
    kinds: Sequence[Kind],
    metrics: Sequence[str],
    *,
    epoch: int,
    step: int,
) -> list[Row]:
    """Rows about all attacked samples together.

    ``audit/<kind>/conclusive`` is the share of attacked samples whose attack showed
    anything, ``audit/<kind>/recovered`` the share of those that were recovered, both
    in [0, 1]. ``audit/spearman/<score>/<kind>/<metric>`` are rank correlations of a
    score with the quality of conclusive attacks alone: the image that a failed attack
    ends with says how it failed, not what was shared of the sample. Since that selects
    samples by the result, the status states how many are left, and the correlation
    with failed ones included.

    Args:
        rows: of the step, of all processes.
        predictors: scores and baselines.
        kinds: of start.
        metrics: of quality.
        epoch: completed epochs.
        step: optimiser steps.
    """
    table = LedgerTable.from_rows(rows)
    if not table.moments:
        return []
    moment = table.moments[-1]
    concluded: list[Row] = []

    def add(name: str, value: float, status: str) -> None:
        concluded.append(Row(epoch, step, None, None, name, value, status))

    for kind in kinds:
        outcome = achieved(table, moment, kind)
        if outcome is None:
            continue
        for name, value, status in _shares(outcome):
            add(f"audit/{kind}/{name}", value, status)
        for metric in metrics:
            quality = table.columns.get((moment, f"audit/{kind}/{metric}"))
            clear = conclusive_values(table, moment, kind, metric)
            if metric not in _COMPARED or quality is None or clear is None:
                continue
            for name in predictors:
                score = table.columns.get((moment, name))
                if score is not None:
                    rho, status = _correlation(score, quality, clear, outcome)
                    add(f"{SPEARMAN}{name}/{kind}/{metric}", rho, status)
    return concluded


def _shares(outcome: Achieved) -> list[tuple[str, float, str]]:
    """Names, values and statuses of the shares."""
    if not outcome.conclusive:
        reason = "undefined: no attack was conclusive, which shows no safety"
        return [("conclusive", 0.0, "ok"), ("recovered", math.nan, reason)]
    status = "ok"
    if outcome.inconclusive:
        status = (
            f"estimated: of {outcome.conclusive} samples whose attack was conclusive; "
            f"inconclusive for {outcome.inconclusive} of {outcome.attacked}"
        )
    return [
        ("conclusive", outcome.conclusive / outcome.attacked, "ok"),
        ("recovered", outcome.recovered / outcome.conclusive, status),
    ]


def _correlation(
    score: Column, quality: Column, clear: Column, attacks: Achieved
) -> tuple[float, str]:
    """Of a score with the quality of conclusive attacks, and what it is worth."""
    usable = np.where(score.usable, score.values, math.nan)
    by_sample = dict(zip(score.samples, usable.tolist(), strict=True))
    predicted = np.array([by_sample.get(s, math.nan) for s in quality.samples])
    result = spearman(predicted, clear.values)
    beside = ""
    if attacks.inconclusive and not np.isnan(quality.values).all():
        beside = (
            f"; {attacks.inconclusive} of {attacks.attacked} samples left out, whose "
            "attack was inconclusive"
        )
        every = spearman(predicted, quality.values, bootstrap=0)
        if every.status.usable:
            beside += f", {every.rho:+.2f} with them (n = {every.n})"
    if result.status.usable:
        return result.rho, f"estimated: {result}{beside}"
    return math.nan, f"{result.status}{beside}"


def sentence(rows: Sequence[Row], kinds: Sequence[Kind]) -> str | None:
    """What attacks achieved, in one line; ``None`` without any result.

    Args:
        rows: of the step.
        kinds: of start.
    """
    table, last = LedgerTable.from_rows(rows), rows[-1]
    outcomes = [(kind, achieved(table, table.moments[-1], kind)) for kind in kinds]
    parts = [
        f"{kind} start: {outcome}" for kind, outcome in outcomes if outcome is not None
    ]
    if not parts:
        return None
    seconds = next((r.value for r in rows if r.quantity == "seconds"), math.nan)
    return (
        f"leakwatch audit, epoch {last.epoch} (step {last.step}): "
        f"{'; '.join(parts)}; {seconds:.1f} s"
    )
