"""Samples and classes under one homogeneous noise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, final

from leakwatch.reporting import Quantity, Row, class_bars
from leakwatch.reporting.quantities import class_name
from leakwatch.reporting.words import number
from leakwatch.scores import Value, get
from leakwatch.studies.noise.spectra import described

#: The predicted PSNR that risk is told by.
PSNR = "i2f_bayes_psnr"


@final
@dataclass(frozen=True)
class SampleRisk:
    """One sample under the homogeneous noise.

    Attributes:
        sample: data-set index.
        label: class.
        psnr: predicted PSNR of the best attacker, dB, with its status.
    """

    sample: int
    label: int
    psnr: Value


@final
@dataclass(frozen=True)
class ClassRisk:
    """One class under the homogeneous noise.

    Attributes:
        label: the class.
        count: samples.
        used: samples whose risk is known.
        psnr: mean predicted PSNR, dB; NaN where nothing is known.
        excess: by how much that lies above the mean of all other samples, dB.
        low: lower end of its interval, all classes together at the level.
        high: upper end.
        noise_std: noise that gives this class the mean squared error that all samples
            have on average under the homogeneous noise.
    """

    label: int
    count: int
    used: int
    psnr: float
    excess: float
    low: float
    high: float
    noise_std: Value

    @property
    def under_protected(self) -> bool:
        """Whether the class is more exposed than the others beyond doubt."""
        return self.low > 0


@final
@dataclass(frozen=True, eq=False)
class Unfairness:
    """How unequally one homogeneous noise protects.

    Attributes:
        noise_std: the homogeneous noise.
        samples: all samples, most exposed first, unknown ones before all others.
        classes: all classes, most exposed first, unknown ones before all others.
        level: coverage of the intervals.
        class_names: of the labels, where they are known.
    """

    noise_std: float
    samples: tuple[SampleRisk, ...]
    classes: tuple[ClassRisk, ...]
    level: float
    class_names: tuple[str, ...] | None = None

    @property
    def under_protected(self) -> tuple[int, ...]:
        """Classes that are more exposed than the others beyond doubt."""
        return tuple(c.label for c in self.classes if c.under_protected)

    def rows(self) -> list[Row]:
        """One row of a ledger per sample, as `RiskLedger.append` takes them."""
        return [
            Row(0, 0, s.sample, s.label, PSNR, s.psnr.number, str(s.psnr.status))
            for s in self.samples
        ]

    def figure(self) -> Any:
        """Samples and means by class: a plotly figure, as in I²F, Figure 6.

        Raises:
            ModuleNotFoundError: plotly is not installed.
        """
        about: dict[str, Quantity] = {PSNR: described(get(PSNR))}
        return class_bars(self.rows(), about, self.class_names)

    def __str__(self) -> str:
        known = [s.psnr.number for s in self.samples if s.psnr.status.usable]
        lines = [
            f"noise of standard deviation {number(self.noise_std)}: predicted PSNR "
            + (
                f"{min(known):.1f} to {max(known):.1f} dB"
                if known
                else "not known, which is not safe"
            )
            + f", {len(known)} of {len(self.samples)} samples known",
            "class     mean dB   above the others [interval]     equalising noise",
        ]
        lines += [self._line(c) for c in self.classes]
        return "\n".join(lines)

    def _line(self, c: ClassRisk) -> str:
        name = class_name(c.label, self.class_names)
        if not c.used:
            return f"{name:<8}  not known, which is not safe"
        interval = (
            "not known"
            if math.isnan(c.low)
            else f"{c.excess:+.1f} [{c.low:+.1f}, {c.high:+.1f}]"
        )
        mark = " under-protected" if c.under_protected else ""
        noise = c.noise_std
        needed = number(noise.number) if noise.status.usable else noise.status.word
        return f"{name:<8}  {c.psnr:7.1f}   {interval:<28}  {needed}{mark}"
