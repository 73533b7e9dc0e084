"""Examinations of networks that have not changed since.

An examination costs as much as ten products with J; a network that is scored again, as
it was, is not examined again.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn

from leakwatch.derivatives.losses import classification_criterion
from leakwatch.derivatives.runtime import SampleLoss
from leakwatch.derivatives.verification.verify import Examination, Path

__all__ = ["known", "remember"]

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
# What is the same as long as it is the same object.
_FIXED = (types.FunctionType, types.BuiltinFunctionType, type)
_CONTAINERS = (dict, list, tuple, set, frozenset)

_Atom: TypeAlias = tuple[Callable[[], object] | None, object]
"""An object that must be the same one, and a value that must be equal."""


@dataclass(frozen=True)
class _Known:
    state: list[_Atom]
    by_use: dict[object, tuple[Examination, frozenset[str] | None]]


_NETWORKS: Final[weakref.WeakKeyDictionary[nn.Module, _Known]] = (
    weakref.WeakKeyDictionary()
)


def known(loss: SampleLoss, x: Tensor, y: Tensor, path: Path) -> Examination | None:
    """What an examination of the same network as it is now has found.

    Args:
        loss: module and criterion; what was found about its tensors is put back, too.
        x: inputs, of which shape and type count.
        y: labels.
        path: the wanted path.

    Returns:
        ``None`` when it has to be examined: it never was, something in it has changed,
        or it reaches objects of which nobody can tell.
    """
    held = _NETWORKS.get(loss.module)
    found = held and held.by_use.get(_use(loss, x, y, path))
    if not _plain(loss) or held is None or not found:
        return None
    if not _same(held.state, _state(loss.module)):
        return None
    examination, loss.tensors.written = found
    return examination


def remember(
    loss: SampleLoss, x: Tensor, y: Tensor, path: Path, found: Examination
) -> None:
    """Keeps what an examination has found, with the arguments of :func:`known`."""
    # Caches are found by a search, which is part of the examination.
    plain = _plain(loss) and found.conclusive and not loss.caches.slots
    state = _state(loss.module) if plain else None
    if state is None:
        return
    held = _NETWORKS.get(loss.module)
    if held is None or not _same(held.state, state):
        held = _NETWORKS[loss.module] = _Known(state, {})
    held.by_use[_use(loss, x, y, path)] = found, loss.tensors.written


def _plain(loss: SampleLoss) -> bool:
    """No criterion or preparation, which may close over anything."""
    stated = loss.criterion is not classification_criterion
    return not stated and vars(loss)["prepare"] is None


def _use(loss: SampleLoss, x: Tensor, y: Tensor, path: Path) -> object:
    return x.shape[1:], x.dtype, x.device, y.shape[1:], y.dtype, loss.only, path


def _state(root: nn.Module) -> list[_Atom] | None:
    """All that a forward can depend on, or ``None`` where that can't be told."""
    atoms: list[_Atom] = []
    seen: set[int] = set()
    waiting: list[Any] = [root]
    while waiting:
        item = waiting.pop()
        kind = type(item)
        if isinstance(item, _PLAIN):
            atoms.append((None, item))
        elif isinstance(item, _FIXED):
            atoms.append((_reference(item), None))
        elif id(item) in seen:
            continue
        elif isinstance(item, nn.Module):
            seen.add(id(item))
            atoms.append((_reference(item), None))
            atoms.append((_reference(kind), None))
            waiting += [kind.forward, vars(item)]
        elif isinstance(item, Tensor):
            seen.add(id(item))
            if item.is_inference() or item.layout != torch.strided:
                return None
            version = item.data_ptr(), item._version, item.requires_grad, item.dtype
            atoms.append((_reference(item), (version, item.shape, item.device)))
            waiting += [item._backward_hooks, item._post_accumulate_grad_hooks]
        elif isinstance(item, _CONTAINERS) and kind.__module__ in (
            "builtins",
            "collections",
            "torch",
        ):
            seen.add(id(item))
            atoms.append((None, (kind, len(item))))
            waiting += item
            if isinstance(item, dict):
                waiting += item.values()
        else:
            return None
    return atoms


def _reference(item: Any) -> Callable[[], object]:
    # Types and functions of C never go away, and some can't be referred to weakly.
    fixed = isinstance(item, types.BuiltinFunctionType)
    return (lambda: item) if fixed else weakref.ref(item)


def _same(then: list[_Atom], now: list[_Atom] | None) -> bool:
    if now is None or len(then) != len(now):
        return False
    for (old, value), (new, current) in zip(then, now, strict=True):
        if (old is None) != (new is None) or type(value) is not type(current):
            return False
        if value != current and value == value:
            return False
        if old is not None and new is not None and old() is not new():
            return False
    return True
