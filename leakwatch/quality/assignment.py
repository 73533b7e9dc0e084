"""Which reconstruction of a joint attack shows which image."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

__all__ = ["align", "assign"]


def assign(
    reconstructions: Float[Tensor, "targets images ..."],
    originals: Float[Tensor, "targets images ..."],
) -> Int[Tensor, "targets images"]:
    """The assignment of reconstructions to originals with the least squared error.

    An averaged gradient says nothing about the order of its images, so a joint attack
    returns them in any order. Optimal and one-to-one, by
    ``scipy.optimize.linear_sum_assignment``: no original is matched twice. Give both
    in pixel units, where all channels count alike. Reconstructions that hold NaN or
    infinity are matched to what the others leave.

    Args:
        reconstructions: of each target, in any order.
        originals: of each target.

    Returns:
        A permutation for each target: ``reconstructions[t, permutation[t, i]]`` shows
        ``originals[t, i]``.

    Raises:
        ValueError: if the shapes differ or have fewer than three dimensions.

    Example:
        >>> originals = torch.tensor([[[0.0], [1.0], [2.0]]])
        >>> assign(originals[:, [2, 0, 1]] + 0.1, originals)
        tensor([[1, 2, 0]])
    """
    if reconstructions.shape != originals.shape or originals.ndim < 3:
        raise ValueError(
            f"reconstructions and originals must have the same shape (targets, images, "
            f"...), got {tuple(reconstructions.shape)} and {tuple(originals.shape)}."
        )
    from scipy.optimize import linear_sum_assignment

    orders = []
    for got, true in zip(reconstructions, originals, strict=True):
        a, b = (t.detach().double().flatten(1) for t in (got, true))
        # Explicit differences: for equal images ‖a‖² − 2ab + ‖b‖² is rounding noise.
        rows = [(a - row).square().mean(1) for row in b]
        cost = torch.stack(rows).cpu().numpy()
        finite = np.isfinite(cost)
        most = float(cost[finite].max()) if finite.any() else 0.0
        cost = np.where(finite, cost, len(cost) * most + 1.0)
        orders.append(torch.from_numpy(linear_sum_assignment(cost)[1]))
    return torch.stack(orders).long().to(originals.device)


def align(
    reconstructions: Float[Tensor, "targets images ..."],
    originals: Float[Tensor, "targets images ..."],
) -> Float[Tensor, "targets images ..."]:
    """Reconstructions in the order of the originals, see :func:`assign`."""
    order = assign(reconstructions, originals)
    rows = torch.arange(len(order), device=order.device)[:, None]
    return reconstructions[rows, order]
