"""What measuring quality returns: values that never come without their status."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, final

from jaxtyping import Float64
from torch import Tensor

from leakwatch.status import Measured, Status

__all__ = ["QualityResult"]


@final
@dataclass(frozen=True, eq=False, repr=False)
class QualityResult(Measured):
    """Quality of n reconstructions: ``result["psnr"]`` is an ``(n,)`` float64 tensor.

    Attributes:
        numbers: metric → ``(n,)`` float64 on the CPU, NaN where there is no number,
            never infinite. Metrics that can't be computed here at all (weights or
            package missing) are not among the keys.
        status: metric → one :class:`Status` per sample. ``failed``: the
            reconstruction (or the original) holds NaN or infinity. ``undefined``: the
            metric has no value for such samples. ``estimated``: computed in another
            way than the definition says, as the reason tells.
        absent: metric → why it is missing and what to do about it.
        data_range: the peak that PSNR, SSIM and FSIM refer to, pixel units.
        psnr_ceiling: dB at which PSNR ends, see :func:`leakwatch.quality.quality`.
    """

    kind: ClassVar[str] = "metric"
    numbers: dict[str, Float64[Tensor, " n"]]
    status: dict[str, tuple[Status, ...]]
    data_range: float
    psnr_ceiling: float
    absent: dict[str, str] = field(default_factory=dict)

    def _check(self, name: str) -> None:
        if name in self.absent:
            raise KeyError(f"no {name!r} in this result: {self.absent[name]}")
        super()._check(name)
