"""One number per channel: checks, and ImageNet's mean and standard deviation."""

from __future__ import annotations

from numbers import Real

from leakwatch.normalization import Channels, as_channels

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
    name: str, chosen: Channels | None, own: tuple[float, ...]
) -> tuple[float, ...]:
    """Return what was given, or the data set's own numbers.

    Args:
        name: "mean" or "std".
        chosen: One number per channel, one for all, or None.
        own: What applies when nothing is given.

    Raises:
        TypeError: No numbers.
        ValueError: Not one finite number per channel, or a "std" that isn't above 0.
    """
    if chosen is None:
        return own
    values = as_channels(name, chosen)
    if isinstance(chosen, Real):
        values = values * len(own)
    if len(values) != len(own) or (name == "std" and min(values) <= 0):
        raise ValueError(
            f"{name} must be {len(own)} finite number(s), one per channel"
            f"{', each above 0' if name == 'std' else ''}, got {list(values)}."
        )
    return values
