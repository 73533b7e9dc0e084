"""Quality of reconstructions, each against its original."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from functools import cache
from typing import Final, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from leakwatch.normalization import Channels, check_channels, to_pixels
from leakwatch.quality.metrics import DEFAULT_METRICS, METRICS, check_metrics
from leakwatch.quality.perceptual import LpipsNet, LpipsUnavailableError, lpips
from leakwatch.quality.result import QualityResult
from leakwatch.quality.structural import PIQ_MISSING, fsim, has_piq, ssim
from leakwatch.status import OK, Status

__all__ = ["PixelUnits", "in_pixels", "quality"]

_log = logging.getLogger(__name__)

_LPIPS: Final[dict[str, LpipsNet]] = {
    "lpips_vgg": "vgg",
    "lpips_alex": "alex",
    "lpips_squeeze": "squeeze",
}
_SLACK: Final = 1e-3

_Measured = tuple[Tensor, Status]


class PixelUnits(Protocol):
    """Whatever converts network inputs to pixels, such as an attack's pixel scale."""

    def to_pixels(self, x: Tensor, /) -> Tensor:
        """Pixels of a batch of network inputs."""


def quality(
    images: Float[Tensor, "n ..."],
    originals: Float[Tensor, "n ..."],
    *,
    mean: Channels | None = None,
    std: Channels | None = None,
    pixels: PixelUnits | None = None,
    data_range: float = 1.0,
    low: float | None = 0.0,
    metrics: Iterable[str] = DEFAULT_METRICS,
    psnr_ceiling: float | None = None,
    download: bool = False,
) -> QualityResult:
    """How close each reconstruction comes to its original, in pixel units and float64.

    The data range is fixed, never guessed from the images. Samples of shape (channels,
    height, width) are images; their reconstructions are clipped to [low, low +
    data_range] before anything is measured, as an attacker who knows the range would
    do, which never increases the squared error. Anything else is a feature vector,
    for which only ``mse``, ``rmse`` and ``psnr`` are defined, without clipping.

    PSNR ends at a ceiling, where the error is the machine epsilon of the coarser of
    both tensors times the data range: 138.5 dB in float32, 313.1 dB in float64. A
    perfect recovery is at the ceiling and stays finite; its status says so.

    Args:
        images: reconstructions, in the units of the network's input.
        originals: what they should show, same shape and units; on any device.
        mean: per channel, of the normalisation that the network's inputs went
            through: pixel = input · std + mean.
        std: the same.
        pixels: converts to pixel units in place of ``mean`` and ``std``.
        data_range: distance from the darkest to the brightest possible pixel.
        low: the darkest possible pixel; ``None``: unknown, no clipping. LPIPS and FSIM
            then take it to be 0.
        metrics: names of :data:`leakwatch.quality.METRICS`.
        psnr_ceiling: another ceiling, dB.
        download: whether LPIPS may fetch missing weights.

    Returns:
        Values and statuses by metric. A metric whose weights or package are missing is
        absent; that is said once in the log, and in ``absent``.

    Raises:
        TypeError: if images or originals are not floating point tensors.
        ValueError: if shapes differ or there is no sample, for an unknown metric, a
            data range that isn't positive, one of mean and std without the other, and
            if the original *images* lie outside of [low, low + data_range]: the units
            are then not what was said.

    Example:
        >>> x = torch.full((1, 1, 8, 8), 0.5)
        >>> result = quality(x + 0.1, x, metrics=("mse", "psnr"))
        >>> round(result["psnr"].item(), 3)
        20.0
    """
    names = check_metrics(metrics)
    _check(images, originals, data_range)
    epsilon = max(torch.finfo(t.dtype).eps for t in (images, originals))
    ceiling = -20 * math.log10(epsilon) if psnr_ceiling is None else psnr_ceiling
    a = in_pixels(images, mean, std, pixels)
    b = in_pixels(originals.to(images.device), mean, std, pixels)
    finite = [torch.isfinite(t).reshape(len(t), -1).all(1) for t in (a, b)]
    is_image = a.ndim == 4
    if is_image and low is not None:
        _check_range(b[finite[1]], low, data_range)
        a = a.clamp(low, low + data_range)
    broken = ~(finite[0] & finite[1])
    # Placeholders: their values are replaced by NaN below.
    a, b = (t.where(_like(~broken, t), t.new_zeros(())) for t in (a, b))

    numbers: dict[str, Tensor] = {}
    statuses: dict[str, tuple[Status, ...]] = {}
    absent: dict[str, str] = {}
    for name in names:
        measured = _measure(name, a, b, data_range, low or 0.0, ceiling, download)
        if isinstance(measured, str):
            absent[name] = measured
            _say_once(name, measured)
            continue
        values, status = measured
        each = [_status(v, status, name, ceiling) for v in values.tolist()]
        for i in broken.nonzero().flatten().tolist():
            which = "original" if bool(finite[0][i]) else "reconstruction"
            each[i] = Status("failed", f"the {which} holds NaN or infinity")
        gone = torch.tensor([not s.usable for s in each])
        numbers[name] = values.cpu().masked_fill(gone, math.nan)
        statuses[name] = tuple(each)
    return QualityResult(numbers, statuses, data_range, ceiling, absent)


def in_pixels(
    x: Float[Tensor, "n ..."],
    mean: Channels | None = None,
    std: Channels | None = None,
    pixels: PixelUnits | None = None,
) -> Float[Tensor, "n ..."]:
    """Pixels of network inputs, detached, float64.

    Raises:
        ValueError: if ``pixels`` comes with mean or std, or mean without std, or they
            don't have one value per channel (or one for all).
    """
    if pixels is not None and (mean is not None or std is not None):
        raise ValueError("give either pixels or mean and std, not both.")
    x = x.detach().double()
    if pixels is not None:
        return pixels.to_pixels(x)
    return to_pixels(x, *check_channels(mean, std, x.shape))


def _measure(
    name: str,
    a: Tensor,
    b: Tensor,
    data_range: float,
    low: float,
    ceiling: float,
    download: bool,
) -> _Measured | str:
    if METRICS[name].images_only and a.ndim != 4:
        reason = (
            f"{name} is for images (channels, height, width), not for samples of shape "
            f"{tuple(a.shape[1:])}"
        )
        return a.new_full((len(a),), math.nan), Status("undefined", reason)
    if name in _LPIPS:
        try:
            return lpips(a, b, data_range, _LPIPS[name], low=low, download=download)
        except LpipsUnavailableError as error:
            return str(error)
    if name == "fsim" and not has_piq():
        return PIQ_MISSING
    if name == "fsim":
        return fsim(a - low, b - low, data_range)
    if name == "ssim":
        # Its formula refers to black as zero.
        return ssim(a - low, b - low, data_range)
    mse = (a - b).reshape(len(a), -1).square().mean(1)
    simple: dict[str, Callable[[], Tensor]] = {
        "mse": lambda: mse,
        "rmse": mse.sqrt,
        "psnr": lambda: (
            -10 * (mse / data_range**2).clamp(min=10 ** (-ceiling / 10)).log10()
        ),
    }
    return simple[name](), OK


def _status(value: float, status: Status, name: str, ceiling: float) -> Status:
    if status.usable and not math.isfinite(value):
        return Status("undefined", f"{name} is not a number for these images")
    if name == "psnr" and value >= ceiling - 1e-9:
        return Status("ok", f"at the ceiling of {ceiling:.1f} dB, equal to rounding")
    return status


@cache
def _say_once(name: str, why: str) -> None:
    _log.warning("leakwatch leaves out %s: %s.", name, why)


def _like(rows: Tensor, t: Tensor) -> Tensor:
    return rows.reshape(-1, *[1] * (t.ndim - 1))


def _check(images: Tensor, originals: Tensor, data_range: float) -> None:
    tensors: tuple[tuple[str, object], ...] = (
        ("images", images),
        ("originals", originals),
    )
    for name, t in tensors:
        if not isinstance(t, Tensor) or not t.is_floating_point():
            kind = t.dtype if isinstance(t, Tensor) else type(t).__name__
            raise TypeError(f"{name} must be a floating point tensor, got {kind}.")
    if images.shape != originals.shape or images.ndim < 2 or len(images) == 0:
        raise ValueError(
            f"images and originals must have the same shape (n, ...) with n ≥ 1, got "
            f"{tuple(images.shape)} and {tuple(originals.shape)}; for joint attacks "
            f"align first, see leakwatch.quality.align."
        )
    if not 0 < data_range < math.inf:
        raise ValueError(f"data_range must be positive and finite, got {data_range!r}.")


def _check_range(originals: Tensor, low: float, data_range: float) -> None:
    if originals.numel() == 0:
        return
    least, most = originals.min().item(), originals.max().item()
    slack = _SLACK * data_range
    if least < low - slack or most > low + data_range + slack:
        raise ValueError(
            f"the originals' pixels lie in [{least:.3g}, {most:.3g}], outside of [low, "
            f"low + data_range] = [{low:.3g}, {low + data_range:.3g}]; give the mean "
            f"and std of the normalisation, the right low and data_range, or low=None "
            f"when the range is not known."
        )
