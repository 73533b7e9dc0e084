"""Sequential oracles for attacks: one attack at a time, plain autograd."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def plain_gradient(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Gradient of the mean over samples, each alone in its batch, with a graph."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    total = torch.zeros((), dtype=x.dtype)
    for xi, yi in zip(x, y, strict=True):
        out = module(xi[None].clone())
        if yi.is_floating_point():
            total = total - (yi * out.log_softmax(1)).sum()
        else:
            total = total + F.cross_entropy(out, yi[None])
    parts = torch.autograd.grad(
        total / len(x), parameters, create_graph=True, materialize_grads=True
    )
    return torch.cat([p.reshape(-1) for p in parts])


def plain_distance(name: str, g: Tensor, target: Tensor) -> Tensor:
    """The textbook form of each distance."""
    if name == "l2":
        return 0.5 * (g - target).square().sum()
    if name == "l1":
        return (g - target).abs().sum()
    return 1 - g @ target / (g.norm() * target.norm())


def plain_objective(
    module: nn.Module, name: str, x: Tensor, y: Tensor, target: Tensor
) -> tuple[Tensor, Tensor]:
    """Distance at x, and its derivative by double backward."""
    leaf = x.detach().clone().requires_grad_()
    value = plain_distance(name, plain_gradient(module, leaf, y), target)
    if not value.requires_grad:
        return value.detach(), torch.zeros_like(leaf)
    slope = torch.autograd.grad(value, leaf, materialize_grads=True, allow_unused=True)
    return value.detach(), slope[0]
