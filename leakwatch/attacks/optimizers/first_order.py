"""Optimisers of many independent attacks: all state is per attack, one row each.

Each step takes the objective and its gradient at the current points and gives the next
points. Nothing is averaged, clipped or normalised over attacks, so that no attack's
path depends on what else is in the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, final, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from leakwatch.attacks.optimizers.lbfgs import LBFGS
from leakwatch.checks import check_choice, check_integer, check_number
from leakwatch.names import unknown

__all__ = [
    "LBFGS",
    "Adam",
    "DescentSettings",
    "Momentum",
    "Optimizer",
    "OptimizerName",
    "Schedule",
    "ScheduleName",
    "make_optimizer",
    "schedule",
]

OptimizerName: TypeAlias = Literal["adam", "sgd", "lbfgs"]
ScheduleName: TypeAlias = Literal["constant", "step", "cosine"]
Schedule: TypeAlias = Callable[[int, int], float]


class Optimizer(Protocol):
    """Moves the points of many attacks.

    Attributes:
        survives: whether points where the objective is not finite are no trouble.
    """

    survives: bool

    def step(
        self,
        z: Float[Tensor, "attacks n"],
        value: Float[Tensor, " attacks"],
        gradient: Float[Tensor, "attacks n"],
        lr: Float[Tensor, " attacks"],
    ) -> Float[Tensor, "attacks n"]:
        """The next points.

        Args:
            z: points, which may be changed in place.
            value: objective there.
            gradient: its derivative, which may be changed in place.
            lr: step size of each attack.
        """

    def stalled(self) -> Bool[Tensor, " attacks"] | None:
        """Attacks that can't move any more, ``None`` if that can't be told."""

    def select(self, rows: Int[Tensor, " some"]) -> None:
        """Forgets all other attacks."""

    def reset(self, rows: Bool[Tensor, " attacks"]) -> None:
        """Begins anew for these attacks."""


class _Moments:
    """Running means of gradients, ``(attacks, n)`` each, that never stall."""

    survives = False
    _moments: tuple[Tensor, ...]

    def stalled(self) -> Bool[Tensor, " attacks"] | None:
        """See :class:`Optimizer`."""
        return None

    def select(self, rows: Int[Tensor, " some"]) -> None:
        """See :class:`Optimizer`."""
        self._moments = tuple(t[rows] for t in self._moments)

    def reset(self, rows: Bool[Tensor, " attacks"]) -> None:
        """See :class:`Optimizer`."""
        for t in self._moments:
            # Not a product with 0: what is reset may hold NaN.
            t.masked_fill_(rows[:, None], 0.0)


@final
class Adam(_Moments):
    """Adam (Kingma & Ba, ICLR 2015), with a step count for each attack.

    Args:
        like: the points of all attacks.
        betas: decay of the two moments.
        eps: added to the root of the second moment.
        signed: whether gradients are replaced by their signs before (Geiping et al.
            2020, code).
    """

    def __init__(
        self,
        like: Float[Tensor, "attacks n"],
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        signed: bool = False,
    ) -> None:
        count = like.new_zeros(len(like), 1, dtype=torch.float64)
        self._moments = torch.zeros_like(like), torch.zeros_like(like), count
        self._betas = betas
        self._eps = eps
        self._signed = signed

    def step(
        self, z: Tensor, value: Tensor, gradient: Tensor, lr: Tensor
    ) -> Float[Tensor, "attacks n"]:
        """See :class:`Optimizer`."""
        if self._signed:
            gradient = gradient.sign_()
        b1, b2 = self._betas
        first, second, count = self._moments
        count += 1
        first.lerp_(gradient, 1 - b1)
        second.mul_(b2).addcmul_(gradient, gradient, value=1 - b2)
        size = lr.double()[:, None] / (1 - b1**count)
        root = (1 - b2**count).sqrt()
        # lr · m̂ / (√v̂ + ε) with the corrections moved onto one number per attack.
        denominator = second.sqrt().add_((self._eps * root).to(z))
        move = first * (-size * root).to(z)
        return z.addcdiv_(move, denominator)


@final
class Momentum(_Moments):
    """Gradient descent with heavy-ball momentum, as ``torch.optim.SGD``.

    Args:
        like: the points of all attacks.
        momentum: decay of the velocity; 0 for plain gradient descent.
        signed: whether gradients are replaced by their signs before.
    """

    def __init__(
        self,
        like: Float[Tensor, "attacks n"],
        momentum: float = 0.9,
        signed: bool = False,
    ) -> None:
        self._moments = (torch.zeros_like(like),)
        self._momentum = momentum
        self._signed = signed

    def step(
        self, z: Tensor, value: Tensor, gradient: Tensor, lr: Tensor
    ) -> Float[Tensor, "attacks n"]:
        """See :class:`Optimizer`."""
        if self._signed:
            gradient = gradient.sign_()
        (velocity,) = self._moments
        velocity.mul_(self._momentum).add_(gradient)
        return z.addcmul_(velocity, -lr[:, None])


@dataclass(frozen=True, kw_only=True)
class DescentSettings:
    """How images go downhill.

    Args:
        optimizer: ``"adam"``, ``"sgd"`` with momentum, or ``"lbfgs"``.
        lr: step size, network-input units for Adam; first trial length for L-BFGS.
        momentum: of ``"sgd"``.
        signed: whether the gradient of the objective is replaced by its signs.
        schedule: of the step size: a name, see :func:`schedule`, or a factor as a
            function of step and planned steps.
        steps: evaluations of the gradient per attack.
        box: whether images are kept in the range of pixels, where that is known; not
            with L-BFGS.
        patience: attacks are finished when their objective has not improved for this
            many steps. Default: never.

    Raises:
        ValueError: for values that make no sense; quotes them.

    Example:
        >>> [DescentSettings(lr=2.0, steps=8).lr_at(step) for step in (0, 2, 3)]
        [2.0, 2.0, 0.2]
    """

    optimizer: OptimizerName = "adam"
    lr: float = 0.1
    momentum: float = 0.9
    signed: bool = False
    schedule: ScheduleName | Schedule = "step"
    steps: int = 1000
    box: bool = True
    patience: int | None = None

    def __post_init__(self) -> None:
        if not callable(self.schedule):
            schedule(self.schedule)
        check_choice("optimizer", self.optimizer, get_args(OptimizerName))
        check_number("lr", self.lr, example=0.1)
        check_number("momentum", self.momentum, "[0, 1)", example=0.9)
        check_integer("steps", self.steps, example=1000)
        if self.patience is not None:
            check_integer("patience", self.patience, example=100)
        if self.optimizer == "lbfgs" and (self.signed or self.box):
            raise ValueError(
                "L-BFGS builds on differences of gradients of an unconstrained "
                "objective; use signed=False and box=False with it, or "
                "optimizer='adam'."
            )

    def lr_at(self, step: int) -> float:
        """The step size at a step, counted from 0."""
        return self.lr * self.lr_factor(step)

    def lr_factor(self, step: int) -> float:
        """What the schedule multiplies the step size by at a step."""
        own = self.schedule
        factor = own if callable(own) else schedule(own)
        return factor(step, self.steps)


def make_optimizer(
    name: OptimizerName,
    like: Float[Tensor, "attacks n"],
    *,
    momentum: float = 0.9,
    signed: bool = False,
) -> Optimizer:
    """An optimiser by name.

    Args:
        name: ``"adam"``, ``"sgd"`` or ``"lbfgs"``.
        like: the points of all attacks.
        momentum: of ``"sgd"``.
        signed: see :class:`Adam`.

    Returns:
        The optimiser.

    Raises:
        ValueError: for an unknown name, or signed L-BFGS.
    """
    if name == "adam":
        return Adam(like, signed=signed)
    if name == "sgd":
        return Momentum(like, momentum, signed=signed)
    if name == "lbfgs":
        if signed:
            raise ValueError(
                "L-BFGS builds on differences of gradients, so it can't take their "
                "signs; use optimizer='adam' or signed=False."
            )
        return LBFGS(like)
    raise ValueError(unknown("optimizer", name, ("adam", "sgd", "lbfgs")))


def schedule(name: ScheduleName) -> Schedule:
    """The factor on the step size as a function of step and planned steps.

    Args:
        name: ``"constant"``; ``"step"``: ×0.1 after 3/8, 5/8 and 7/8 (Geiping et al.
            2020, code); ``"cosine"``: 50 steps of linear warm-up, then half a cosine
            to zero (Yin et al. 2021).

    Returns:
        ``factor(step, steps)``.

    Raises:
        ValueError: for another name.

    Example:
        >>> [round(schedule("step")(i, 8), 3) for i in range(8)]
        [1.0, 1.0, 1.0, 0.1, 0.1, 0.01, 0.01, 0.001]
    """
    if name not in _SCHEDULES:
        raise ValueError(unknown("schedule", name, _SCHEDULES))
    return _SCHEDULES[name]


def _constant(step: int, steps: int) -> float:
    return 1.0


def _step(step: int, steps: int) -> float:
    return float(0.1 ** sum(8 * step >= k * steps for k in (3, 5, 7)))


def _cosine(step: int, steps: int) -> float:
    warm = min(1.0, (step + 1) / 50)
    return warm * 0.5 * (1 + math.cos(math.pi * min(1.0, step / max(1, steps))))


_SCHEDULES: dict[str, Schedule] = {
    "constant": _constant,
    "step": _step,
    "cosine": _cosine,
}
