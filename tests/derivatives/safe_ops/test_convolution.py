from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from leakwatch.derivatives.layers.taps import ConstantConvolutions


def derivatives(net: nn.Module, x: Tensor) -> list[Tensor]:
    """Value, and first to third derivatives along the way, of one number."""
    leaf = x.clone().requires_grad_()
    out = net(leaf)
    found = [out]
    total = out.sin().sum()
    for _ in range(3):
        (slope,) = torch.autograd.grad(total, leaf, create_graph=True)
        found.append(slope)
        total = slope.sin().sum()
    return [t.detach() for t in found]


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv2d(4, 6, 3, stride=2, padding=1), (2, 4, 6, 7)),
        (nn.Conv2d(4, 6, 3, dilation=2, groups=2, bias=False), (1, 4, 6, 7)),
        (nn.Conv2d(4, 4, (2, 4), padding="same", groups=4), (3, 4, 5, 6)),
        (nn.Conv1d(4, 6, 3, stride=2, padding=2), (2, 4, 8)),
    ],
)
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_derivatives_of_constant_weights(
    layer: nn.Module, shape: tuple[int, ...]
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    layer = layer.double().requires_grad_(False)
    expected = derivatives(layer, x)
    with ConstantConvolutions():
        found = derivatives(layer, x)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


def test_weights_that_are_not_constant_keep_their_gradients() -> None:
    layer = nn.Conv2d(2, 3, 3)
    x = torch.ones(1, 2, 4, 4)
    with ConstantConvolutions():
        layer(x).square().sum().backward()
    assert layer.weight.grad is not None
    assert bool(layer.weight.grad.any())
