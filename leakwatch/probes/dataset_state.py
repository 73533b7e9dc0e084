"""A data set is given back as it was found: no handle, no cache, no moved stream."""

from __future__ import annotations

import functools
import io
import sys
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor

from leakwatch.derivatives.runtime.own_streams import (
    STREAMS,
    seed_stream,
    set_state,
    state_of,
)
from leakwatch.derivatives.runtime.restore import Snapshot
from leakwatch.probes.pipeline import walk

__all__ = ["LARGEST_COPY", "DatasetState"]

#: Bytes up to which an array or a tensor is copied, to be put back.
LARGEST_COPY: Final = 256 * 2**20

_LRU_CACHE = type(functools.lru_cache(len))
_CARRIERS = (
    *(dict, list, set, deque, tuple, Tensor, np.ndarray, io.IOBase, _LRU_CACHE),
    *STREAMS,
)
_DEFINITIONS = (ModuleType, FunctionType, type)
_ABSENT = object()
# Their classes and modules register things once and for all as they are used.
_LIBRARIES = sys.stdlib_module_names | {"torch", "torchvision", "numpy", "PIL"}


@final
class DatasetState:
    """What reading items of a data set can change, remembered and put back.

    That is all that is reached from the data set (wrapped data sets, transforms,
    helper objects, what functions enclose): attributes of objects and of their classes,
    contents of containers, arrays and tensors up to `LARGEST_COPY` each, positions of
    open files, random generators, and caches of `functools` that were empty; and of the
    modules that define the data set and its transforms the names, and what these hold.
    Handles that were opened meanwhile close with the last reference to them.

    Not seen is what lives outside of Python's objects, such as the state of a database
    that was open already.

    Args:
        dataset: any object.

    Example:
        >>> class Lazy:
        ...     cache = None
        ...     def __getitem__(self, i):
        ...         self.cache = self.cache or {}
        ...         return self.cache.setdefault(i, i % 2)
        >>> data = Lazy()
        >>> with DatasetState(data).restored():
        ...     label = data[3]
        >>> label, data.cache
        (1, None)
    """

    def __init__(self, dataset: Any) -> None:
        self._streams: list[tuple[Any, Any]] = []
        self._files: list[tuple[Any, int]] = []
        self._arrays: list[tuple[Any, Any]] = []
        self._tensors: list[tuple[Tensor, Tensor]] = []
        self._caches: list[Any] = []
        self._named: list[tuple[Any, dict[str, Any]]] = []
        self._slots: list[tuple[Any, MemberDescriptorType, Any]] = []
        self._seen: set[Any] = set()
        found = [
            value
            for name in {type(item).__module__ for item in walk(dataset, _static)}
            if name in sys.modules and not _library(name)
            for value in self._names_of(sys.modules[name])
            if isinstance(value, _CARRIERS)
        ]
        self._held = Snapshot((dataset, found), tensors=False, expand=self._expand)

    def seed(self, seed: int) -> None:
        """Seed each random generator that was reached."""
        for stream, _ in self._streams:
            seed_stream(stream, seed)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Let the body read items, and put everything back at the end."""
        try:
            yield
        finally:
            with warnings.catch_warnings():
                # A handle that the body opened is closed by being forgotten.
                warnings.simplefilter("ignore", ResourceWarning)
                self._restore()

    @torch.no_grad()
    def _restore(self) -> None:
        self._held.restore()
        for owner, then in self._named:
            now = dict(vars(owner))
            for name in now.keys() - then.keys():
                # A module that was imported meanwhile is not imported once more.
                if not isinstance(now[name], _DEFINITIONS):
                    delattr(owner, name)
            for name, value in then.items():
                if now.get(name, _ABSENT) is not value:
                    setattr(owner, name, value)
        for item, slot, value in self._slots:
            if value is not _ABSENT:
                slot.__set__(item, value)
            elif hasattr(item, slot.__name__):
                slot.__delete__(item)
        for stream, state in self._streams:
            set_state(stream, state)
        for file, position in self._files:
            with suppress(OSError, ValueError):
                file.seek(position)
        for array, content in self._arrays:
            if array.tobytes() != content.tobytes():
                array[...] = content
        for tensor, content in self._tensors:
            if not _equal(tensor, content):  # it may be read-only
                tensor.copy_(content)
        for cache in self._caches:
            cache.cache_clear()

    def _expand(self, item: Any) -> Iterator[Any]:
        """Notes what an object may change by itself; gives what it refers to."""
        if isinstance(item, Tensor):
            small = item.nbytes <= LARGEST_COPY and item.layout == torch.strided
            if small and not item.is_inference():
                self._tensors.append((item, item.detach().clone()))
        elif isinstance(item, np.ndarray):
            if item.flags.writeable and item.nbytes <= LARGEST_COPY:
                self._arrays.append((item, item.copy()))
        elif isinstance(item, STREAMS):
            self._streams.append((item, state_of(item)))
        elif isinstance(item, io.IOBase):
            with suppress(OSError, ValueError):  # closed, or a pipe
                self._files.append((item, item.tell()))
        elif isinstance(item, _LRU_CACHE):
            if not item.cache_info().currsize:
                self._caches.append(item)
        elif isinstance(item, MethodType):
            yield item.__self__
        elif isinstance(item, functools.partial):
            yield from (item.func, item.args, item.keywords)
        elif isinstance(item, FunctionType):
            for cell in item.__closure__ or ():
                with suppress(ValueError):  # not assigned yet
                    yield cell.cell_contents
        elif not isinstance(item, type | ModuleType):
            yield from self._expand_object(item)

    def _expand_object(self, item: Any) -> Iterator[Any]:
        if hasattr(item, "__dict__"):
            yield vars(item)
        for kind in type(item).__mro__:
            if _library(kind.__module__):
                continue
            for slot in vars(kind).values():
                if isinstance(slot, MemberDescriptorType):
                    value = getattr(item, slot.__name__, _ABSENT)
                    self._slots.append((item, slot, value))
                    yield value
            if kind not in self._seen:
                self._seen.add(kind)
                for value in self._names_of(kind):
                    if not isinstance(value, FunctionType):
                        yield getattr(value, "__func__", value)

    def _names_of(self, owner: Any) -> list[Any]:
        names = dict(vars(owner))
        self._named.append((owner, names))
        return list(names.values())


def _static(item: Any, name: str, otherwise: None) -> Any:
    """An attribute without the code that a property would run."""
    return getattr(item, "__dict__", {}).get(name, otherwise)


def _equal(now: Tensor, then: Tensor) -> bool:
    if torch.equal(now, then):
        return True
    both_nan = now.isnan() & then.isnan()
    return bool(((now == then) | both_nan).all())


def _library(module: str) -> bool:
    return module.partition(".")[0] in _LIBRARIES
