"""A time limit is kept to a step."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import leakwatch
from leakwatch.attacks.clock import Clock


@pytest.mark.parametrize("after", [0.0, 2.5])
@pytest.mark.parametrize("step", [0.3, 1.0, 7.0])
def test_no_step_begins_that_would_end_too_late(
    monkeypatch: pytest.MonkeyPatch, step: float, after: float
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock = Clock(110.0)
    clock.after = after
    while not clock.over():
        now[0] += step
    assert now[0] + after <= 110.0
    assert now[0] + step + after > 110.0


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


class Timed(nn.Module):
    """A small network, each forward of which takes a hundredth of a second."""

    def __init__(self, act: type[nn.Module], tick: Callable[[], None]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tick = tick
        self.layers = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1, stride=2), act(),
            nn.Conv2d(4, 4, 3, padding=1), act(),
            nn.Flatten(), nn.Linear(64, 5),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        self.tick()
        out: Tensor = self.layers(x)
        return out


@pytest.mark.parametrize(
    ("act", "samples", "images"),
    [(nn.Sigmoid, 1, 1), (nn.ReLU, 1, 1), (nn.ReLU, 4, 1), (nn.Sigmoid, 4, 4)],
)
def test_combined_keeps_limits_that_are_too_small_for_it(
    monkeypatch: pytest.MonkeyPatch, act: type[nn.Module], samples: int, images: int
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def tick() -> None:
        now[0] += 0.01

    net = Timed(act, tick)
    stream = torch.Generator().manual_seed(1)
    x = torch.rand(samples, 1, 8, 8, generator=stream)
    y = torch.arange(samples)
    target = leakwatch.GradientMap(net)(x, y).view(-1, images, 5 * 65 + 188).mean(1)
    spent = []
    for limit in (1e-4, 0.05, 0.2, 0.5, 1.0):
        began = now[0]
        found = leakwatch.attack(
            net, x, y, "combined", images=images, restarts=4, time_limit=limit
        )
        spent.append(now[0] - began)
        # With no time at all, one attack is prepared, does a step, and is judged.
        assert spent[-1] <= limit + spent[0] + 1e-9
        assert found.restart_images.shape[:2] == (4, samples // images)
        assert torch.isfinite(found.restart_images).all()
        shared = leakwatch.GradientMap(net)(found.images.flatten(0, -4), y)
        apart = shared.view(-1, images, shared.shape[1]).mean(1) - target
        relative = apart.norm(dim=1) / target.norm(dim=1)
        for status, rest in zip(found.status, relative.tolist(), strict=True):
            assert status.word in ("ok", "not converged")
            assert status.word == "not converged" or rest <= 1e-3
    assert spent[0] < 0.7
    assert spent[-1] > 0.7
