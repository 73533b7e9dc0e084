"""Targets that are no class indices, each with its criterion: `TARGETS`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 4


class Target(NamedTuple):
    """``draw(n, generator)`` gives targets, ``criterion`` their losses."""

    draw: Callable[[int, torch.Generator], Tensor]
    criterion: Callable[[nn.Module, Tensor, Tensor], Tensor]


def several(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Several labels at once."""
    return F.binary_cross_entropy_with_logits(
        net(x), y.to(x.dtype), reduction="none"
    ).mean(1)


def number(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """One number."""
    return (net(x)[:, 0] - y).square()


def soft(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A distribution over classes."""
    return -(net(x).log_softmax(1) * y).sum(1)


def mask(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A class for each of two places."""
    logits = net(x).view(-1, 2, 2)
    return F.cross_entropy(logits, y, reduction="none").mean(1)


TARGETS = {
    "several": Target(
        lambda n, g: (torch.rand(n, CLASSES, generator=g) > 0.5).float(), several
    ),
    "bits": Target(lambda n, g: torch.rand(n, CLASSES, generator=g) > 0.5, several),
    "number": Target(lambda n, g: torch.rand(n, generator=g), number),
    "soft": Target(lambda n, g: torch.rand(n, CLASSES, generator=g).softmax(1), soft),
    "mask": Target(lambda n, g: torch.randint(0, 2, (n, 2), generator=g), mask),
}


def network(width: int = 30) -> nn.Module:
    """For pictures of 4×4."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Flatten(), nn.Linear(16, width), nn.Tanh(), nn.Linear(width, CLASSES)
        )


def samples(name: str, n: int) -> tuple[Tensor, Tensor]:
    """Pictures in [0, 1] with targets of one kind."""
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(n, 1, 4, 4, generator=generator)
    return x, TARGETS[name].draw(n, generator)
