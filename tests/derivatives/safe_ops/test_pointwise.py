"""Activations and pools with leaner derivatives, against Torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leakwatch.derivatives.safe_ops.pointwise import Lean

CLOSE = {"rtol": 1e-10, "atol": 1e-12}

POOLS: dict[str, dict[str, Any]] = {
    "halves": {"kernel_size": 2},
    "thirds": {"kernel_size": 3},
    "with a border": {"kernel_size": 2, "stride": 2, "padding": 1},
    "a border that doesn't count": {
        "kernel_size": 2,
        "padding": 1,
        "count_include_pad": False,
    },
    "overlapping": {"kernel_size": (3, 2), "stride": (2, 1)},
    "rounded up": {"kernel_size": 2, "ceil_mode": True},
    "with a divisor": {"kernel_size": 2, "divisor_override": 3},
}


def second_derivatives(forward: Any, x: Tensor, c: Tensor, u: Tensor) -> list[Tensor]:
    """Value, ∂⟨c, f⟩ and ∂⟨u, ∂⟨c(x), f⟩⟩, where c depends on f."""
    x = x.clone().requires_grad_()
    out = forward(x)
    (first,) = torch.autograd.grad((c * out.sin()).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad((u * first).sum(), x)
    return [out.detach(), first.detach(), second]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("size", [(12, 12), (7, 9)])
@pytest.mark.parametrize("name", POOLS)
def test_pools_have_torch_s_derivatives(
    name: str, size: tuple[int, int], layout: torch.memory_format
) -> None:
    torch.manual_seed(0)
    x, u = torch.randn(2, 2, 3, *size, dtype=torch.float64)
    x = x.contiguous(memory_format=layout)
    pool = nn.AvgPool2d(**POOLS[name])
    c = torch.randn_like(pool(x)).contiguous()

    def lean(t: Tensor) -> Tensor:
        with Lean():
            out: Tensor = pool(t)
        return out

    assert type(lean(x.requires_grad_()).grad_fn).__name__ == "_PooledBackward"
    x = x.detach()
    found = second_derivatives(lean, x, c, u)
    for a, b in zip(found, second_derivatives(pool, x, c, u), strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


@pytest.mark.parametrize(
    "forward",
    [
        torch.relu,
        Tensor.relu,
        F.relu,
        nn.ReLU(),
    ],
)
def test_relus_have_torch_s_derivatives(forward: Any) -> None:
    torch.manual_seed(0)
    x, c, u = torch.randn(3, 2, 3, 4, 5, dtype=torch.float64)
    x[0, 0] = 0.0  # a kink

    def lean(t: Tensor) -> Tensor:
        with Lean():
            out: Tensor = forward(t)
        return out

    assert type(lean(x.requires_grad_()).grad_fn).__name__ == "_ReluBackward"
    x = x.detach()
    # The derivative arrives in another memory format.
    c = c.contiguous(memory_format=torch.channels_last)
    found = second_derivatives(lean, x, c, u)
    expected = second_derivatives(forward, x, c, u)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


def test_a_relu_that_writes_in_place_still_does() -> None:
    x = torch.randn(5)
    with Lean():
        out = F.relu(x, inplace=True)
    assert out is x
    assert float(x.min()) >= 0


def test_a_single_image_is_pooled_as_before() -> None:
    x = torch.rand(3, 4, 4, requires_grad=True)
    with Lean():
        found = F.avg_pool2d(x, 2)
    torch.testing.assert_close(found, F.avg_pool2d(x, 2), rtol=0, atol=0)
