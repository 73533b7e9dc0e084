"""Between network inputs and pixels: x = (pixel − mean) / std, per channel."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np
import numpy.typing as npt
from jaxtyping import Float
from torch import Tensor

__all__ = [
    "Channels",
    "as_channels",
    "check_channels",
    "check_normalization",
    "per_channel",
    "to_input",
    "to_pixels",
    "within_unit_range",
]

#: One number per channel, or one for all channels.
Channels = float | Sequence[float] | npt.NDArray[Any] | Tensor

_Pair = tuple[tuple[float, ...], tuple[float, ...]] | tuple[None, None]


def as_channels(name: str, values: Any) -> tuple[float, ...]:
    """A number, or a sequence, array or tensor of numbers, as a tuple of floats.

    Arrays may have the shape in which they are broadcast, such as (3, 1, 1).

    Args:
        name: of the argument.
        values: what was given.

    Raises:
        TypeError: for anything else, or nothing at all.
        ValueError: for numbers that are not finite.

    Example:
        >>> import torch
        >>> as_channels("mean", torch.tensor([[[0.5]], [[0.25]]]))
        (0.5, 0.25)
    """
    listed = values
    if isinstance(values, Tensor | np.ndarray | np.generic):
        flat = max(values.shape, default=1) == math.prod(values.shape)
        listed = values.reshape(-1).tolist() if flat else None
    if isinstance(listed, Real):
        listed = [listed]
    good = isinstance(listed, Sequence) and not isinstance(listed, str) and listed
    if not good or not all(
        isinstance(v, Real) and not isinstance(v, bool) for v in listed
    ):
        raise TypeError(
            f"{name} must be one finite number per channel, got {values!r}; for "
            f"instance {name}=[0.5, 0.5, 0.5]."
        )
    numbers = tuple(float(v) for v in listed)
    if not all(map(math.isfinite, numbers)):
        raise ValueError(f"{name} must be finite, got {numbers}.")
    return numbers


def check_channels(mean: Any, std: Any, shape: Sequence[int] | None = None) -> _Pair:
    """The normalisation (pixel − mean) / std, as two tuples; or (None, None).

    Args:
        mean: a number, or one per channel, in any container.
        std: the same.
        shape: of a batch of inputs, with the channels second; checked if given.

    Raises:
        TypeError: for anything but numbers.
        ValueError: for one without the other, different lengths, another number of
            channels, a std that is not positive, or numbers that are not finite.
    """
    if mean is None and std is None:
        return None, None
    if mean is None or std is None:
        raise ValueError(
            f"mean={mean!r} and std={std!r} describe one normalisation; give both or "
            f"neither, for instance mean=[0.5], std=[0.25]."
        )
    means, stds = as_channels("mean", mean), as_channels("std", std)
    if len(means) != len(stds):
        raise ValueError(
            f"mean has {len(means)} entries and std {len(stds)}; expected one per "
            f"channel in both."
        )
    if min(stds) <= 0:
        raise ValueError(f"std must be positive, got {list(stds)}.")
    if shape is not None:
        _check_count(len(means), tuple(shape), 1)
    return means, stds


def check_normalization(
    mean: Any, std: Any, x: Float[Tensor, "..."], data_range: float | None = None
) -> _Pair:
    """:func:`check_channels` for inputs at hand, which may contradict it.

    Normalised images of a positive mean have values below 0, those of pixels darker
    than the mean. Inputs that all lie in [0, 1] are most likely pixels still. And
    pixels far outside of their range were normalised by other numbers.

    Args:
        mean: a number, or one per channel, in any container.
        std: the same.
        x: network inputs, with the channels second.
        data_range: largest pixel value, the smallest being 0; ``None`` for not known.

    Warns:
        UserWarning: the inputs look like pixels, or what ``mean`` and ``std`` make of
            them doesn't.

    Raises:
        TypeError: see :func:`check_channels`.
        ValueError: the same.
    """
    pair = check_channels(mean, std, x.shape)
    means, stds = pair
    if means is not None and min(means) > 0 and within_unit_range(x):
        warnings.warn(
            f"mean={list(means)} and std={list(stds or ())} say that inputs are "
            f"normalised, but these lie between 0 and 1, as pixels do: normalised "
            f"images have values below 0 wherever a pixel is darker than the mean. "
            f"Where the network gets pixels, leave mean and std out: errors in pixels "
            f"and predicted PSNRs refer to a wrong scale with them.",
            stacklevel=3,
        )
    if means is not None and data_range is not None and x.numel():
        pixels = to_pixels(x.detach().float(), means, stds)
        low, high = pixels.amin().item(), pixels.amax().item()
        # Interpolated and noisy images are a little outside.
        if low < -0.1 * data_range or high > 1.1 * data_range:
            warnings.warn(
                f"with mean={list(means)} and std={list(stds or ())} the pixels of "
                f"these inputs lie in [{low:.3g}, {high:.3g}], outside of "
                f"[0, {data_range:g}]: predicted PSNRs refer to a wrong scale unless "
                f"mean, std and data_range are those of the inputs.",
                stacklevel=3,
            )
    return pair


def within_unit_range(x: Float[Tensor, "..."]) -> bool:
    """Whether all values lie in [0, 1]."""
    return bool((x.amin() >= 0) & (x.amax() <= 1))


def per_channel(
    values: Sequence[float], x: Float[Tensor, "..."], channel: int = 1
) -> Float[Tensor, "..."]:
    """One number per channel, to broadcast against ``x``, of its dtype and device.

    Args:
        values: one per channel, or one for all.
        x: a batch of inputs.
        channel: the dimension of the channels in ``x``.

    Raises:
        ValueError: if ``x`` has another number of channels.
    """
    if len(values) == 1:
        return x.new_full((), values[0])
    _check_count(len(values), tuple(x.shape), channel)
    after = x.ndim - 1 - channel if channel >= 0 else -channel - 1
    return x.new_tensor(values).view(-1, *[1] * after)


def to_pixels(
    x: Float[Tensor, "..."],
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    channel: int = 1,
) -> Float[Tensor, "..."]:
    """Pixels of network inputs, x · std + mean; ``x`` itself without a normalisation.

    Args:
        x: network inputs.
        mean: from :func:`check_channels`.
        std: the same.
        channel: the dimension of the channels.

    Raises:
        ValueError: if ``x`` has another number of channels.
    """
    if mean is None or std is None:
        return x
    return x * per_channel(std, x, channel) + per_channel(mean, x, channel)


def to_input(
    p: Float[Tensor, "..."],
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    channel: int = 1,
) -> Float[Tensor, "..."]:
    """Network inputs of pixels, (p − mean) / std: the inverse of :func:`to_pixels`."""
    if mean is None or std is None:
        return p
    return (p - per_channel(mean, p, channel)) / per_channel(std, p, channel)


def _check_count(count: int, shape: tuple[int, ...], channel: int) -> None:
    there = -len(shape) <= channel < len(shape)
    if count != 1 and not (there and shape[channel] == count):
        raise ValueError(
            f"mean and std have {count} entries, one per channel, but dimension "
            f"{channel} of inputs of shape {shape} "
            + (f"has {shape[channel]}" if there else "is missing")
            + "; give as many numbers as there are channels, or one for all."
        )
