"""One number per channel: checks, and ImageNet's mean and standard deviation."""

from __future__ import annotations

import math
from collections.abc import Sequence

_MEAN = (0.485, 0.456, 0.406)
_STD = (0.229, 0.224, 0.225)


def imagenet_moments(
    channels: int,
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of ImageNet's pixels.

    Args:
        channels: 3, or 1 for the averages over the channels.

    Example:
        >>> imagenet_moments(1)
        ((0.449,), (0.226,))
    """
    if channels == 3:
        return _MEAN, _STD
    return (round(sum(_MEAN) / 3, 4),), (round(sum(_STD) / 3, 4),)


def per_channel(
    name: str, chosen: Sequence[float] | None, own: tuple[float, ...]
) -> tuple[float, ...]:
    """Return what was given, or the data set's own numbers.

    Args:
        name: "mean" or "std".
        chosen: One number per channel, or None.
        own: What applies when nothing is given.

    Raises:
        ValueError: Not one finite number per channel, or a "std" that isn't above 0.
    """
    if chosen is None:
        return own
    values = tuple(float(value) for value in chosen)
    good = len(values) == len(own) and all(map(math.isfinite, values))
    if not good or (name == "std" and min(values) <= 0):
        raise ValueError(
            f"{name} must be {len(own)} finite number(s), one per channel"
            f"{', each above 0' if name == 'std' else ''}, got {list(chosen)}."
        )
    return values
