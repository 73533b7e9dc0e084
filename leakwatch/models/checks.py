"""Argument checks that every architecture shares."""

from __future__ import annotations

from collections.abc import Sequence


def positive_int(name: str, value: object) -> int:
    """Return `value` when it is an integer of at least 1.

    Args:
        name: Name of the argument, for the error text.
        value: What was given.

    Raises:
        TypeError: `value` is not an integer (a bool is not one here).
        ValueError: `value` is below 1.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f"{name} must be an integer of at least 1, such as {name}=10, "
            f"got {value!r} ({type(value).__name__})."
        )
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}.")
    return value


def height_width(image_size: object) -> tuple[int, int]:
    """Return (height, width) of a square or a rectangular image size.

    Args:
        image_size: One integer, or a sequence (height, width), in pixels.

    Raises:
        TypeError: Neither an integer nor a pair of integers.
        ValueError: A side is below 1.

    Example:
        >>> height_width(28), height_width([32, 48])
        ((28, 28), (32, 48))
    """
    if isinstance(image_size, Sequence) and not isinstance(image_size, str):
        if len(image_size) != 2:
            raise TypeError(
                "image_size must be one integer or (height, width), such as "
                f"image_size=28 or image_size=(32, 48), got {image_size!r}."
            )
        height, width = image_size
    else:
        height = width = image_size
    return positive_int("image_size", height), positive_int("image_size", width)


def at_least(network: str, size: tuple[int, int], least: int) -> None:
    """Refuse images that the strides of a network would shrink to nothing.

    Args:
        network: Its name, for the error text.
        size: (height, width) of the images, in pixels.
        least: Smallest side that works, in pixels.

    Raises:
        ValueError: A side is below `least`.
    """
    if min(size) < least:
        height, width = size
        raise ValueError(
            f"{network} needs images of at least {least}×{least} pixels, got "
            f"image_size={height}×{width}; resize them, or take a network with fewer "
            "strides, such as 'lenet' or 'resnet8'."
        )
