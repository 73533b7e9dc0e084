"""What products with J take on the way, before the first of them is taken."""

from __future__ import annotations

import torch
from torch import Tensor

from leakwatch.derivatives import GradientMap

__all__ = ["bytes_of_products"]

# Measured, see docs/measurements/trust.md: the peak of a first product with its
# comparisons, in units of what a forward pass keeps and of the gradient.
_ACTIVATIONS, _GRADIENTS = 24, 26


def bytes_of_products(gradients: GradientMap, x: Tensor, y: Tensor) -> int:
    """Peak of the memory that products with J of one sample take, about.

    Args:
        gradients: the map.
        x: a sample, without a batch dimension.
        y: its label.

    Returns:
        Bytes; 0 where the network can't be evaluated so.
    """
    key = "bytes of products", x.shape, gradients.dtype
    if key in gradients.facts:
        return gradients.facts[key]
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    try:
        with gradients.evaluation(x) as at, torch.enable_grad():
            xs, ys = gradients.prepared(x[None], y[None])
            weights = {k: t.detach().requires_grad_() for k, t in at.shared.items()}
            hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
            with hooks:
                gradients.batch_loss(weights, at.fixed, xs, ys, xs.new_ones(1))
            for t in (*weights.values(), *at.fixed.values()):
                kept.pop(t.untyped_storage().data_ptr(), None)
    except Exception:  # what can't be evaluated is said by its first product
        return 0
    size = gradients.size * gradients.dtype.itemsize
    found = gradients.facts[key] = _ACTIVATIONS * sum(kept.values()) + _GRADIENTS * size
    return found
