"""What an audit comes to: how many were recovered, and which scores foresaw it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from leakwatch.callbacks.auditing import Kind
from leakwatch.reporting import LedgerTable, Row
from leakwatch.reporting.correlation import spearman

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

    ``audit/<kind>/matched`` and ``audit/<kind>/recovered`` are shares in [0, 1].
    ``audit/spearman/<score>/<kind>/<metric>`` are rank correlations of a score with the
    quality of all reconstructions, conclusive or not, because leaving out the
    inconclusive ones would choose samples by the result.

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
    found: list[Row] = []

    def add(name: str, value: float, status: str) -> None:
        found.append(Row(epoch, step, None, None, name, value, status))

    for kind in kinds:
        verdicts = table.columns.get((moment, f"audit/{kind}/verdict"))
        if verdicts is None:
            continue
        n = len(verdicts.samples)
        conclusive = verdicts.usable
        status = "ok" if n else "undefined: no sample was attacked"
        add(f"audit/{kind}/conclusive", float(conclusive.mean()), status)
        recovered = float((verdicts.values[conclusive] >= 1.0).sum())
        clear = int(conclusive.sum())
        if n and clear == 0:
            status = "undefined: no attack was conclusive, which shows no safety"
        elif clear < n:
            status = f"estimated: at least this share; {n - clear} of {n} inconclusive"
        share = recovered / n if clear else math.nan
        add(f"audit/{kind}/recovered", share, status)
        for metric in metrics:
            if metric not in _COMPARED:
                continue
            quality = table.columns.get((moment, f"audit/{kind}/{metric}"))
            if quality is None:
                continue
            for name in predictors:
                score = table.columns.get((moment, name))
                if score is None:
                    continue
                known = {
                    s: v if use else math.nan
                    for s, v, use in zip(
                        score.samples, score.values, score.usable, strict=True
                    )
                }
                result = spearman(
                    np.array([known.get(s, math.nan) for s in quality.samples]),
                    quality.values,
                )
                text = str(result.status)
                if result.status.usable:
                    text = f"estimated: {result}"
                add(f"audit/spearman/{name}/{kind}/{metric}", result.rho, text)
    return found


def sentence(rows: Sequence[Row], kinds: Sequence[Kind]) -> str | None:
    """What attacks achieved, in one line; ``None`` without any result.

    Args:
        rows: of the step.
        kinds: of start.
    """
    last = rows[-1]
    parts = []
    for kind in kinds:
        psnr = [r for r in rows if r.quantity == f"audit/{kind}/psnr"]
        verdicts = [r for r in rows if r.quantity == f"audit/{kind}/verdict"]
        if not psnr:
            continue
        values = [r.value for r in psnr if math.isfinite(r.value)]
        best = f"{np.median(values):.1f} dB median PSNR" if values else "no result"
        recovered = sum(r.value == 1.0 for r in verdicts)
        unknown = sum(not r.status.startswith("ok") for r in verdicts)
        words = f"{kind} start {best}, {recovered} of {len(verdicts)} recovered"
        if unknown:
            words += f", {unknown} inconclusive"
        parts.append(words)
    if not parts:
        return None
    seconds = next((r.value for r in rows if r.quantity == "seconds"), math.nan)
    return (
        f"leakwatch audit, epoch {last.epoch} (step {last.step}): "
        f"{'; '.join(parts)}; {seconds:.1f} s"
    )
