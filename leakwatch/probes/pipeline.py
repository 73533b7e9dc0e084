"""What a data set says about itself: normalisation, class names, random streams."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

__all__ = [
    "DatasetStreams",
    "as_channels",
    "find_class_names",
    "find_normalization",
    "walk",
]

_FOLLOWED = ("dataset", "datasets", "transform", "transforms", "target_transform")


def walk(dataset: Any) -> Iterator[Any]:
    """The data set, the data sets that it wraps, and all of their transforms.

    Goes by attribute names (`dataset`, `datasets`, `transform`, `transforms`,
    `target_transform`), so that it needs no library of transforms.
    """
    seen: dict[int, Any] = {}
    waiting = [dataset]
    while waiting:
        item = waiting.pop(0)
        if item is None or id(item) in seen:
            continue
        seen[id(item)] = item
        yield item
        for name in _FOLLOWED:
            value = getattr(item, name, None)
            # A plain list under "dataset" holds samples, not transforms.
            if isinstance(value, list | tuple) and name != "dataset":
                waiting.extend(value)
            else:
                waiting.append(value)
        if isinstance(item, nn.Module):
            waiting.extend(item.children())


def find_normalization(
    dataset: Any, trust_attributes: bool
) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """(mean, std) of the transform called `Normalize`, or None.

    Args:
        dataset: any map-style data set.
        trust_attributes: without such a transform, go by the attributes `mean` and
            `std` of the data set. They may be there without having been applied.

    Warns:
        UserWarning: several normalisations disagree; none is used.
    """
    applied, stated = set(), set()
    for item in walk(dataset):
        pair = _pair(item)
        if pair is None:
            continue
        if type(item).__name__ == "Normalize":
            applied.add(pair)
        elif trust_attributes and hasattr(item, "__getitem__"):
            stated.add(pair)
    pairs = applied or stated
    if len(pairs) > 1:
        warnings.warn(
            f"found {len(pairs)} different normalisations {sorted(pairs)}; using none: "
            "pass mean=... and std=... of the whole pipeline",
            stacklevel=3,
        )
    return pairs.pop() if len(pairs) == 1 else None


def find_class_names(dataset: Any) -> tuple[str, ...] | None:
    """`classes` of the data set, unless its labels are transformed, or None."""
    stated = set()
    for item in walk(dataset):
        if getattr(item, "target_transform", None) is not None:
            return None
        names = getattr(item, "classes", None)
        if isinstance(names, list | tuple) and all(isinstance(n, str) for n in names):
            stated.add(tuple(names))
    return stated.pop() if len(stated) == 1 else None


class DatasetStreams:
    """Random generators that a data set or one of its transforms owns.

    Reading items draws from them, so they are given back as they were found.
    """

    def __init__(self, dataset: Any) -> None:
        owned = {}
        for item in walk(dataset):
            for value in getattr(item, "__dict__", {}).values():
                if isinstance(value, _GENERATORS):
                    owned[id(value)] = value
        self._owned: list[Any] = list(owned.values())

    def seed(self, seed: int) -> None:
        """Seed each of them."""
        for stream in self._owned:
            if isinstance(stream, torch.Generator):
                stream.manual_seed(seed)
            elif isinstance(stream, np.random.Generator):
                bits = stream.bit_generator
                bits.state = type(bits)(seed).state
            else:
                stream.seed(seed)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Put each back into its present state at the end."""
        states = [_get_state(stream) for stream in self._owned]
        try:
            yield
        finally:
            for stream, state in zip(self._owned, states, strict=True):
                _set_state(stream, state)


_GENERATORS = (
    torch.Generator,
    np.random.Generator,
    np.random.RandomState,
    random.Random,
)


def _get_state(stream: Any) -> Any:
    if isinstance(stream, np.random.Generator):
        return stream.bit_generator.state
    return (
        stream.getstate() if isinstance(stream, random.Random) else stream.get_state()
    )


def _set_state(stream: Any, state: Any) -> None:
    if isinstance(stream, np.random.Generator):
        stream.bit_generator.state = state
    elif isinstance(stream, random.Random):
        stream.setstate(state)
    else:
        stream.set_state(state)


def as_channels(values: Any, name: str) -> tuple[float, ...]:
    """A number, sequence, array or tensor as a tuple of floats.

    Raises:
        TypeError: `values` is none of these.
    """
    listed = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(listed, int | float):
        listed = [listed]
    try:
        return tuple(float(value) for value in listed)
    except (TypeError, ValueError):
        raise TypeError(
            f"{name}={values!r}; expected one number per channel, such as "
            f"{name}=[0.5, 0.5, 0.5]"
        ) from None


def _pair(item: Any) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    mean, std = getattr(item, "mean", None), getattr(item, "std", None)
    numeric = (int, float, Sequence, np.ndarray, torch.Tensor)
    if not isinstance(mean, numeric) or not isinstance(std, numeric):
        return None
    try:
        pair = as_channels(mean, "mean"), as_channels(std, "std")
    except TypeError:
        return None
    return pair if all(value > 0 for value in pair[1]) else None
