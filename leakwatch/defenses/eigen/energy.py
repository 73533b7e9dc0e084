"""How much of a perturbation lands where an attacker looks: in the range of J."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from leakwatch.defenses.covariance import Covariance
from leakwatch.defenses.eigen.basis import Basis

__all__ = ["energy_in_range", "energy_share"]


def energy_share(covariance: Covariance, basis: Basis) -> Float[Tensor, " n"]:
    """The part of E‖δ‖² inside the range of J: Σ v_iᵀΣv_i / tr Σ.

    For isotropic noise that is the number of resolved directions over d_θ, about
    d_x/d_θ; the rest an attacker who knows the network projects away. For noise along
    the v_i it is 1.

    Args:
        covariance: of the noise.
        basis: of J; directions that are not resolved do not count.

    Returns:
        From 0 to 1, ``(n,)``; NaN for no noise.
    """
    return covariance.along(basis).sum(1) / covariance.total


def energy_in_range(
    delta: Float[Tensor, "n d_theta"], basis: Basis
) -> Float[Tensor, " n"]:
    """The same for one δ: ‖Pδ‖²/‖δ‖² with P the projection on the range of J.

    Args:
        delta: a perturbation of each message.
        basis: of J.

    Returns:
        From 0 to 1, ``(n,)``; NaN for δ = 0.
    """
    inside = basis.pull(delta).square().sum(1)
    found: Tensor = inside / delta.double().square().sum(1)
    return found
