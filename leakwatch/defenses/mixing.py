"""Mixed samples: partners, coefficients, and what an attacker can undo of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from jaxtyping import Float, Shaped
from torch import Tensor

from leakwatch.gradients import GradientMap

__all__ = ["Mixing"]


@final
@dataclass(frozen=True, eq=False)
class Mixing:
    """x' = αx + (1 − α)x_p for each sample, with the loss mixed the same way.

    The loss at x' is α ℓ(x', y) + (1 − α) ℓ(x', y_p), which for cross-entropy is the
    loss under the mixed label (Zhang et al., "mixup", ICLR 2018).

    Attributes:
        x: private samples, network inputs.
        y: their labels.
        partner: x_p.
        partner_labels: y_p.
        coefficient: α, the share of the private sample, ``(n,)``, float64.
        mix_labels: whether the loss is mixed, or that under y alone.
    """

    x: Float[Tensor, "n ..."]
    y: Shaped[Tensor, "n ..."]
    partner: Float[Tensor, "n ..."]
    partner_labels: Shaped[Tensor, "n ..."]
    coefficient: Float[Tensor, " n"]
    mix_labels: bool = True

    @property
    def mixed(self) -> Float[Tensor, "n ..."]:
        """x', float64."""
        alpha = self._alpha(self.x)
        return alpha * self.x.double() + (1 - alpha) * self.partner.double()

    @property
    def shift(self) -> Float[Tensor, "n d_x"]:
        """δ_x = x' − x, flattened."""
        return (self.mixed - self.x.double()).flatten(1)

    def gradient(self, gradients: GradientMap) -> Float[Tensor, "n d_theta"]:
        """The gradient at x' of the (mixed) loss.

        Args:
            gradients: the map.
        """
        return self._mix(lambda y: gradients(self.mixed, y))

    def influence(self, gradients: GradientMap) -> Float[Tensor, "n d_theta"]:
        r"""J_δ δ_x, with J_δ the Jacobian at x' = x + δ_x.

        The score of a perturbed sample is ‖(H + εI)⁻¹ Jᵀ J_δ δ_x‖ (Zhang et al.,
        "Inversion Influence Functions", NeurIPS 2023, Section 3.3, with the damping of
        Section 4; their J is our Jᵀ), so it is ``i2f`` for this perturbation:
        ``leakwatch.score(module, x, y, ["i2f"], delta=influence, epsilon=ε)``.

        The loss that J_δ derives from is the one that is shared. Beside J_δ δ_x a mixed
        label also moves the gradient at x itself; ``Shared.delta`` holds all of it and
        is a δ for ``i2f`` as well.

        Args:
            gradients: the map.
        """
        return self._mix(lambda y: gradients.jvp(self.mixed, y, self.shift))

    def unmixed(self, found: Float[Tensor, "n ..."]) -> Float[Tensor, "n ..."]:
        """What an attacker who knows partner and α makes of a reconstruction of x'.

        (x̂' − (1 − α)x_p)/α: an error of x̂' becomes 1/α times as large, and nothing else
        protects the sample. Public partners, or repeated ones, are known.

        Args:
            found: reconstructions of the mixed samples, network inputs.
        """
        alpha = self._alpha(found)
        return (found - (1 - alpha) * self.partner.to(found)) / alpha

    def _alpha(self, like: Tensor) -> Tensor:
        alpha = self.coefficient.view(-1, *[1] * (like.ndim - 1))
        return alpha.to(like.device)

    def _mix(self, of: Callable[[Tensor], Tensor]) -> Tensor:
        own = of(self.y)
        if not self.mix_labels:
            return own
        alpha = self.coefficient.to(own)[:, None]
        return alpha * own + (1 - alpha) * of(self.partner_labels)
