"""Which defenses and budgets a trade-off compares, checked before anything runs."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias, get_args

from leakwatch.defenses import (
    Allocation,
    Budget,
    Defense,
    EigenNoise,
    GaussianNoise,
    InputSpace,
    PruningToBudget,
    Smallest,
    Waterfill,
)
from leakwatch.defenses.budget import Unit
from leakwatch.defenses.checks import check_count, check_number

__all__ = ["DEFENSES", "MakeDefense", "named_budgets", "named_defenses"]

MakeDefense: TypeAlias = Callable[[Budget], Defense]
"""A defense of a budget that is yet to be said."""

#: Names of the defenses that a budget is all that is missing of.
DEFENSES: Final = (
    "gaussian",
    "pruning",
    "eigen-diagonal",
    "eigen-proportional",
    "eigen-single",
    "eigen-smallest",
    "eigen-waterfill",
    "eigen-input_space",
)

#: What is trained and attacked without any defense is called.
NONE: Final = "none"


def named_defenses(
    defenses: Sequence[str] | Mapping[str, MakeDefense],
    *,
    directions: int,
    box: float,
) -> dict[str, MakeDefense]:
    """What makes each defense, by name.

    Args:
        defenses: names of :data:`DEFENSES`, or functions of a budget by the names that
            results call them by.
        directions: how many ``eigen-smallest`` takes.
        box: R of ``eigen-waterfill`` and ``eigen-input_space``, network-input units.

    Raises:
        TypeError: for what is neither.
        ValueError: for no defense, an unknown or repeated name, or one that is taken.

    Example:
        >>> made = named_defenses(["eigen-smallest"], directions=5, box=0.3)
        >>> made["eigen-smallest"](Budget(0.1)).allocation
        Smallest(k=5)
    """
    if isinstance(defenses, str) or not defenses:
        raise ValueError(
            f"defenses must be a list with at least one, such as ['gaussian', "
            f"'eigen-waterfill'], got {defenses!r}."
        )
    if NONE in defenses:
        raise ValueError(f"{NONE!r} is always compared; leave it out of the defenses.")
    if isinstance(defenses, Mapping):
        for name, make in defenses.items():
            if not callable(make):
                raise TypeError(
                    f"defense {name!r} must be a function of a Budget, such as "
                    f"GaussianNoise, got {make!r}."
                )
        return dict(defenses)
    check_count("directions", directions)
    check_number("box", box)
    if len(set(defenses)) < len(defenses):
        raise ValueError(f"defenses must have different names, got {list(defenses)}.")
    return {name: _named(name, directions, box) for name in defenses}


def named_budgets(
    budgets: Sequence[float | Budget], unit: Unit = "relative"
) -> tuple[Budget, ...]:
    """The grid of budgets, in the order given.

    Args:
        budgets: numbers, or budgets that say their unit.
        unit: of the numbers.

    Raises:
        TypeError: for what is neither.
        ValueError: for none, one twice, or several units: what is spent could then not
            be compared.

    Example:
        >>> named_budgets([0.1, 1])
        (Budget(value=0.1, unit='relative'), Budget(value=1, unit='relative'))
    """
    if unit not in get_args(Unit):
        raise ValueError(
            f"unit must be one of {', '.join(get_args(Unit))}, got {unit!r}."
        )
    if isinstance(budgets, float | int | Budget | str) or len(budgets) == 0:
        raise ValueError(
            f"budgets must be a list with at least one, such as [0.1, 1.0], got "
            f"{budgets!r}."
        )
    found = tuple(b if isinstance(b, Budget) else Budget(b, unit) for b in budgets)
    units = list(dict.fromkeys(b.unit for b in found))
    if len(units) > 1:
        raise ValueError(
            f"budgets are in several units ({', '.join(units)}), which can't be "
            f"compared; state all in one, see Budget.to."
        )
    if len({b.value for b in found}) < len(found):
        raise ValueError(f"budgets must be different, got {[b.value for b in found]}.")
    return found


def _named(name: str, directions: int, box: float) -> MakeDefense:
    if name not in DEFENSES:
        close = difflib.get_close_matches(str(name), DEFENSES, n=1)
        meant = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(
            f"unknown defense {name!r}; {meant}choose from {', '.join(DEFENSES)}, or "
            f"give functions of a Budget by name."
        )
    if name == "gaussian":
        return GaussianNoise
    if name == "pruning":
        return PruningToBudget
    kind = name.removeprefix("eigen-")
    shaped: dict[str, Allocation] = {
        "smallest": Smallest(directions),
        "waterfill": Waterfill(box),
        "input_space": InputSpace(box),
    }
    return lambda budget: EigenNoise(budget, shaped.get(kind, kind))
