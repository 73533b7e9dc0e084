"""Networks, samples and what comes with them on different devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attacks.gauss_newton.gauss_newton_problems import SHAPE, net, samples
from cases import DEVICES, Elsewhere, elsewhere
from torch import Tensor, nn

import leakwatch
from leakwatch.attacks import Start
from leakwatch.quality import quality

Call = Callable[[nn.Module, Tensor, Tensor, Any], object]
PIXEL_SCALE = {"mean": [0.4], "std": [0.25]}


def _delta(at: nn.Module, x: Tensor) -> Tensor:
    size = sum(p.numel() for p in at.parameters())
    return 1e-3 * torch.ones(len(x), size)


def _scored(at: nn.Module, x: Tensor, y: Tensor, place: Any) -> object:
    return leakwatch.score(at, x, y, noise_std=1e-3, **PIXEL_SCALE)


def _scored_with_a_delta(at: nn.Module, x: Tensor, y: Tensor, place: Any) -> object:
    return leakwatch.score(
        at,
        x,
        y,
        delta=place(_delta(at, x)),
        prior_mean=place(torch.full(SHAPE, 0.4)),
        prior=torch.eye(x[0].numel(), dtype=torch.float64),
        **PIXEL_SCALE,
    )


def _attacked(at: nn.Module, x: Tensor, y: Tensor, place: Any) -> object:
    return leakwatch.attack(
        at, x, y, "lavp-l2", start="near", steps=2, noise_std=1e-3, **PIXEL_SCALE
    )


def _attacked_from_a_start(at: nn.Module, x: Tensor, y: Tensor, place: Any) -> object:
    return leakwatch.attack(
        at,
        x,
        y,
        "lavp-l2",
        start=Start.near(x, 0.1),
        perturb=lambda g: place(0.9 * g.cpu()),
        steps=2,
        **PIXEL_SCALE,
    )


def _attributed(at: nn.Module, x: Tensor, y: Tensor, place: Any) -> object:
    return leakwatch.layer_attribution(at, x, y)


CALLS = [
    _scored,
    _scored_with_a_delta,
    _attacked,
    _attacked_from_a_start,
    _attributed,
]


def _name(call: Call) -> str:
    return call.__name__.strip("_")


@pytest.mark.parametrize("call", CALLS, ids=_name)
def test_samples_are_moved_before_the_network_meets_them(call: Call) -> None:
    x, y = elsewhere(*samples(2))
    call(net().double(), x, y, lambda t: elsewhere(t)[0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("call", CALLS, ids=_name)
def test_samples_on_the_cpu_and_a_network_on_any_device(
    call: Call, device: str
) -> None:
    x, y = samples(2)
    call(net().to(device), x.float(), y, lambda t: t)


@pytest.mark.parametrize("scale", [{}, PIXEL_SCALE], ids=["pixels", "normalised"])
def test_originals_on_another_device_than_reconstructions(scale: Any) -> None:
    x = torch.rand(2, *SHAPE)
    if scale:
        x = (x - 0.4) / 0.25
    measured = quality(x, elsewhere(x.clone())[0], metrics=["mse"], **scale)
    assert measured["mse"].tolist() == [0.0, 0.0]


def test_what_is_elsewhere_meets_nothing_before_it_is_moved() -> None:
    x = elsewhere(torch.ones(2, 3))[0]
    with pytest.raises(RuntimeError, match="linear got tensors of two devices"):
        nn.Linear(3, 3)(x)
    assert isinstance(x.double().detach(), Elsewhere)
    assert not isinstance(x.detach().to(torch.device("cpu")), Elsewhere)
