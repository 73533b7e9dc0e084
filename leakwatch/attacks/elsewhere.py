"""Weights that reach the loss other than through the layers that hold them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from leakwatch.attacks.known_layers import NotLayerwiseError, readable
from leakwatch.evaluation import Weights

__all__ = ["check_own"]


def check_own(at: Weights, losses: Callable[[dict[str, Tensor]], Tensor]) -> None:
    """Refuses weights that are used outside their layers, where nobody follows them.

    A penalty on weights in the criterion may move gradients by less than rounding
    hides in a comparison of values, and still be forgotten.

    Args:
        at: the weights.
        losses: of some images, with the layers replaced and these tensors in place of
            the shared parameters, by name.

    Raises:
        NotLayerwiseError: names the weights.
    """
    watched = {name: p.detach().requires_grad_() for name, p in at.shared.items()}
    total = losses(watched).sum()
    if not total.requires_grad:
        return
    found: tuple[Tensor | None, ...] = torch.autograd.grad(
        total, list(watched.values()), allow_unused=True
    )
    names = [name for name, g in zip(watched, found, strict=True) if g is not None]
    if names:
        raise NotLayerwiseError(
            f"the loss uses {readable(names)} outside their layers too"
        )
