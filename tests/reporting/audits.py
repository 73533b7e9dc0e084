"""Synthetic audits: what attacks would have left in a ledger."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from leakwatch.reporting import Row

FAILED = "not converged: 80 % of it was not matched"


def attacked(
    kind: str,
    psnr: Sequence[float],
    conclusive: Sequence[bool],
    *,
    epoch: int = 1,
    status: str = FAILED,
) -> list[Row]:
    """Rows of attacks on samples 0, 1, …, one class each, as an audit writes them."""
    rows = []
    for i, (value, good) in enumerate(zip(psnr, conclusive, strict=True)):
        verdict = (1.0 if value >= 25 else 0.5 if value >= 15 else 0.0) + (
            0.0 if good else math.nan
        )
        said = "ok" if good else status
        where = (epoch, 10 * epoch, i, i)
        rows += [
            Row(*where, f"audit/{kind}/psnr", value, said),
            Row(*where, f"audit/{kind}/verdict", verdict, said),
        ]
    return rows


def scored(values: Mapping[str, Sequence[float]], *, epoch: int = 1) -> list[Row]:
    """Rows of scores of the same samples."""
    return [
        Row(epoch, 10 * epoch, i, i, name, value)
        for name, column in values.items()
        for i, value in enumerate(column)
    ]
