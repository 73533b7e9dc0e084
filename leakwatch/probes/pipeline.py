"""What a data set says about itself: normalisation and class names."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from leakwatch.normalization import as_channels

__all__ = [
    "find_class_names",
    "find_normalization",
    "walk",
]

_FOLLOWED = ("dataset", "datasets", "transform", "transforms", "target_transform")


def walk(dataset: Any, get: Callable[[Any, str, None], Any] = getattr) -> Iterator[Any]:
    """The data set, the data sets that it wraps, and all of their transforms.

    Goes by attribute names (`dataset`, `datasets`, `transform`, `transforms`,
    `target_transform`), so that it needs no library of transforms.

    Args:
        dataset: any object.
        get: how an attribute is looked up, `None` without it.
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
            value = get(item, name, None)
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


def _pair(item: Any) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    mean, std = getattr(item, "mean", None), getattr(item, "std", None)
    numeric = (int, float, Sequence, np.ndarray, torch.Tensor)
    if not isinstance(mean, numeric) or not isinstance(std, numeric):
        return None
    try:
        pair = as_channels("mean", mean), as_channels("std", std)
    except (TypeError, ValueError):
        return None
    return pair if all(value > 0 for value in pair[1]) else None
