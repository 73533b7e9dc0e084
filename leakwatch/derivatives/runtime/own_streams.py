"""Random streams that belong to a module or to what it holds, not to the process."""

from __future__ import annotations

import functools
import itertools
import pickle
import random
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import (
    BuiltinMethodType,
    FunctionType,
    GeneratorType,
    MethodType,
    ModuleType,
)
from typing import Any, Final, TypeAlias, final

import numpy as np
import torch
from torch import Tensor, nn

__all__ = [
    "STREAMS",
    "OwnStreams",
    "own_streams_kept",
    "seed_stream",
    "set_state",
    "state_of",
]

Stream: TypeAlias = (
    torch.Generator | np.random.Generator | np.random.RandomState | random.Random
)
STREAMS: Final = (
    torch.Generator,
    np.random.Generator,
    np.random.RandomState,
    random.Random,
)
# Objects from one to the next, beginning at a module; and items of a container: more
# are data.
_DEPTH, _MOST = 4, 1000
_CONTAINERS = (dict, list, set, frozenset, tuple, deque)
_LEAVES = (Tensor, np.ndarray, ModuleType, str, bytes, int, float, complex, type(None))
# Their objects draw from global streams, and lead to everything else. Ours draw noise
# on purpose: a defense that hooks into the module must not draw the same twice.
_FOREIGN = frozenset(
    ("leakwatch", "lightning", "pytorch_lightning", "torch", "logging", "threading",
     "wandb")
)  # fmt: skip
_UNREADABLE = (
    GeneratorType,
    *(kind for kind in vars(itertools).values() if isinstance(kind, type)),
)


@final
class OwnStreams:
    """Random generators that are reached from some objects, and their states.

    Found are those in attributes of modules, in containers of up to 1,000 items, in
    attributes, slots and classes of helper objects, in what functions enclose, up to
    four objects deep, and in the names of the files that define the classes met.

    Args:
        roots: modules, functions, or any objects.

    Attributes:
        found: the generators.
        iterators: names of iterators in attributes of modules: what they give next
            can't be given twice.

    Example:
        >>> net = nn.Linear(1, 1)
        >>> net.draws = torch.Generator().manual_seed(5)
        >>> own = OwnStreams(net)
        >>> first = torch.rand(2, generator=net.draws)
        >>> own.restore()
        >>> torch.equal(torch.rand(2, generator=net.draws), first)
        True
    """

    def __init__(self, *roots: Any) -> None:
        self.found: list[Stream] = []
        self.iterators: list[str] = []
        self._seen: dict[int, Any] = {}  # held, so that no identity is used again
        waiting = [(root, 0) for root in roots]
        while waiting:
            item, depth = waiting.pop()
            if isinstance(item, _LEAVES) or id(item) in self._seen:
                continue
            self._seen[id(item)] = item
            if isinstance(item, STREAMS):
                self.found.append(item)
            elif isinstance(item, nn.Module):
                waiting += [(part, 0) for part in item.children()]
                waiting += [(value, 1) for value in self._of_module(item)]
            elif depth < _DEPTH:
                waiting += [(value, depth + 1) for value in self._inside(item)]
        del self._seen
        self._states = [state_of(stream) for stream in self.found]

    def states(self) -> bytes:
        """The present states, to be compared."""
        states = [state_of(stream) for stream in self.found]
        return pickle.dumps(
            [s.cpu().numpy().tobytes() if isinstance(s, Tensor) else s for s in states]
        )

    def seed(self, seed: int) -> None:
        """Seeds each generator."""
        for stream in self.found:
            seed_stream(stream, seed)

    def restore(self) -> None:
        """Puts each generator back into the state in which it was found."""
        for stream, state in zip(self.found, self._states, strict=True):
            set_state(stream, state)

    def _of_module(self, module: nn.Module) -> Iterator[Any]:
        for name, value in vars(module).items():
            if type(value) in _UNREADABLE:
                self.iterators.append(name)
            empty = isinstance(value, _CONTAINERS) and not value
            if not empty and (name not in _OF_MODULES or name.endswith("_hooks")):
                yield value
        yield from self._of_classes(type(module))

    def _inside(self, item: Any) -> Iterator[Any]:
        if isinstance(item, _CONTAINERS):
            if len(item) <= _MOST:
                yield from item.values() if isinstance(item, dict) else item
        elif isinstance(item, functools.partial):
            yield from (item.func, item.args, item.keywords)
        elif isinstance(item, MethodType | BuiltinMethodType):
            yield item.__self__
            yield getattr(item, "__func__", None)
        elif isinstance(item, FunctionType):
            yield from _globals(item.__module__)
            for cell in item.__closure__ or ():
                try:
                    yield cell.cell_contents
                except ValueError:  # not assigned yet
                    continue
        elif isinstance(item, type):
            yield from self._of_classes(item)
        elif not _foreign(type(item)):
            yield from getattr(item, "__dict__", {}).values()
            yield from self._of_classes(type(item))
            for kind in type(item).__mro__:
                for name in _slots(kind):
                    yield getattr(item, name, None)

    def _of_classes(self, last: type) -> Iterator[Any]:
        for kind in last.__mro__:
            if id(kind) in self._seen or kind.__module__ in sys.stdlib_module_names:
                continue
            self._seen[id(kind)] = kind
            if not _foreign(kind):
                yield from _globals(kind.__module__)
                for value in vars(kind).values():
                    encloses = getattr(value, "__closure__", None) is not None
                    if encloses or isinstance(value, (*STREAMS, *_CONTAINERS)):
                        yield value


@contextmanager
def own_streams_kept(*roots: Any) -> Iterator[OwnStreams]:
    """Puts the streams that are reached from some objects back at the end.

    Args:
        roots: as of :class:`OwnStreams`.
    """
    own = OwnStreams(*roots)
    try:
        yield own
    finally:
        own.restore()


_OF_MODULES = frozenset(vars(nn.Module()))


def _foreign(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _FOREIGN


def _globals(module: str | None) -> Iterator[Stream]:
    """Streams among the names of a file; not of what a library keeps there."""
    if module is None or module.partition(".")[0] in _FOREIGN:
        return
    if module.partition(".")[0] in sys.stdlib_module_names and module != "__main__":
        return
    for value in list(getattr(sys.modules.get(module), "__dict__", {}).values()):
        if isinstance(value, STREAMS):
            yield value


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def state_of(stream: Stream) -> Any:
    """What :func:`set_state` puts back."""
    if isinstance(stream, np.random.Generator):
        return stream.bit_generator.state
    if isinstance(stream, random.Random):
        return stream.getstate()
    return stream.get_state()


def set_state(stream: Any, state: Any) -> None:
    """Puts a state back."""
    if isinstance(stream, np.random.Generator):
        stream.bit_generator.state = state
    elif isinstance(stream, random.Random):
        stream.setstate(state)
    else:
        stream.set_state(state)


def seed_stream(stream: Any, seed: int) -> None:
    """Seeds a generator of any kind."""
    if isinstance(stream, torch.Generator):
        stream.manual_seed(seed)
    elif isinstance(stream, np.random.Generator):
        bits = stream.bit_generator
        bits.state = type(bits)(seed).state
    else:
        stream.seed(seed)
