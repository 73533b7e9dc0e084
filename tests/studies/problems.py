"""A small network whose Jacobian can be formed densely."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from leakwatch import cross_entropy
from leakwatch.attacks import GaussNewton
from leakwatch.studies.trade_offs.attack import ProbeAttack

PIXELS = 6
FAST = GaussNewton(steps=15, patience=4, prior_mean=torch.full((1, 2, 3), 0.5))


def network(hidden: int = 9, seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(PIXELS, hidden),
            nn.Sigmoid(),
            nn.Linear(hidden, 3),
        )


def samples(n: int = 6) -> tuple[Tensor, Tensor]:
    """Dark and bright pixels: nothing that looks like plain grey."""
    generator = torch.Generator().manual_seed(1)
    x = 0.15 * torch.rand(n, 1, 2, 3, generator=generator)
    bright = torch.rand(n, 1, 2, 3, generator=generator) > 0.5
    return torch.where(bright, 1 - x, x), torch.arange(n) % 3


def eigenvalues(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Eigenvalues of JᵀJ of one sample, descending, dense float64."""
    net = net.double()
    parameters = list(net.parameters())

    def gradient(pixels: Tensor) -> Tensor:
        loss = cross_entropy(net(pixels[None]), y[None]).sum()
        grads = torch.autograd.grad(loss, parameters, create_graph=True)
        return torch.cat([g.flatten() for g in grads])

    jacobian = torch.autograd.functional.jacobian(gradient, x.double())
    matrix = jacobian.reshape(-1, x.numel())
    return torch.linalg.eigvalsh(matrix.T @ matrix).flip(0)


def attack_of(x: Tensor, y: Tensor, **changed: Any) -> ProbeAttack:
    """From beside the truth, by who does not and who does know the defense."""
    made = ProbeAttack(
        x=x,
        y=y,
        index=tuple(range(len(x))),
        engine=FAST,
        attackers=("naive", "adaptive"),
        start="near",
        radius=0.02,
        restarts=1,
        mean=None,
        std=None,
        data_range=1.0,
        prior_std=0.3,
        prior_mean=None,
        criterion=None,
    )
    return replace(made, **changed)
