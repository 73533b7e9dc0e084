"""Slopes of the loss in the logits, as a shared gradient states them."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from leakwatch.attacks.labels.last_layer import find_head
from leakwatch.attacks.shared_gradient import SharedGradient
from leakwatch.derivatives import GradientMap
from leakwatch.derivatives.losses import classification_criterion
from leakwatch.derivatives.runtime import UnsupportedModuleError

__all__ = ["logit_slopes"]


def logit_slopes(
    gradients: GradientMap, shared: SharedGradient, labels: Int[Tensor, " targets"]
) -> Float[Tensor, "targets classes"] | None:
    """δ* = softmax(z) − e_y at the private image of each target.

    The gradient of the bias that is added to make the logits. Other losses than
    cross-entropy, and networks that don't end in a linear layer with a bias, don't
    show it.

    Args:
        gradients: the map.
        shared: what it shared, one image in each target.
        labels: of the images.

    Returns:
        The slopes, float64; ``None`` where they can't be read.
    """
    if gradients.criterion is not classification_criterion:
        return None
    try:
        head = find_head(gradients, shared.sample_shape)
    except UnsupportedModuleError:
        return None
    if not head.has_bias:
        return None
    return torch.stack([head.read(g).bias for g in shared.gradient])
