"""A time limit is kept to a step."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import leakwatch
from leakwatch.attacks.clock import Clock


@pytest.mark.parametrize("step", [0.3, 1.0, 7.0])
def test_no_step_begins_that_would_end_too_late(
    monkeypatch: pytest.MonkeyPatch, step: float
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock = Clock(110.0)
    while not clock.over():
        now[0] += step
    assert now[0] <= 110.0
    assert now[0] + step > 110.0


def test_the_first_step_is_always_done_before_a_deadline() -> None:
    assert not Clock(time.perf_counter() + 60).over()
    assert Clock(time.perf_counter() - 1).over()


@pytest.mark.parametrize("preset", ["lavp-cosine", "idlg", "gauss-newton"])
def test_the_limit_holds_for_an_attack_and_all_that_prepares_it(
    monkeypatch: pytest.MonkeyPatch, preset: str
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def loss(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        now[0] += 1.0
        return F.cross_entropy(module(x), y, reduction="none")

    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.ReLU(), nn.Linear(6, 3))
    x, y = torch.rand(2, 1, 4, 4), torch.tensor([0, 2])
    limit = 100.0
    leakwatch.attack(
        net, x, y, preset, criterion=loss, time_limit=limit, steps=500, restarts=20,
        noise_std=1e-3,
    )  # fmt: skip
    # A loss takes a second. A step of Gauss-Newton forms H of two targets: 12 losses.
    spent = now[0] - 100.0
    # Judging takes three gradients of each target on top.
    assert limit - 15 < spent < limit + 5
