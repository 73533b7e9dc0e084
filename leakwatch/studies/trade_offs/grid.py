"""Which defenses and budgets a trade-off compares, checked before anything runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, final, get_args

from jaxtyping import Float, Shaped
from torch import Tensor

from leakwatch.checks import check_choice, check_integer, check_number
from leakwatch.defenses import Budget, Defense, MixUp
from leakwatch.defenses.budget import Unit
from leakwatch.defenses.registry import budgeted_defense

__all__ = [
    "MIXUP",
    "MakeDefense",
    "Setting",
    "check_coefficients",
    "named_budgets",
    "named_defenses",
    "named_mixtures",
]

MakeDefense: TypeAlias = Callable[[Budget], Defense]
"""A defense of a budget that is yet to be said."""

#: What is trained and attacked without any defense is called.
NONE: Final = "none"

#: What mixtures are called, whose ‖δ‖ follows from their coefficient.
MIXUP: Final = "mixup"


@final
@dataclass(frozen=True)
class Setting:
    """One setting of one defense.

    Attributes:
        defense: its name.
        budget: in the unit of the grid; 0 without a defense, NaN where none is asked.
        coefficient: of mixtures, the share of the private sample.
    """

    defense: str = NONE
    budget: float = 0.0
    coefficient: float | None = None

    @property
    def key(self) -> tuple[str, float]:
        """Equal for the same setting, and larger the more a defense changes."""
        if self.coefficient is None:
            return self.defense, self.budget
        return self.defense, -self.coefficient

    def words(self, unit: str = "") -> str:
        """As a person says it.

        Args:
            unit: of the budget.

        Example:
            >>> Setting("gaussian", 0.1).words("relative"), Setting().words()
            ('gaussian 0.1 relative', 'none')
            >>> Setting("mixup", float("nan"), 0.7).words("relative")
            'mixup α = 0.7'
        """
        if self.coefficient is not None:
            return f"{self.defense} α = {self.coefficient:g}"
        if not self.budget:
            return self.defense
        return f"{self.defense} {self.budget:g} {unit}".rstrip()


def named_defenses(
    defenses: Sequence[str] | Mapping[str, MakeDefense],
    *,
    directions: int,
    box: float,
) -> dict[str, MakeDefense]:
    """What makes each defense, by name.

    Args:
        defenses: registered names, or functions of a budget by the names that results
            call them by.
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
    if MIXUP in defenses:
        raise ValueError(
            f"{MIXUP!r} has no budget, its ‖δ‖ follows from the samples; leave it out "
            f"of the defenses and give coefficients, such as mixup=[0.9, 0.5]."
        )
    if isinstance(defenses, Mapping):
        for name, make in defenses.items():
            if not callable(make):
                raise TypeError(
                    f"defense {name!r} must be a function of a Budget, such as "
                    f"GaussianNoise, got {make!r}."
                )
        return dict(defenses)
    check_integer("directions", directions)
    check_number("box", box, example=0.25)
    if len(set(defenses)) < len(defenses):
        raise ValueError(f"defenses must have different names, got {list(defenses)}.")
    return {
        name: budgeted_defense(name, directions=directions, box=box)
        for name in defenses
    }


def named_mixtures(
    coefficients: Sequence[float],
    partners: tuple[Float[Tensor, "m ..."], Shaped[Tensor, "m ..."]] | None,
    attacked: Float[Tensor, "n ..."],
) -> list[tuple[Setting, MixUp]]:
    """What mixes with public partners, for each coefficient, in the order given.

    Args:
        coefficients: α, above 0 and below 1.
        partners: samples and labels to mix with, network inputs.
        attacked: private samples, network inputs.

    Raises:
        TypeError: for a coefficient that is not a number, or partners that are no pair
            of tensors.
        ValueError: for one out of range or twice, for no partners, or for partners of
            another shape or that are private samples themselves.
    """
    check_coefficients(coefficients)
    if not coefficients:
        return []
    if partners is None or len(partners[0]) == 0:
        raise ValueError(
            "mixup needs samples to mix with, which are not attacked; pass "
            "partners=(x, y), for instance other samples of the training data."
        )
    pair: Sequence[object] = partners
    if len(pair) != 2 or not all(isinstance(p, Tensor) for p in pair):
        raise TypeError(
            "partners must be (samples, labels), two tensors; convert arrays with "
            "torch.as_tensor."
        )
    x = partners[0]
    if x.shape[1:] != attacked.shape[1:]:
        raise ValueError(
            f"partners must be of the shape of the samples, "
            f"{tuple(attacked.shape[1:])}, got {tuple(x.shape[1:])}."
        )
    for i, mine in enumerate(attacked.to(x)):
        same = (x == mine).flatten(1).all(1)
        if bool(same.any()):
            raise ValueError(
                f"partner {int(same.nonzero()[0])} is sample {i}, which is attacked; "
                f"leave it out of the partners."
            )
    return [
        (Setting(MIXUP, math.nan, float(a)), MixUp(float(a), public=partners))
        for a in coefficients
    ]


def check_coefficients(coefficients: Sequence[float]) -> None:
    """Raises unless these are shares of a private sample, none twice.

    Args:
        coefficients: what was given.

    Raises:
        TypeError: for what is not a number.
        ValueError: for no list, or numbers out of range or twice.
    """
    listed: object = coefficients
    if isinstance(listed, str) or not isinstance(listed, Sequence):
        raise ValueError(
            f"mixup must be a list of coefficients, such as [0.9, 0.5], got "
            f"{coefficients!r}."
        )
    for a in coefficients:
        check_number("mixup", a, "(0, 1)", example=0.5)
    if len(set(coefficients)) < len(coefficients):
        raise ValueError(
            f"mixup must hold different coefficients, got {list(coefficients)}."
        )


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
    check_choice("unit", unit, get_args(Unit))
    if isinstance(budgets, float | int | Budget | str) or len(budgets) == 0:
        raise ValueError(
            f"budgets must be a list with at least one, such as [0.1, 1.0], got "
            f"{budgets!r}."
        )
    grid = tuple(b if isinstance(b, Budget) else Budget(b, unit) for b in budgets)
    units = list(dict.fromkeys(b.unit for b in grid))
    if len(units) > 1:
        raise ValueError(
            f"budgets are in several units ({', '.join(units)}), which can't be "
            f"compared; state all in one, see Budget.to."
        )
    if len({b.value for b in grid}) < len(grid):
        raise ValueError(f"budgets must be different, got {[b.value for b in grid]}.")
    return grid
