"""Arguments in the words of a record: plain values that say all that matters."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
from collections.abc import Mapping
from types import FunctionType, MethodType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from leakwatch.probes import ProbeSet
from leakwatch.scores import Score

__all__ = ["described"]

_DEEPEST: Final = 6
_PLAIN: Final = (bool, int, float, str)


def described(value: object, depth: int = _DEEPEST) -> Any:
    """A value as JSON knows it, for ``run.json``.

    Settings are spelled out, functions and classes named with what they hold on to,
    tensors, networks and probes told apart by a hash.

    Args:
        value: anything that an argument may be.
        depth: how many levels to go down.

    Example:
        >>> from leakwatch.defenses import Budget
        >>> described({"budget": Budget(0.1, "std")})
        {'budget': {'class': 'leakwatch.defenses.budget.Budget', 'value': 0.1, \
'unit': 'std'}}
    """
    if value is None or isinstance(value, _PLAIN):
        return value
    if isinstance(value, Score):
        return value.name
    if isinstance(value, ProbeSet):
        return described(_of_probes(value), depth)
    if isinstance(value, np.ndarray | np.generic):
        value = torch.from_numpy(np.asarray(value).copy())
    if isinstance(value, Tensor):
        return value.item() if value.ndim == 0 else _of_tensor(value)
    if isinstance(value, torch.dtype | torch.device):
        return str(value)
    if isinstance(value, type):
        return _name(value)
    if depth == 0:
        return f"<{_name(type(value))}>"

    def inner(parts: Mapping[Any, object]) -> dict[str, Any]:
        return {str(key): described(part, depth - 1) for key, part in parts.items()}

    if isinstance(value, Mapping):
        return inner(value)
    if isinstance(value, set | frozenset):
        return sorted((described(item, depth - 1) for item in value), key=str)
    if isinstance(value, list | tuple | range):
        return [described(item, depth - 1) for item in value]
    if isinstance(value, functools.partial):
        return inner({"function": value.func, "args": value.args, **value.keywords})
    if isinstance(value, MethodType):
        return inner({"function": value.__func__, "of": value.__self__})
    if isinstance(value, FunctionType):
        held = inspect.getclosurevars(value).nonlocals
        return {"function": _name(value), **inner(held)} if held else _name(value)
    parts: dict[str, object]
    if isinstance(value, nn.Module):
        state = [(name, _of_tensor(t)) for name, t in value.state_dict().items()]
        parts = {"weights": f"sha256 {_digest(repr(state).encode())}"}
    elif dataclasses.is_dataclass(value):
        parts = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    else:  # an object of somebody else's, of which only plain values are understood
        kept = (*_PLAIN, Tensor, np.ndarray)
        attributes = getattr(value, "__dict__", {})
        parts = {k: v for k, v in attributes.items() if isinstance(v, kept)}
    return {"class": _name(type(value)), **inner(parts)}


def _of_probes(probes: ProbeSet) -> dict[str, object]:
    # The fingerprint is of the samples themselves, which are private.
    names = {field.name for field in dataclasses.fields(probes)}
    stated = sorted(names - {"x", "y", "class_names"})
    return {
        "fingerprint": probes.fingerprint(),
        **{name: getattr(probes, name) for name in stated},
    }


def _of_tensor(tensor: Tensor) -> str:
    array = tensor.detach().cpu().contiguous()
    data = array.view(torch.uint8).numpy().tobytes() if array.numel() else b""
    kind = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
    return f"{kind} sha256 {_digest(data)}"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _name(thing: Any) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"
