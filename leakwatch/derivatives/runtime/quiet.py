"""Whether a forward leaves its module as it was, so that nothing need be undone."""

from __future__ import annotations

from collections import deque
from typing import Any

from torch import Tensor, nn

from leakwatch.derivatives.runtime import SampleLoss

__all__ = ["is_quiet"]


def is_quiet(
    loss: SampleLoss, tensors: dict[str, Tensor], x: Tensor, y: Tensor
) -> bool:
    """Runs one forward and tells whether it wrote into attributes or buffers.

    Args:
        loss: module and criterion, inside an evaluation; left as it was.
        tensors: all weights, by name.
        x: network inputs.
        y: labels.

    Returns:
        ``True`` if the criterion may be called again and again without putting
        anything back in between.
    """
    criterion = loss.criterion
    if isinstance(criterion, nn.Module):
        return False
    seen: list[bool] = []

    def watched(module: nn.Module, xs: Tensor, ys: Tensor) -> Tensor:
        before = _state(module)
        out = criterion(module, xs, ys)
        after = _state(module)
        same = len(before) == len(after)
        seen.append(same and all(map(_same, before, after)))
        return out

    loss.criterion = watched
    try:
        loss.batch(tensors, x, y)
    finally:
        loss.criterion = criterion
    return seen == [True]


def _state(module: nn.Module) -> list[tuple[Any, ...]]:
    """Everything that a forward may change, held so that no identity is reused."""
    found: list[tuple[Any, ...]] = []
    for m in module.modules():
        for space in (vars(m), m._buffers, m._parameters):
            for name, value in space.items():
                found.append((name, value, *_inside(value)))
    return found


def _inside(value: object) -> list[object]:
    if isinstance(value, Tensor):
        return [value._version]
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    return [*value] if isinstance(value, list | set | deque) else []


def _same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    if len(a) != len(b):
        return False
    pairs = zip(a, b, strict=True)
    # Versions and names are compared by value, all else is the same object or not.
    return all(
        x is y or (isinstance(x, int | str) and type(x) is type(y) and x == y)
        for x, y in pairs
    )
