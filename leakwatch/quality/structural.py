"""SSIM and FSIM of image batches, in float64."""

from __future__ import annotations

import importlib
import math
import warnings
from typing import Final

import torch
from jaxtyping import Float64
from torch import Tensor

from leakwatch.derivatives.runtime.chunking import in_chunks
from leakwatch.status import OK, Status

__all__ = ["PIQ_MISSING", "fsim", "has_piq", "ssim"]

_WINDOW: Final = 11
_SIGMA: Final = 1.5
_CHUNK: Final = 64
_SMALLEST_FSIM: Final = 16
_FLAT: Final = 1e-6

PIQ_MISSING: Final = (
    "FSIM needs the package piq, which is not installed: pip install piq"
)


def ssim(
    images: Float64[Tensor, "n channels height width"],
    originals: Float64[Tensor, "n channels height width"],
    data_range: float,
) -> tuple[Float64[Tensor, " n"], Status]:
    """Mean structural similarity, Gaussian window of 11 pixels and σ = 1.5.

    Wang et al. 2004 through torchmetrics, which mirrors the image at its border. For
    images with a side below 11 pixels the window, and σ with it, shrinks to the
    largest odd size that fits: such values compare with each other, not with those of
    larger images.

    Args:
        images: reconstructions, pixel units.
        originals: what they should show.
        data_range: peak of the pixels.

    Returns:
        Values in [−1, 1], and one status for all: ``ok``, ``estimated`` for a shrunken
        window, ``undefined`` (and NaN) when a side is below 3 pixels.
    """
    from torchmetrics.functional.image import (
        structural_similarity_index_measure as measure,
    )

    side = min(images.shape[-2:])
    window = min(_WINDOW, side - 1 + side % 2)
    if window < 3:
        reason = f"SSIM needs images of at least 3 pixels a side, these have {side}"
        return images.new_full((len(images),), math.nan), Status("undefined", reason)
    half = (window - 1) // 2
    # torchmetrics derives the window from σ: 2·⌊3.5 σ + ½⌋ + 1.
    sigma = _SIGMA * half / ((_WINDOW - 1) // 2)

    def chunk(a: Tensor, b: Tensor) -> Tensor:
        value = measure(a, b, sigma=sigma, data_range=data_range, reduction="none")
        assert isinstance(value, Tensor)
        return value.reshape(len(a))

    status = OK
    if window < _WINDOW:
        status = Status(
            "estimated",
            f"window of {window} pixels instead of {_WINDOW}, for images of {side} "
            f"pixels a side",
        )
    return in_chunks(chunk, (images, originals), _CHUNK), status


def has_piq() -> bool:
    """Whether FSIM can be computed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module("piq")
    except ImportError:
        return False
    return True


def fsim(
    images: Float64[Tensor, "n channels height width"],
    originals: Float64[Tensor, "n channels height width"],
    data_range: float,
) -> tuple[Float64[Tensor, " n"], Status]:
    """Feature similarity (its colour form FSIMc for three channels) through piq.

    Args:
        images: reconstructions; values outside of [0, data_range] are clipped, as the
            measure isn't defined there.
        originals: what they should show.
        data_range: peak of the pixels.

    Returns:
        Values, mostly in [0, 1], NaN where neither image has any structure; and one
        status for all: ``undefined`` for other channel counts than 1 and 3, and for
        sides below 16 pixels, where the coarser of its filters don't fit.
    """
    channels, side = images.shape[1], min(images.shape[-2:])
    reason = ""
    if channels not in (1, 3):
        reason = f"FSIM is for 1 or 3 channels, these images have {channels}"
    elif side < _SMALLEST_FSIM:
        reason = (
            f"FSIM needs images of at least {_SMALLEST_FSIM} pixels a side, these have "
            f"{side}"
        )
    if reason:
        return images.new_full((len(images),), math.nan), Status("undefined", reason)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        piq = importlib.import_module("piq")

        def chunk(a: Tensor, b: Tensor) -> Tensor:
            value: Tensor = piq.fsim(
                a.clamp(0, data_range),
                b.clamp(0, data_range),
                data_range=data_range,
                chromatic=channels == 3,
                reduction="none",
            )
            return value.reshape(len(a)).to(torch.float64)

        values = in_chunks(chunk, (images, originals), _CHUNK)
    # Two flat images leave 0/0, which rounding turns into any number.
    spread = torch.stack([x.flatten(1) for x in (images, originals)])
    flat = (spread.amax(2) - spread.amin(2) < _FLAT * data_range).all(0)
    return values.masked_fill(flat, math.nan), OK
