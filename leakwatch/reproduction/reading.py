"""From what a YAML file says to a dataclass, with a sentence for each mistake."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from leakwatch.names import unknown

__all__ = ["read_settings"]

_T = TypeVar("_T")


def read_settings(kind: type[_T], content: object, where: str) -> _T:
    """An instance of a dataclass.

    Args:
        kind: the dataclass; its fields are numbers, flags, texts, choices of texts,
            other dataclasses, and lists and mappings of these.
        content: what the file says.
        where: that is, for errors.

    Raises:
        ValueError: for an unknown key, a missing one, or a value of another type or
            out of range.

    Example:
        >>> @dataclasses.dataclass(frozen=True)
        ... class Point:
        ...     left: float
        >>> read_settings(Point, {"left": 2}, "here")
        Point(left=2.0)
        >>> read_settings(Point, {"lfet": 2}, "here")
        Traceback (most recent call last):
        ValueError: here: unknown key 'lfet'; did you mean 'left'? choose from left.
    """
    if not isinstance(content, Mapping):
        raise ValueError(f"{where}: expected keys and values, got {content!r}.")
    assert dataclasses.is_dataclass(kind)
    hints = typing.get_type_hints(kind)
    fields = {f.name: f for f in dataclasses.fields(kind) if f.init}
    for key in content:
        if key not in fields:
            raise ValueError(f"{where}: {unknown('key', key, fields)}")
    nothing = dataclasses.MISSING
    for name, f in fields.items():
        optional = f.default is not nothing or f.default_factory is not nothing
        if name not in content and not optional:
            raise ValueError(f"{where}: the key {name!r} is missing.")
    values = {
        key: _read(hints[key], value, f"{where}: {key}")
        for key, value in content.items()
    }
    try:
        return kind(**values)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {error}") from None


def _read(kind: Any, value: object, where: str) -> Any:
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return read_settings(kind, value, where)
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in inner:
            return None
        (rest,) = (t for t in inner if t is not type(None))
        return _read(rest, value, where)
    if origin is typing.Literal:
        if value not in inner:
            raise ValueError(f"{where}: {unknown('choice', value, inner)}")
        return value
    if origin is dict and isinstance(value, Mapping):
        return {str(k): _read(inner[1], v, f"{where}: {k}") for k, v in value.items()}
    if origin is list and isinstance(value, list):
        return [_read(inner[0], v, f"{where}: {i}") for i, v in enumerate(value)]
    if origin is tuple and isinstance(value, list):
        each = inner[:1] * len(value) if inner[1:] == (Ellipsis,) else inner
        if len(each) == len(value):
            pairs = enumerate(zip(each, value, strict=True))
            return tuple(_read(t, v, f"{where}: {i}") for i, (t, v) in pairs)
    elif kind is float and isinstance(value, int | float | str):
        number = _number(value)
        if number is not None:
            return number
    # True is an int, for Python alone.
    elif kind is int and isinstance(value, bool):
        pass
    elif isinstance(kind, type) and isinstance(value, kind):
        return value
    expected = getattr(kind, "__name__", None) if origin is None else kind
    raise ValueError(f"{where}: expected {expected}, got {value!r}.")


def _number(value: object) -> float | None:
    """A number; also of a text, as which YAML reads 1e-4."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except ValueError:
        return None
