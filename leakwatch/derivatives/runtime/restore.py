"""What evaluations replace in a module, remembered and put back."""

from __future__ import annotations

import operator
from collections import deque
from typing import Any

from torch import nn

__all__ = ["Attributes", "members", "restore"]

_ABSENT = object()


def members(root: nn.Module) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The parameter and buffer registries of all submodules, each with a copy."""
    spaces = [s for m in root.modules() for s in (m._parameters, m._buffers)]
    return [(space, dict(space)) for space in spaces]


def restore(before: list[tuple[dict[Any, Any], dict[Any, Any]]]) -> None:
    """Gives registries their entries and order back, as the same dictionaries."""
    for space, own in before:
        same = list(space) == list(own) and all(space[k] is own[k] for k in own)
        if not same:
            space.clear()
            space.update(own)


class Attributes:
    """Plain attributes of all submodules, and what the containers among them hold."""

    def __init__(self, root: nn.Module) -> None:
        self._spaces = [(vars(m), dict(vars(m))) for m in root.modules()]
        self._containers = [
            (value, type(value)(value))
            for _, before in self._spaces
            for value in before.values()
            if type(value) in (list, dict, set, deque)
        ]

    def put_back(self) -> None:
        """Gives back what was replaced, and drops what is new."""
        for space, before in self._spaces:
            for name in space.keys() - before.keys():
                del space[name]
            for name, value in before.items():
                if space.get(name, _ABSENT) is not value:
                    space[name] = value
        for container, contents in self._containers:
            now, then = _flat(container), _flat(contents)
            if len(now) != len(then) or any(map(operator.is_not, now, then)):
                container.clear()
                fill = container.extend if hasattr(container, "extend") else None
                (fill or container.update)(contents)


def _flat(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return [*container.keys(), *container.values()]
    return list(container)
