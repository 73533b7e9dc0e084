"""What audits record of each attacked sample, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from leakwatch.callbacks._audit.plan import Audit, Kind
from leakwatch.quality import METRICS
from leakwatch.reporting.message import GRADIENT, Message
from leakwatch.reporting.words import CLEARLY_ABOVE, HARDLY_BELOW

__all__ = ["STARTS", "described", "quantities"]

#: Where an attack of each kind starts, for readers.
STARTS: Final[dict[Kind, str]] = {
    "near": "worst case: the attack starts beside the true sample",
    "random": "practical: the attack starts at noise",
}


def quantities(audit: Audit) -> dict[str, dict[str, str]]:
    """What is recorded for each attacked sample: unit, direction, meaning, source."""
    names = {kind: attack.name for kind, attack in audit.attacks.items()}
    return described(names, audit.metrics)


def described(
    attacks: Mapping[Kind, str],
    metrics: Sequence[str],
    match: str = "‖g(x) − g*‖/‖g*‖ at the reconstruction: how far it came",
    message: Message = GRADIENT,
) -> dict[str, dict[str, str]]:
    """Unit, direction, meaning and source of what is recorded of attacked samples.

    Args:
        attacks: kind of start → name of the attack.
        metrics: of the quality.
        match: what the measure of matching means.
        message: what is attacked.
    """
    entries: dict[str, dict[str, str]] = {}

    def add(name: str, unit: str, direction: str, meaning: str, source: str) -> None:
        entries[name] = {
            "unit": unit,
            "direction": direction,
            "meaning": meaning,
            "source": source,
        }

    for kind, attack in attacks.items():
        where = f"{attack}, {STARTS[kind]}"
        for name in metrics:
            metric = METRICS[name]
            better = "more" if metric.higher_is_better else "less"
            add(
                f"audit/{kind}/{name}",
                metric.unit,
                f"higher = {better} exposed",
                f"{metric.meaning} ({where})",
                metric.source,
            )
        add(
            f"audit/{kind}/match",
            "",
            "",
            f"{match} ({where})",
            "",
        )
        add(
            f"audit/{kind}/verdict",
            "",
            "higher = more exposed",
            f"1 recovered (PSNR of {CLEARLY_ABOVE:g} dB or more), 0.5 partly "
            f"({HARDLY_BELOW:g} dB or more), 0 not although the {message.noun} was "
            f"matched; no number where the attack was inconclusive ({where})",
            "",
        )
    add(
        "audit/baseline/constant_psnr",
        "dB",
        "",
        "PSNR of the best image of one colour: what an attack must beat",
        "",
    )
    add(
        "audit/baseline/mean_psnr",
        "dB",
        "",
        f"PSNR of the mean image of the data: a guess without any {message.noun}",
        "",
    )
    add("image_std", "pixel", "", "Standard deviation over the image's pixels", "")
    add("image_tv", "pixel", "", "Mean absolute difference of neighbouring pixels", "")
    return entries
