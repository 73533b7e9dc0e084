"""What DLFA believes of images: smooth, in range, the same ones in every epoch.

Dimitrov, Balunović, Konstantinov and Vechev, "Data Leakage in Federated Averaging"
(TMLR 2022), Section 4.3, and their code for what the paper leaves open.
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from leakwatch.attacks.pixels import PixelScale

__all__ = ["OrderPrior", "excess", "joined", "order_distance", "squared_variation"]

OrderPrior: TypeAlias = Literal["l2_mean", "l2_max_conv"]

_CHANNELS = 96


def squared_variation(
    x: Float[Tensor, "attacks images channels height width"],
) -> Float[Tensor, " attacks"]:
    """Σ of squared differences of neighbours, wrapped around, mean over images.

    Args:
        x: network-input units.

    Returns:
        ``(attacks,)``, differentiable.

    Raises:
        ValueError: if samples are not images.

    Example:
        >>> float(squared_variation(torch.tensor([[[[[0.0, 1.0]]]]])))
        2.0
    """
    if x.ndim != 5:
        raise ValueError(
            f"total variation needs images (channels, height, width), got samples of "
            f"shape {tuple(x.shape[2:])}; use tv=0."
        )
    moved = [(x - x.roll(1, dim)).square() for dim in (-1, -2)]
    return (moved[0] + moved[1]).flatten(2).sum(2).mean(1)


def excess(
    x: Float[Tensor, "attacks images ..."], pixels: PixelScale
) -> Float[Tensor, " attacks"]:
    """Σ over pixels of the squared distance from their range, mean over images.

    Args:
        x: network-input units.
        pixels: the range; without one the result is 0.

    Returns:
        ``(attacks,)``, differentiable, pixel units squared.
    """
    if pixels.low is None or pixels.high is None:
        return x.new_zeros(len(x))
    p = pixels.to_pixels(x)
    beyond = p - p.clamp(pixels.low, pixels.high)
    return beyond.square().flatten(2).sum(2).mean(1)


def order_distance(
    x: Float[Tensor, "attacks images ..."], sets: int, kind: OrderPrior
) -> Float[Tensor, " attacks"]:
    """How much sets of images differ, whatever the order within each.

    The mean over all pairs of sets, also of a set and itself, of the mean squared
    difference of what stands for a set: its mean image, or the maximum over its images
    of a fixed random 3×3 convolution with 96 channels.

    Args:
        x: images, set after set.
        sets: how many, one for each epoch.
        kind: ``"l2_mean"`` or ``"l2_max_conv"``.

    Returns:
        ``(attacks,)``, differentiable; 0 for one set.

    Example:
        >>> x = torch.tensor([[[0.0], [1.0], [1.0], [0.0]]])
        >>> float(order_distance(x, 2, "l2_mean"))  # the same two, turned around
        0.0
    """
    if sets == 1:
        return x.new_zeros(len(x))
    if kind == "l2_mean":
        stands = x.view(len(x), sets, -1, *x.shape[2:]).mean(2).flatten(2)
    else:
        maps = F.conv2d(x.flatten(0, 1), _kernel(x))
        stands = maps.view(len(x), sets, -1, *maps.shape[1:]).amax(2).flatten(2)
    # The mean over pairs of (a − b)² is twice the variance.
    return 2 * stands.var(1, correction=0).mean(1)


def joined(
    x: Float[Tensor, "attacks images ..."],
    labels: Int[Tensor, "attacks N"],
) -> Float[Tensor, "attacks N ..."]:
    """One set of images from several: each matched to the first, then their mean.

    The published code matches all images of a set by PSNR; here only those of one
    label, which can't be each other's otherwise.

    Args:
        x: images, set after set.
        labels: of the images of each set.

    Returns:
        The mean images, labelled as given.
    """
    from scipy.optimize import linear_sum_assignment

    count = labels.shape[1]
    sets = x.view(len(x), -1, count, *x.shape[2:])
    if sets.shape[1] == 1:
        return sets[:, 0]
    total = sets[:, 0].clone()
    for each, y, out in zip(sets, labels, total, strict=True):
        first = each[0].double().flatten(1)
        other_label = y[:, None] != y
        for other in each[1:]:
            rows = other.double().flatten(1)
            cost = torch.cdist(first, rows).square()
            # More than all pairs of one label can cost together.
            cost += other_label * (1 + count * cost.max())
            out += other[torch.from_numpy(linear_sum_assignment(cost.cpu())[1])]
    return total / sets.shape[1]


def _kernel(x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    channels = x.shape[2]
    drawn = torch.randn(
        _CHANNELS, channels, 3, 3, generator=generator, dtype=torch.float64
    )
    return (drawn / math.sqrt(9 * channels)).to(x)
