"""What is recommended, with what it rests on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from leakwatch.reporting.words import count, number
from leakwatch.scores import Value
from leakwatch.status import Status
from leakwatch.studies.noise.check import Check


@final
@dataclass(frozen=True)
class ProbeNoise:
    """One probe.

    Attributes:
        sample: data-set index.
        label: class.
        needed: noise that holds it to the target by prediction, gradient units; where
            rounding leaves it open, the most that it can be. Its status says why there
            is none.
        psnr: predicted PSNR under the recommended noise, dB.
        noise_to_gradient: length of the recommended noise over that of the gradient,
            s√d_θ/‖g‖; NaN where it is not known.
    """

    sample: int
    label: int
    needed: Value
    psnr: Value
    noise_to_gradient: float


@final
@dataclass(frozen=True, eq=False)
class NoiseRecommendation:
    """The smallest Gaussian noise that holds the probes to a target.

    Attributes:
        noise_std: standard deviation on each entry of the gradient; NaN where the
            status is not usable.
        status: ``ok``: predicted, and an attack on the worst probes stayed below the
            target. ``estimated``: see the reason: not checked, raised after a check, or
            nothing learnt from it. ``unresolved``, ``undefined`` and so on: that of the
            probes that stand in the way. ``failed``: the attack came above the target.
        target_psnr: dB.
        share: of the probes, that is held to it.
        predicted: what the prediction alone asks for, before any check.
        probes: most demanding first, unknown ones before all others.
        checks: attacks of the last round.
    """

    noise_std: float
    status: Status
    target_psnr: float
    share: float
    predicted: float
    probes: tuple[ProbeNoise, ...]
    checks: tuple[Check, ...] = ()

    def __str__(self) -> str:
        head = f"target {self.target_psnr:g} dB for {100 * self.share:g} % of "
        head += f"{count(len(self.probes), 'probe')}: "
        if self.status.usable:
            head += f"noise_std = {number(self.noise_std)}"
        else:
            head += "no noise can be recommended"
        lines = [f"{head} ({self.status})"]
        ratios = [p.noise_to_gradient for p in self.probes]
        known = sorted(r for r in ratios if not math.isnan(r))
        if known and self.status.usable:
            lines.append(
                f"  the noise is {number(known[0])} to {number(known[-1])} times as "
                "long as the gradients"
            )
        return "\n".join([*lines, *(f"  {check}" for check in self.checks)])
