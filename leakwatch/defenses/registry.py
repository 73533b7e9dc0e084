"""Defenses by name, each made of a budget that is yet to be said."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from pydoc import locate

from leakwatch.defenses.base import Defense
from leakwatch.defenses.budget import Budget
from leakwatch.names import meant

__all__ = ["budgeted_defense", "register_defense", "registered_defenses"]

_DEFENSES: dict[str, Callable[..., Defense]] = {}


def register_defense(name: str, make: Callable[..., Defense]) -> None:
    """Make a defense available by name, for instance to ``leakwatch.trade_off``.

    Args:
        name: what it is asked for by, and called in results.
        make: a class or function of a :class:`Budget`. It may take keywords as well:
            ``directions``, how many a defense takes; ``box``, the size of the box of
            images in network-input units.

    Raises:
        ValueError: if the name is taken.
    """
    if name in _DEFENSES:
        raise ValueError(
            f"a defense named {name!r} is already registered; choose another name."
        )
    _DEFENSES[name] = make


def registered_defenses() -> tuple[str, ...]:
    """The registered names, in the order of their registration."""
    return tuple(_DEFENSES)


def budgeted_defense(
    name: str, *, directions: int, box: float
) -> Callable[[Budget], Defense]:
    """What makes a defense of a budget, by its name.

    Args:
        name: a registered name, or the class path of a class or function of a budget.
        directions: how many a defense takes, where it asks.
        box: size of the box of images, network-input units, where it asks.

    Raises:
        ValueError: for an unknown name.

    Example:
        >>> make = budgeted_defense("eigen-smallest", directions=5, box=0.3)
        >>> make(Budget(0.1)).allocation
        Smallest(k=5)
    """
    make = _DEFENSES.get(name) or (locate(name) if "." in name else None)
    if not callable(make):
        raise ValueError(
            f"unknown defense {name!r}; {meant(name, _DEFENSES)}choose from "
            f"{', '.join(_DEFENSES)}, add yours with "
            f"leakwatch.defenses.register_defense, or give its class path."
        )
    takes = inspect.signature(make).parameters
    settings = {"directions": directions, "box": box}
    return partial(make, **{k: v for k, v in settings.items() if k in takes})
