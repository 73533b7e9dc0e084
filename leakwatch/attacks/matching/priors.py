"""What an attacker believes of images before seeing their gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = [
    "BatchStatistics",
    "Priors",
    "batch_norm_distance",
    "squared_norm",
    "total_variation",
]

BatchStatistics: TypeAlias = Sequence[tuple[Tensor, Tensor]]
"""Mean and variance ``(targets, channels)`` at the input of each BatchNorm layer."""


@final
@dataclass(frozen=True)
class Priors:
    """Weights of the terms that are added to the matching distance.

    Args:
        tv: of :func:`total_variation`.
        l2: of :func:`squared_norm`.
        batch_norm: of :func:`batch_norm_distance`.
        first_layer: factor on the first BatchNorm layer's part, as in the code of
            DeepInversion, on which GradInversion builds.

    Raises:
        ValueError: if a weight is negative or not finite.
    """

    tv: float = 0.0
    l2: float = 0.0
    batch_norm: float = 0.0
    first_layer: float = 10.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(
                    f"the weight {name} of a prior must be finite and at least 0, got "
                    f"{value}."
                )

    def add_to(
        self,
        x: Float[Tensor, "attacks images ..."],
        gradient: Float[Tensor, "attacks images ..."],
    ) -> Float[Tensor, " attacks"]:
        """Adds the derivative of total variation and norm to ``gradient``.

        Args:
            x: images.
            gradient: changed in place.

        Returns:
            The weighted sum of both terms for each attack.
        """
        value = x.new_zeros(len(x))
        if self.tv:
            value += self.tv * total_variation(x, gradient, self.tv)
        if self.l2:
            value += self.l2 * squared_norm(x)
            gradient.add_(x, alpha=2 * self.l2 / x[0].numel())
        return value


def total_variation(
    x: Float[Tensor, "attacks images ... height width"],
    gradient: Float[Tensor, "attacks images ... height width"] | None = None,
    factor: float = 1.0,
) -> Float[Tensor, " attacks"]:
    """Mean |∂x| plus mean |∂y| over all pixels of an attack, network-input units.

    The anisotropic total variation of the published attacks (Geiping et al. 2020,
    code): each of the two is a mean over the differences that there are.

    Args:
        x: images.
        gradient: if given, ``factor`` times the derivative is added to it in place.
        factor: see ``gradient``.

    Returns:
        The total variation of each attack, ``(attacks,)``.

    Raises:
        ValueError: if samples are not images, or only one pixel in size.

    Example:
        >>> import torch
        >>> float(total_variation(torch.tensor([[[[[0.0, 1.0], [0.0, 1.0]]]]])))
        1.0
    """
    if x.ndim < 5:
        raise ValueError(
            f"total variation needs images (channels, height, width), got samples of "
            f"shape {tuple(x.shape[2:])}; use tv=0."
        )
    value = x.new_zeros(len(x))
    for dim in (-1, -2):
        length = x.shape[dim]
        if length < 2:
            continue
        step = torch.diff(x, dim=dim)
        count = step[0].numel()
        value += step.abs().flatten(1).sum(1) / count
        if gradient is not None:
            step.sign_()
            scale = factor / count
            gradient.narrow(dim, 1, length - 1).add_(step, alpha=scale)
            gradient.narrow(dim, 0, length - 1).sub_(step, alpha=scale)
    return value


def squared_norm(
    x: Float[Tensor, "attacks images ..."],
) -> Float[Tensor, " attacks"]:
    """Mean of x² over all elements of an attack, network-input units.

    Args:
        x: images.

    Returns:
        ``(attacks,)``.
    """
    return x.flatten(1).square().mean(1)


def batch_norm_distance(
    inputs: Sequence[Float[Tensor, "attacks images channels ..."]],
    expected: Sequence[tuple[Tensor, Tensor]],
    first_layer: float = 10.0,
) -> Float[Tensor, " attacks"]:
    """Σ_l ‖mean_l − μ_l‖ + ‖var_l − σ²_l‖ over BatchNorm layers, differentiable.

    Yin et al., "See through Gradients" (GradInversion, CVPR 2021), Eq. 8: statistics
    over the images and positions of each channel at the layer's input.

    Args:
        inputs: of each layer.
        expected: mean and variance that each layer's input should have, ``(channels,)``
            or ``(attacks, channels)``.
        first_layer: factor on the first layer's term.

    Returns:
        ``(attacks,)``.
    """
    total = inputs[0].new_zeros(len(inputs[0]))
    for i, (a, (mean, variance)) in enumerate(zip(inputs, expected, strict=True)):
        by_channel = a.transpose(1, 2).flatten(2)
        center = by_channel.mean(2)
        spread = (by_channel - center[:, :, None]).square().mean(2)
        term = _distance(center, mean) + _distance(spread, variance)
        total = total + term * (first_layer if i == 0 else 1.0)
    return total


def _distance(a: Tensor, b: Tensor) -> Tensor:
    # √0 has no derivative: a square of rounding's size keeps it finite.
    squares = (a - b).square().sum(1)
    out: Tensor = (squares + torch.finfo(a.dtype).tiny ** 0.5).sqrt()
    return out
