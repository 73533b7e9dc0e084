"""The cells of a study: run anywhere through joblib, kept one by one, never run twice.

A cell is one piece of a study that needs no other, such as one training under one
defense. ``joblib.parallel_config("dask")`` or ``"ray"`` around a study sends its cells
to a cluster; without any they run here, one after the other.
"""

from __future__ import annotations

import copyreg
import dataclasses
import functools
import hashlib
import importlib
import json
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from io import IOBase
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MethodType,
    ModuleType,
)
from typing import Any, Final, Generic, TypeVar, final

import numpy as np
import torch
from joblib import Parallel, delayed, effective_n_jobs
from torch import Tensor, nn

from leakwatch.reporting.ledger.storage import make_private_directory, write_atomically

__all__ = ["CellStore", "Work", "digest", "run_cells"]

_T = TypeVar("_T")

# Deeper than any setting; an object that holds itself ends there.
_DEEPEST: Final = 12

_VALUES: Final = (
    *(bool, int, float, complex, str, bytes, Path, np.ndarray, np.generic),
    *(Tensor, torch.dtype, torch.device),
)
# Whose text says all about them.
_NAMED: Final = (
    *(Path, torch.dtype, torch.device, torch.layout, torch.memory_format),
    *(torch.finfo, torch.iinfo),
)
# What every module has, hooks apart.
_OF_MODULES: Final = frozenset(vars(nn.Module()))
_HOOKS: Final = (
    *("_forward_pre_hooks", "_forward_hooks"),
    *("_backward_pre_hooks", "_backward_hooks"),
)
# Packages whose classes are told by the versions, and by their names.
_VERSIONED: Final = sys.stdlib_module_names | {
    *("leakwatch", "torch", "torchvision", "lightning", "pytorch_lightning", "numpy"),
}


@final
@dataclass(frozen=True, eq=False)
class Work(Generic[_T]):
    """One cell that is to be computed.

    Attributes:
        name: in words, for progress and the file that keeps it.
        call: computes it; runs in another process, perhaps on another machine.
        arguments: of the call.
        key: what tells it from the other cells of its study, see :func:`digest`.
    """

    name: str
    call: Callable[..., _T]
    arguments: tuple[Any, ...]
    key: object


@final
@dataclass(frozen=True, eq=False)
class CellStore(Generic[_T]):
    """Keeps finished cells, a file for each, by what they were computed from.

    A cell is found again if network, samples, settings, hooks, the code of functions
    and classes and the versions of leakwatch and torch are the same. So one folder may
    serve several studies, and a changed one computes what changed. Not seen are files
    that a function reads, and the code of others that it calls: give another folder
    then. A study of what can't be read, such as a generator, is not kept.

    Args:
        directory: made with the first cell.
        of: what all cells are computed from, see :func:`digest`.
        encode: a result as JSON holds it.
        decode: the same backwards.
        worth: whether a result may be kept; one that failed is tried again.
    """

    directory: Path
    of: object
    encode: Callable[[_T], Any]
    decode: Callable[[Any], _T]
    worth: Callable[[_T], bool] = field(default=lambda _: True)

    @functools.cached_property
    def _study(self) -> str:
        # Imported by name: the package itself imports studies.
        ours = importlib.import_module("leakwatch").__version__
        return digest((ours, torch.__version__, self.of))

    def load(self, work: Work[_T]) -> tuple[_T] | None:
        """The result of a cell, in a tuple; ``None`` if it isn't there or is damaged.

        Args:
            work: the cell.
        """
        try:
            found = json.loads(self.file(work).read_bytes())
            return (self.decode(found["result"]),)
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def keep(self, work: Work[_T], result: _T) -> None:
        """Write a result, so that it is there whole or not at all.

        Args:
            work: the cell.
            result: of it.
        """
        if not self.worth(result):
            return
        make_private_directory(self.directory)
        text = json.dumps({"cell": work.name, "result": self.encode(result)})
        write_atomically(self.file(work), text.encode())

    def file(self, work: Work[_T]) -> Path:
        """Where a cell is kept.

        Args:
            work: the cell.

        Raises:
            UnreadableError: if something that it is computed from can't be read.
        """
        words = re.sub(r"[^\w.=-]+", "-", work.name).strip("-.")[:80]
        own = digest((self._study, work.key))
        return self.directory / f"{words}-{own[:16]}.json"


def run_cells(
    cells: Sequence[Work[_T]],
    *,
    n_jobs: int | None = None,
    store: CellStore[_T] | None = None,
    done: Callable[[Work[_T], _T], object] | None = None,
) -> list[_T]:
    """Results of all cells in their order, however many processes compute them.

    Each runs with as many threads as this process has now: results then don't depend
    on where they were computed.

    Args:
        cells: what to compute.
        n_jobs: processes, as of ``joblib.Parallel``; ``None``: as
            ``joblib.parallel_config`` says, else this one.
        store: where finished cells are kept; those that are there aren't computed. A
            warning says so where none is, because what they are made from can't be
            read.
        done: called with each cell, here and as soon as it is finished.
    """
    results: dict[int, _T] = {}

    def finish(i: int, result: _T) -> None:
        results[i] = result
        if done is not None:
            done(cells[i], result)

    store = None if store is None or not _readable(store, cells) else store
    for i, work in enumerate(cells):
        found = None if store is None else store.load(work)
        if found is not None:
            finish(i, found[0])
    threads = torch.get_num_threads()
    waiting = [i for i in range(len(cells)) if i not in results]
    # One at a time: a batch of cells would be lost together.
    how: dict[str, Any] = {"n_jobs": n_jobs, "batch_size": 1}
    try:
        parallel = Parallel(**how, return_as="generator_unordered")
        waves = [waiting]
    except ValueError:
        # Ray's backend, among others, gives results back all together only.
        parallel = Parallel(**how)
        size = effective_n_jobs(n_jobs)
        waves = [waiting[i : i + size] for i in range(0, len(waiting), size)]
    for wave in waves:
        for i, result in parallel(
            delayed(_computed)(i, cells[i].call, cells[i].arguments, threads)
            for i in wave
        ):
            if store is not None:
                store.keep(cells[i], result)
            finish(i, result)
    return [results[i] for i in range(len(cells))]


def _readable(store: CellStore[_T], cells: Sequence[Work[_T]]) -> bool:
    try:
        for work in cells:
            store.file(work)
    except UnreadableError as error:
        warnings.warn(f"leakwatch: no cell is kept: {error}", stacklevel=3)
        return False
    return True


def _computed(
    i: int, call: Callable[..., _T], arguments: tuple[Any, ...], threads: int
) -> tuple[int, _T]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return i, call(*arguments)
    finally:
        torch.set_num_threads(before)


class UnreadableError(TypeError):
    """What a study is computed from has a state that only using it would show."""


def digest(value: object) -> str:
    """A hash of what a study is computed from, the same in every process.

    Of tensors and arrays all entries count, of networks the classes, attributes and
    hooks of all parts, weights, buffers and which are trained, of functions the code,
    what they close over and the values among the globals that they read, of other
    objects the class and the attributes, in slots too, or what pickle would keep, of
    objects in these the values. Of classes that are no part of a package that states
    its version the code of methods counts, and the values.

    Args:
        value: anything made of these.

    Raises:
        UnreadableError: for generators and other iterators, open files, locks, and what
            else pickle refuses.

    Example:
        >>> digest([1, torch.zeros(2)]) == digest([1, torch.zeros(2)])
        True
        >>> digest(lambda: 1) == digest(lambda: 2)
        False
    """
    found = hashlib.sha256()
    _feed(found.update, value, ())
    return found.hexdigest()


def _feed(
    feed: Callable[[bytes], None],
    value: object,
    above: tuple[int, ...],
    *,
    inside: bool = False,
) -> None:
    """Feed a value, and what it is made of.

    Args:
        feed: takes bytes.
        value: the value.
        above: identities of what it is a part of.
        inside: whether it is a part of an object of a kind not known.
    """
    parts: Sequence[Any]
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        feed(f"{type(value).__name__} {value!r}\n".encode(errors="surrogatepass"))
        return
    if isinstance(value, Tensor):
        plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        feed(f"tensor {plain.dtype} {tuple(plain.shape)}\n".encode())
        feed(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
        return
    if isinstance(value, np.ndarray | np.generic):
        array = np.ascontiguousarray(value)
        feed(f"array {array.dtype} {array.shape}\n".encode())
        feed(array.tobytes())
        return
    if isinstance(value, _NAMED):
        feed(f"{type(value).__name__} {value}\n".encode())
        return
    if id(value) in above:
        # A hook of a module, say, that is a method of the module.
        feed(f"above {above[::-1].index(id(value))}\n".encode())
        return
    if isinstance(value, Mapping):
        parts = [item for pair in value.items() for item in pair]
    elif isinstance(value, list | tuple):
        parts = value
    elif isinstance(value, set | frozenset):
        parts = sorted(map(digest, value))
    else:
        parts, plain_object = _parts(value)
        if plain_object:
            # Not what it holds in turn, such as a data module its Trainer.
            parts = [(k, v) for k, v in parts if not inside or _told(v)]
        inside = inside or plain_object
    feed(f"{_name(value)} {len(parts)}\n".encode())
    if len(above) < _DEEPEST:
        for part in parts:
            _feed(feed, part, (*above, id(value)), inside=inside)


def _parts(value: object) -> tuple[Sequence[Any], bool]:
    """What decides how an object behaves; and whether it is of a kind not known."""
    if isinstance(value, CodeType):
        return (value.co_code, value.co_names, value.co_consts), False
    if isinstance(value, FunctionType):
        closed = [_content(cell) for cell in value.__closure__ or ()]
        own = (value.__code__, value.__defaults__, value.__kwdefaults__, *closed)
        read = sorted(_names(value.__code__) & value.__globals__.keys())
        stated = [(k, v) for k in read if _stated(v := value.__globals__[k])]
        return (*own, *stated), False
    if isinstance(value, MethodType):
        return (value.__func__, value.__self__), False
    if isinstance(value, functools.partial):
        return (value.func, value.args, value.keywords), False
    if isinstance(value, nn.Module):
        trained = [name for name, p in value.named_parameters() if p.requires_grad]
        kinds = [(name, _name(part)) for name, part in value.named_modules()]
        settings = [_settings(part) for part in value.modules()]
        # With buffers that no checkpoint has.
        held = {**value.state_dict(), **dict(value.named_buffers())}
        hooks = [_hooks(part) for part in value.modules()]
        classes = dict.fromkeys(type(part) for part in value.modules())
        methods = [_code(kind) for kind in classes]
        return (kinds, trained, held, settings, hooks, methods), False
    if isinstance(value, type | BuiltinFunctionType | ModuleType):
        return (), False
    if isinstance(value, Enum):
        return (value.name,), False
    if isinstance(value, range | slice):
        return (repr(value),), False
    code = _code(type(value))
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return [*((f.name, getattr(value, f.name)) for f in fields), *code], False
    state, attributes = _state(value)
    return [*state, *code], attributes


def _settings(module: nn.Module) -> list[tuple[str, object]]:
    """What its weights don't say, such as a slope, a stride or a mean."""
    return _attributes({k: v for k, v in vars(module).items() if k not in _OF_MODULES})


def _hooks(module: nn.Module) -> list[tuple[str, object, bool]]:
    """By kind, in the order in which they run, and whether they get keywords."""
    kept = vars(module)
    return [
        (kind, hook, key in kept.get(f"{kind}_with_kwargs", ()))
        for kind in _HOOKS
        for key, hook in kept.get(kind, {}).items()
    ]


def _code(kind: type) -> list[tuple[str, object]]:
    """Methods and values of a class and its bases, by name."""
    found = []
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] in _VERSIONED:
            continue
        for name, member in sorted(vars(base).items()):
            plain = _functions(member)
            if plain or (name[:2] != "__" and _stated(member)):
                found.append((f"{_name(base)}.{name}", plain or member))
    return found


def _functions(member: object) -> list[FunctionType]:
    """Those of a method, property or cached function."""
    if isinstance(member, FunctionType):
        return [member]
    if isinstance(member, property):
        made = (member.fget, member.fset, member.fdel)
        return [f for each in made for f in _functions(each)]
    inner = getattr(member, "func", getattr(member, "__func__", member))
    inner = getattr(inner, "__wrapped__", inner)
    return [inner] if isinstance(inner, FunctionType) else []


def _state(value: object) -> tuple[list[tuple[str, object]], bool]:
    """What pickle keeps of an object; and whether that is its attributes.

    Raises:
        UnreadableError: if there is no such thing.
    """
    if isinstance(value, Iterator | IOBase):
        raise UnreadableError(_UNREADABLE.format(_name(value)))
    try:
        reduced: Any = copyreg.dispatch_table.get(type(value), _reduced)(value)
    except Exception as error:
        raise UnreadableError(_UNREADABLE.format(_name(value))) from error
    if isinstance(reduced, str):
        return [("name", reduced)], False
    call, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
    own: Any = state
    slots: dict[str, object] = {}
    if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
        own, slots = state
    if isinstance(own, dict | None):
        held = _attributes({**(own or {}), **slots})
    else:
        held = [("state", state)]
    held += [("arguments", arguments), ("items", list(items or ()))]
    bare = own is None and call is copyreg.__newobj__  # type: ignore[attr-defined]
    of_attributes = bare or isinstance(own, dict)
    return [("call", call), *held, ("pairs", list(pairs or ()))], of_attributes


def _reduced(value: object) -> object:
    return value.__reduce_ex__(4)


_UNREADABLE: Final = (
    "what the study is given holds a {}, whose state can't be read without using it; "
    "make it inside of the function that needs it, or leave keep_cells out."
)


def _content(cell: Any) -> object:
    """Of a closure; a name may have no value yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _attributes(of: Mapping[str, object]) -> list[tuple[str, object]]:
    """By name; private ones as far as they are values, as a mean and no cache is."""
    return [(k, v) for k, v in sorted(of.items()) if k[:1] != "_" or _stated(v)]


def _stated(value: object) -> bool:
    """Whether it is a value, or made of nothing else."""
    if isinstance(value, Mapping):
        return all(map(_stated, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_stated, value))
    return value is None or isinstance(value, _VALUES)


def _told(value: object) -> bool:
    """Whether it is a value, or nothing that can be told apart."""
    return _stated(value) or isinstance(value, Iterator | IOBase)


def _names(code: CodeType) -> set[str]:
    """That a function and those inside of it look up."""
    inner = (_names(c) for c in code.co_consts if isinstance(c, CodeType))
    return set(code.co_names).union(*inner)


def _name(value: object) -> str:
    if isinstance(value, ModuleType):
        return value.__name__
    named = isinstance(value, type | FunctionType | BuiltinFunctionType)
    kind: Any = value if named else type(value)
    return f"{kind.__module__}.{kind.__qualname__}"
