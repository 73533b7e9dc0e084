"""Pixel units, and the scale of the data in them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from typing import Literal

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from leakwatch.normalization import per_channel, to_pixels
from leakwatch.priors import GaussianPrior, measured_prior
from leakwatch.priors.measured import FEWEST as MINIMUM_ITEMS

__all__ = [
    "MINIMUM_ITEMS",
    "from_pixels_slope",
    "measure_prior",
    "resolve_range",
    "uniform_prior",
]


def from_pixels_slope(
    shape: torch.Size, std: tuple[float, ...] | None
) -> Float64[Tensor, " d_x"]:
    """d(input)/d(pixel) for each element of a sample of the given shape."""
    scale = torch.ones(1, *shape, dtype=torch.float64, device="cpu")
    return (scale if std is None else scale / per_channel(std, scale)).flatten()


def resolve_range(
    x: Float[Tensor, "n ..."],
    mean: tuple[float, ...] | None,
    std: tuple[float, ...] | None,
    data_range: float | None,
) -> tuple[float, Literal["pixel", "input"]]:
    """(data range, units) of a set of probes.

    Warns:
        UserWarning: mean and std are given and the pixels do not lie in [0, 1].

    Raises:
        ValueError: the range can't be told because all values are equal.
    """
    pixels = to_pixels(x.double(), mean, std)
    low, high = pixels.min().item(), pixels.max().item()
    if mean is not None:
        if data_range is not None:
            return data_range, "pixel"
        if low >= -0.1 and high <= 1.1:
            return 1.0, "pixel"
        warnings.warn(
            f"with mean={mean} and std={std} the probes' pixels lie in [{low:.3g}, "
            f"{high:.3g}]; expected [0, 1]. Using their range: check mean and std, or "
            "pass data_range=...",
            stacklevel=4,
        )
    else:
        peak = 1.0 if data_range is None else data_range
        if low >= -1e-6 and high <= peak + 1e-6:
            return peak, "pixel"
        if data_range is not None:
            return data_range, "input"
    if not high > low:
        raise ValueError(
            f"all probe values equal {low:.3g}, so their range is unknown; pass "
            "data_range=..., the distance from the smallest to the largest value"
        )
    return high - low, "pixel" if mean is not None else "input"


def measure_prior(
    inputs: Iterable[Float[Tensor, " ..."]],
    shape: torch.Size,
    mean: tuple[float, ...] | None,
    std: tuple[float, ...] | None,
) -> GaussianPrior | None:
    """The statistics of a data set, in pixel units.

    Inputs of another shape than `shape` are passed over.

    Returns:
        None when fewer than `MINIMUM_ITEMS` inputs count, or when they do not vary.
    """
    fitting = (x for x in inputs if x.shape == shape and bool(x.isfinite().all()))
    pixels = (to_pixels(x.double()[None], mean, std)[0] for x in fitting)
    try:
        return measured_prior(pixels)
    except ValueError:
        return None


def uniform_prior(
    x: Float[Tensor, "n ..."], data_range: float, units: Literal["pixel", "input"]
) -> tuple[Float64[Tensor, " ..."], float]:
    """The prior of independent pixels, uniform over the data range.

    The range starts at 0 in pixel units, at the smallest probe value in input units.
    """
    start = 0.0 if units == "pixel" else x.double().min().item()
    centre = torch.full(
        x.shape[1:], start + data_range / 2, dtype=torch.float64, device="cpu"
    )
    return centre, data_range / math.sqrt(12)
