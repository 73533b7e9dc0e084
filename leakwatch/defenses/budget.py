"""How much a defense may change a gradient, in any of three units."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias, final, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from leakwatch.checks import check_choice, check_integer, check_number

__all__ = ["Budget", "Unit", "expected_norm"]

Unit: TypeAlias = Literal["norm", "relative", "std"]

# Beyond this the difference of two lgamma has fewer digits than the series.
_SERIES_FROM = 1000


@final
@dataclass(frozen=True)
class Budget:
    """The size of a random perturbation δ, as a root mean square over its draws.

    All three units state E‖δ‖², the trace of the covariance of δ:

    - ``"norm"``: √E‖δ‖²;
    - ``"relative"``: √E‖δ‖² / ‖g‖ of the message that is perturbed;
    - ``"std"``: √(E‖δ‖²/d_θ), for independent noise of one size the standard deviation
      of each entry, for any other noise its root mean square over the entries.

    √E‖δ‖² is not E‖δ‖: for Gaussian noise of d degrees of freedom the latter is smaller
    by about 1/(4d) of itself, see :func:`expected_norm`. That is nothing for isotropic
    noise, and 20 % for noise along one direction.

    Args:
        value: in that unit, at least 0.
        unit: ``"norm"``, ``"relative"`` or ``"std"``.

    Raises:
        TypeError: if the value is not a number.
        ValueError: for a negative or infinite value, or an unknown unit.

    Example:
        >>> Budget(0.1, "relative").to("std", norm=2.0, size=400)
        Budget(value=0.01, unit='std')
    """

    value: float
    unit: Unit = "relative"

    def __post_init__(self) -> None:
        check_number("value", self.value, "[0, inf)", example=0.1)
        check_choice("unit", self.unit, get_args(Unit))

    def variance(self, norm: Float[Tensor, " n"], size: int) -> Float[Tensor, " n"]:
        """E‖δ‖² for each message.

        Args:
            norm: ‖g‖ of each message.
            size: d_θ.

        Returns:
            E‖δ‖², ``(n,)``, float64, gradient units squared.
        """
        check_integer("size", size)
        norm = norm.detach().double()
        if self.unit == "relative":
            return (self.value * norm).square()
        each = self.value**2 * (size if self.unit == "std" else 1)
        return torch.full_like(norm, each)

    def to(self, unit: Unit, *, norm: float, size: int) -> Budget:
        """The same budget in another unit.

        Args:
            unit: the unit wanted.
            norm: ‖g‖ of the message.
            size: d_θ.

        Returns:
            A budget with the same E‖δ‖² for this message.

        Raises:
            ValueError: for an unknown unit, a negative norm, or a change to or from
                ``"relative"`` where ‖g‖ = 0.
        """
        wanted = Budget(0.0, unit).unit
        norm = check_number("norm", norm, "[0, inf)", example=1.0)
        if norm == 0 and (wanted == "relative") != (self.unit == "relative"):
            raise ValueError(
                "norm is 0: a budget relative to a vanishing gradient has no other "
                "unit; state it as 'norm' or 'std'."
            )
        if wanted == self.unit:
            return self
        size = check_integer("size", size)
        in_norm = {"norm": 1.0, "relative": norm, "std": math.sqrt(size)}
        return Budget(self.value * in_norm[self.unit] / in_norm[wanted], wanted)


def expected_norm(std: float, size: int) -> float:
    r"""E‖δ‖ of ``size`` independent Gaussian entries, the mean of a chi distribution.

    .. math:: E\|\delta\| = s \sqrt2\, \Gamma(\tfrac{d+1}2) / \Gamma(\tfrac d2)
        = s \sqrt d\, (1 - \tfrac1{4d} + O(d^{-2}))

    Args:
        std: s, standard deviation of each entry.
        size: d, how many.

    Returns:
        E‖δ‖, always below s√d.

    Example:
        >>> round(expected_norm(1.0, 1), 6), round(expected_norm(1.0, 100), 6)
        (0.797885, 9.975032)
    """
    d = check_integer("size", size)
    if d < _SERIES_FROM:
        ratio = math.exp(math.lgamma((d + 1) / 2) - math.lgamma(d / 2))
        return check_number("std", std, "[0, inf)", example=0.01) * math.sqrt(2) * ratio
    series = 1 - 1 / (4 * d) + 1 / (32 * d**2) + 5 / (128 * d**3)
    return check_number("std", std, "[0, inf)", example=0.01) * math.sqrt(d) * series
