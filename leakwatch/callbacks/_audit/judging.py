"""How good reconstructions are, and what is known of an image without any attack."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

from torch import Tensor

from leakwatch.attacks import PixelScale, Reconstruction, SharedGradient, Start
from leakwatch.callbacks._audit.plan import Audit
from leakwatch.probes import ProbeSet
from leakwatch.quality import best_constant, quality
from leakwatch.reporting.words import CLEARLY_ABOVE, HARDLY_BELOW
from leakwatch.scores import Settings
from leakwatch.status import OK, Status

__all__ = ["baselines", "judge", "psnr_of_starts"]

#: dB by which an attack must beat the best image of one colour to show anything.
_BEYOND_CONSTANT: Final = 3.0
#: dB; a near attack whose result is this close to its start has done nothing.
_STILL: Final = 0.1


def psnr_of_starts(
    x: Tensor,
    shared: SharedGradient,
    audit: Audit,
    pixels: PixelScale,
    settings: Settings,
) -> list[float]:
    """How good the images are from which near attacks begin."""
    drawn = Start.near(x, audit.radius).draw(
        targets=len(x),
        images=1,
        shape=tuple(x.shape[1:]),
        seed=audit.seed,
        pixels=pixels,
        index=shared.index,
    )
    found = quality(
        pixels.clamp(drawn[0, :, 0]).to(x.dtype),
        x,
        pixels=pixels,
        data_range=settings.data_range,
        low=pixels.low,
        metrics=("psnr",),
    )
    values: list[float] = found["psnr"].tolist()
    return values


def judge(
    found: Reconstruction,
    x: Tensor,
    metrics: Sequence[str],
    pixels: PixelScale,
    settings: Settings,
    constant: Sequence[float],
    begun: Sequence[float],
) -> dict[str, tuple[list[float], list[Status]]]:
    """Quality, gradient error and verdict of each reconstruction, with statuses.

    A reconstruction that neither shows the sample nor matches its gradient says
    nothing about the sample: its values carry the attack's own status.

    Args:
        found: the reconstructions.
        x: true samples, network inputs.
        metrics: of the quality.
        pixels: of the images.
        settings: for the data range.
        constant: PSNR of the best constant image of each sample.
        begun: PSNR of the start of each attack, NaN for starts that know nothing.

    Returns:
        Last part of the quantity's name → values and statuses.
    """
    wanted = tuple(dict.fromkeys([*metrics, "psnr"]))
    result = quality(
        found.images.to("cpu", x.dtype),
        x,
        pixels=pixels,
        data_range=settings.data_range,
        low=pixels.low,
        metrics=wanted,
    )
    psnr = result["psnr"].tolist()
    verdicts = [
        _verdict(*known)
        for known in zip(psnr, constant, begun, found.status, strict=True)
    ]
    columns: dict[str, tuple[list[float], list[Status]]] = {}
    for name in metrics:
        if name in result.absent:
            gone = Status("not computed", result.absent[name])
            columns[name] = ([math.nan] * len(x), [gone] * len(x))
            continue
        columns[name] = (
            result[name].tolist(),
            [
                own if not own.usable or verdict.usable else verdict
                for own, (_, verdict) in zip(result.status[name], verdicts, strict=True)
            ],
        )
    columns["match"] = (
        found.relative.tolist(),
        [
            OK if math.isfinite(v) else s
            for v, s in zip(found.relative.tolist(), found.status, strict=True)
        ],
    )
    columns["verdict"] = ([v for v, _ in verdicts], [s for _, s in verdicts])
    return columns


def _verdict(
    psnr: float, constant: float, begun: float, status: Status
) -> tuple[float, Status]:
    """Recovered, partly, not, or the reason why that is not known.

    A picture counts if it shows more than one colour would, whatever the attack says
    of itself; not so for a near start, which shows the sample before the attack begins.
    """
    if status.word == "failed" or not math.isfinite(psnr):
        return math.nan, status if status.word != "ok" else Status("failed", "no image")
    near = math.isfinite(begun)
    if near and abs(psnr - begun) < _STILL:
        return math.nan, Status(
            "not converged", "the attack did not move from its start beside the sample"
        )
    shows = psnr >= max(constant + _BEYOND_CONSTANT, HARDLY_BELOW) and not near
    if status.word != "ok" and not shows:
        if status.usable:
            status = Status("not converged", status.reason)
        return math.nan, status
    if psnr >= CLEARLY_ABOVE:
        return 1.0, OK
    return (0.5 if psnr >= HARDLY_BELOW else 0.0), OK


def baselines(
    x: Tensor, probes: ProbeSet, pixels: PixelScale, settings: Settings
) -> Iterator[tuple[str, Tensor]]:
    """What an attack has to beat, and what is known of an image without any attack.

    Args:
        x: true samples, network inputs.
        probes: for the mean image.
        pixels: of the images.
        settings: for the data range.

    Yields:
        The name of a quantity and its value for each sample.
    """
    common: dict[str, Any] = {
        "pixels": pixels,
        "data_range": settings.data_range,
        "low": pixels.low,
        "metrics": ("psnr",),
    }
    constant = quality(best_constant(x), x, **common)
    yield "audit/baseline/constant_psnr", constant["psnr"]
    mean = pixels.to_input(probes.prior_mean.to(x)).expand_as(x)
    yield "audit/baseline/mean_psnr", quality(mean, x, **common)["psnr"]
    seen = pixels.to_pixels(x.double())
    yield "image_std", seen.reshape(len(x), -1).std(1, correction=0)
    if x.ndim == 4:
        across = seen.diff(dim=-1).abs().flatten(1).mean(1)
        down = seen.diff(dim=-2).abs().flatten(1).mean(1)
        yield "image_tv", (across + down).nan_to_num(0.0)
