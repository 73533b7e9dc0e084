"""Noise where it moves a reconstruction most."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor

from leakwatch.defenses.base import (
    Defense,
    Needs,
    Reduction,
    Shared,
    averaging,
    combined,
    needed,
    summed,
)
from leakwatch.defenses.budget import Budget
from leakwatch.defenses.covariance import Coefficients, standard
from leakwatch.defenses.eigen.allocations import (
    Allocation,
    InputSpace,
    Proportional,
    Single,
    Smallest,
    Waterfill,
)
from leakwatch.defenses.eigen.input_space import InRange, Moves
from leakwatch.defenses.eigen.row_norms import RowNorms
from leakwatch.defenses.samples import Samples
from leakwatch.names import meant

__all__ = ["EigenNoise"]

_ALLOCATIONS: dict[str, Allocation] = {
    chosen.name: chosen
    for chosen in (
        Smallest(),
        Single(),
        Proportional(),
        Waterfill(),
        RowNorms(),
        InputSpace(),
    )
}


@final
@dataclass(frozen=True)
class EigenNoise(Defense):
    """Adds noise that is shaped by the Jacobian of each sample.

    Along the parameter-space singular vectors v_i = J u_i/σ_i a noise of size ‖δ‖ moves
    a recovery by ‖δ‖/σ_i, so the direction decides how much protection it buys (Zhang
    et al., "Inversion Influence Functions", NeurIPS 2023, Section 5.1 and Figure 5).
    All of it lands in the range of J, where isotropic noise spends d_x/d_θ.

    Noise along the v_i hides to first order only. How the gradient bends when the image
    moves along a hidden direction is across the noise and stays clean, so an attacker
    who knows the v_i recovers more than linearisation predicts, see
    ``docs/measurements/defenses.md``. ``"input_space"`` moves the image instead, and
    leaves nothing clean. The draw ξ is then moved along until ‖g(x + a) − g(x)‖, not
    ‖J a‖, is the budget: in *every* draw, not in the mean only, to 0.1 %. That takes
    some gradients of each sample, 40 at most, for a batch as many again for its sum,
    and no more random numbers. ``Shared.variance`` is ‖δ‖² of the draw; it is less
    where all directions are hidden, or where ‖δ‖ jumps over the budget (networks with
    kinks). What an attacker knows is the covariance of J a for what was really moved.

    Its directions depend on the private sample. That the noise covers what it does is
    itself information, which no score here counts.

    Args:
        budget: E‖δ‖² of a message. ``waterfill`` and ``input_space`` may spend less,
            and say so.
        allocation: ``"smallest"``, ``"single"``, ``"proportional"``, ``"waterfill"``,
            ``"diagonal"`` or ``"input_space"`` with their defaults; or an object, such
            as ``Smallest(k=20)``, ``Single(0)``, ``Waterfill(box=0.5)``,
            ``RowNorms(probes=64)``, or one of your own, see
            :class:`leakwatch.defenses.Allocation`.
        coefficients: ``"gaussian"``, or ``"sign"`` for ±√D_i along each direction:
            then ‖δ‖ is the budget in every draw of any allocation, which is for
            measurements, see :data:`leakwatch.defenses.Coefficients`.

    Raises:
        ValueError: for an unknown allocation or coefficients.

    Example:
        >>> import torch
        >>> from leakwatch import GradientMap
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Sigmoid(),
        ...                           torch.nn.Linear(6, 3))
        >>> at = GradientMap(net, dtype=torch.float64)
        >>> samples = Samples(at, torch.rand(2, 4), torch.tensor([0, 2]))
        >>> noise = EigenNoise(Budget(0.1, "norm"), "single", coefficients="sign")
        >>> made = noise.protect(
        ...     samples.gradient, generator=torch.Generator(), samples=samples)
        >>> made.delta.norm(dim=1).round(decimals=9).tolist()
        [0.1, 0.1]
    """

    budget: Budget
    allocation: str | Allocation = "waterfill"
    coefficients: Coefficients = "gaussian"
    needs: ClassVar[Needs] = "jacobian"

    def __post_init__(self) -> None:
        if isinstance(self.allocation, str) and self.allocation not in _ALLOCATIONS:
            raise ValueError(
                f"unknown allocation {self.allocation!r}; "
                f"{meant(self.allocation, _ALLOCATIONS)}choose from "
                f"{', '.join(_ALLOCATIONS)}, or give an object such as Smallest(k=20)."
            )
        standard(1, 1, torch.Generator(), self.coefficients)

    @property
    def name(self) -> str:
        """``eigen-`` and the allocation."""
        return f"eigen-{self._chosen.name}"

    def protect(
        self,
        gradient: Float[Tensor, "n d_theta"],
        *,
        generator: torch.Generator,
        samples: Samples | None = None,
    ) -> Shared:
        """Noise on each sample's gradient. See :meth:`Defense.protect`."""
        samples = needed(samples, gradient, self.name)
        norm = gradient.double().norm(dim=1)
        total = self.budget.variance(norm, gradient.shape[1])
        return self._noisy(gradient, total, generator, samples)

    def protect_batch(
        self,
        gradient: Float[Tensor, "n d_theta"],
        *,
        generator: torch.Generator,
        samples: Samples | None = None,
        reduction: Reduction = "mean",
    ) -> Shared:
        """Noise for each sample along its own directions, with equal shares.

        Independent, so that E‖δ‖² of the message is the budget; images are moved by
        equal shares of ‖δ‖² first, and then together until ‖δ‖ of the message is the
        budget. The covariance of the message has no closed form here.
        """
        samples = needed(samples, gradient, self.name)
        n, size = gradient.shape
        message = combined(gradient, reduction).double().norm(dim=1)
        weight = averaging(n, reduction)
        each = self.budget.variance(message, size) / n / weight**2
        return self._noisy(gradient, each.expand(n), generator, samples, reduction)

    @property
    def needs_basis(self) -> bool:
        """Whether noise is laid along singular directions: not for ``"diagonal"``."""
        return self._chosen.needs_basis

    @property
    def _chosen(self) -> Allocation:
        if isinstance(self.allocation, str):
            return _ALLOCATIONS[self.allocation]
        return self.allocation

    def _noisy(
        self,
        gradient: Tensor,
        total: Tensor,
        generator: torch.Generator,
        samples: Samples,
        reduction: Reduction | None = None,
    ) -> Shared:
        total = total.to(samples.jacobian.device)
        covariance = self._chosen.covariance(samples, total)
        if isinstance(covariance, InRange) and covariance.exact:
            xi = covariance.standard(generator, self.coefficients)
            return self._moved(gradient, total, xi, samples, reduction)
        delta = covariance.draw(generator, self.coefficients)
        made = Shared.noisy(gradient, delta, covariance)
        return made if reduction is None else summed(made, reduction)

    def _moved(
        self,
        gradient: Tensor,
        total: Tensor,
        xi: Tensor,
        samples: Samples,
        reduction: Reduction | None,
    ) -> Shared:
        """Of moved images: each with its budget, or all together with theirs."""
        # A row may be a part of its sample's gradient, and is then one of the moved
        # image's.
        part = _ratio(gradient, samples.gradient).to(total)
        asked = float(total.sum().sqrt())
        total = total / torch.where(part > 0, part, torch.inf).square()
        moves = Moves(self._spread(samples), xi)
        t = moves.alone(total)
        if reduction is not None and len(t) > 1:
            t = moves.together(t, part, asked)
        delta = part[:, None] * moves.delta(t)
        linear = InRange(samples, moves.spread(t).variance * part.square()[:, None])
        made = Shared.noisy(gradient, delta, linear)
        made = replace(made, variance=delta.square().sum(1))
        if reduction is None:
            return made
        message = combined(delta, reduction).square().sum(1)
        return replace(summed(made, reduction), variance=message)

    def _spread(self, samples: Samples) -> Callable[[Tensor], InRange]:
        def spread(t: Tensor) -> InRange:
            made = self._chosen.covariance(samples, t)
            assert isinstance(made, InRange)  # as it was for the budget
            return made

        return spread


def _ratio(gradient: Tensor, own: Tensor) -> Tensor:
    """‖row‖/‖g‖ of each sample, 1 where g = 0, float64."""
    if torch.equal(gradient, own.to(gradient)):
        return torch.ones(len(own), dtype=torch.float64, device=own.device)
    whole = own.double().norm(dim=1)
    part = gradient.double().norm(dim=1).to(whole)
    return torch.where(whole > 0, part / torch.where(whole > 0, whole, 1.0), 1.0)
