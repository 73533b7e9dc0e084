"""Sequential oracles for attacks on updates: plain autograd, one client at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from leakwatch import LocalTraining, WeightUpdate


def flat(module: nn.Module) -> Tensor:
    return torch.cat(
        [p.detach().flatten() for p in module.parameters() if p.requires_grad]
    )


def named(module: nn.Module, w: Tensor) -> dict[str, Tensor]:
    parts, at = {}, 0
    for name, p in module.named_parameters():
        if p.requires_grad:
            parts[name] = w[at : at + p.numel()].view_as(p)
            at += p.numel()
    return parts


def gradient(module: nn.Module, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """∇_w of the mean loss at w, with a graph."""
    loss = F.cross_entropy(functional_call(module, named(module, w), (x,)), y)
    (g,) = torch.autograd.grad(loss, w, create_graph=True)
    return g


def cosine_distance(g: Tensor, v: Tensor) -> Tensor:
    return 1 - g @ v / (g.norm() * v.norm())


def variation(x: Tensor) -> Tensor:
    """The mean |∂x| plus the mean |∂y|."""
    return x.diff(dim=-1).abs().mean() + x.diff(dim=-2).abs().mean()


def trained(
    module: nn.Module,
    w: Tensor,
    x: Tensor,
    y: Tensor,
    how: LocalTraining,
    batches: Callable[[int], Iterator[Tensor]] | None = None,
) -> Tensor:
    """w_T by torch.optim.SGD."""
    leaf = w.clone().requires_grad_()
    sgd = torch.optim.SGD(
        [leaf], lr=how.lr, momentum=how.momentum, weight_decay=how.weight_decay
    )
    for epoch in range(how.epochs):
        order = torch.arange(len(x)).split(how.batch_size)
        for rows in order if batches is None else batches(epoch):
            sgd.zero_grad()
            logits = functional_call(module, named(module, leaf), (x[rows],))
            F.cross_entropy(logits, y[rows]).backward()
            sgd.step()
    return leaf.detach()


def update_of(
    module: nn.Module, x: Tensor, y: Tensor, how: LocalTraining
) -> WeightUpdate:
    """What clients with these samples share, ``(clients, N, …)``."""
    w = flat(module)
    pairs = zip(x, y, strict=True)
    final = torch.stack([trained(module, w, xi, yi, how) for xi, yi in pairs])
    return WeightUpdate(w, final, y, tuple(x.shape[2:]), x.shape[1], how)


def small_cnn() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.Sigmoid(),
        nn.AvgPool2d(2),
        nn.Conv2d(8, 4, 3, padding=1),
        nn.Sigmoid(),
        nn.Flatten(),
        nn.Linear(36, 3),
    ).double()


def clients(
    count: int, images: int, shape: tuple[int, ...] = (1, 6, 6), classes: int = 3
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    x = torch.rand(count, images, *shape, dtype=torch.float64, generator=generator)
    y = torch.randint(classes, (count, images), generator=generator)
    return x, y
