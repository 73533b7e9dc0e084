"""Finds what a forward computes once from the weights and keeps for the next time.

Some networks keep tensors that depend on weights alone (position biases, fused or
normalised kernels) from one forward in eval mode to the next. Such a tensor belongs to
the weights and the precision that it was made from, and no gradient flows through it
any more: a network that has been validated before it is probed would lose part of its
gradient without an error. Evaluations start with these caches empty.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

__all__ = ["Caches"]

_Slot: TypeAlias = tuple[nn.Module, str]

# Every module has these, and they are not its own.
_REGISTRIES = frozenset(vars(nn.Module()))


class Caches:
    """Plain attributes in which a forward keeps what it derived from the weights.

    A cache is an attribute (a tensor, or a dictionary of tensors) that a forward fills
    when it finds it empty (``None``, or without entries), with the same content
    whatever the input. What depends on the input is a state, and is left alone.

    Attributes:
        slots: the caches, once found: module and name of the attribute.
    """

    def __init__(self) -> None:
        self.slots: list[_Slot] = []
        self._seen: list[Any] | None = None

    def empty(self) -> None:
        """Puts nothing in place of what the caches hold."""
        for module, key in self.slots:
            full = isinstance(vars(module).get(key), dict)
            vars(module)[key] = {} if full else None

    def look(self) -> None:
        """Remembers what a forward left in the slots, while a search goes on."""
        if self._seen is not None:
            self._seen = [_copied(vars(m).get(key)) for m, key in self.slots]

    def find(self, root: nn.Module, run: Callable[[int], object]) -> None:
        """Searches all submodules.

        Args:
            root: the network.
            run: evaluates one of two different inputs, number 0 or 1, calling
                :meth:`empty` before the forward and :meth:`look` after it.
        """
        candidates = [
            (m, key)
            for m in root.modules()
            for key, value in vars(m).items()
            if key not in _REGISTRIES and _may_be_cache(value)
        ]
        bare = [slot for slot in candidates if not _holds_tensors(_value(slot))]
        caches: list[_Slot] = []
        # Emptying what is full may break a forward, so each of them has its own turn.
        for group in [bare, *([slot] for slot in candidates if slot not in bare)]:
            if group:
                caches += self._refilled(group, run)
        self.slots = caches

    def _refilled(
        self, group: list[_Slot], run: Callable[[int], object]
    ) -> list[_Slot]:
        self.slots = group
        contents: list[list[Any]] = []
        try:
            for sample in (0, 1):
                self._seen = []
                run(sample)
                contents.append(self._seen)
        except Exception:
            return []
        finally:
            self.slots, self._seen = [], None
        pairs = zip(group, *contents, strict=True)
        return [slot for slot, a, b in pairs if _holds_tensors(a) and _equal(a, b)]


def _value(slot: _Slot) -> Any:
    return vars(slot[0])[slot[1]]


def _may_be_cache(value: object) -> bool:
    bare = value is None or (type(value) is dict and not value)
    return bare or _holds_tensors(value)


def _holds_tensors(value: object) -> bool:
    if type(value) is dict:
        return bool(value) and all(type(t) is Tensor for t in value.values())
    return type(value) is Tensor


def _copied(value: object) -> object:
    if not _holds_tensors(value):
        return None
    if isinstance(value, dict):
        return {key: t.detach().clone() for key, t in value.items()}
    return value.detach().clone() if isinstance(value, Tensor) else None


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    return isinstance(b, Tensor) and torch.equal(a, b)
