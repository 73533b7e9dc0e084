"""Products of layers for many attacks, against autograd on one after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leakwatch.derivatives import GradientMap
from leakwatch.derivatives.layers.modules import known_layers
from leakwatch.derivatives.layers.products import LayerProducts, Layout
from leakwatch.derivatives.runtime import evaluating
from leakwatch.derivatives.safe_ops.pointwise import Lean

CLOSE = {"rtol": 1e-10, "atol": 1e-12}

CONVOLUTIONS: dict[str, tuple[dict[str, Any], int, tuple[int, int]]] = {
    # Channels, kernels, samples of an attack, size of an image.
    "one channel": ({"in_channels": 1, "kernel_size": 3, "padding": 1}, 3, (7, 6)),
    "colours": (
        {"in_channels": 3, "kernel_size": 5, "stride": 2, "padding": (2, 1)},
        2,
        (9, 8),
    ),
    "one, stretched": (
        {"in_channels": 2, "kernel_size": (2, 3), "dilation": (2, 1), "stride": (1, 3)},
        2,
        (8, 9),
    ),
    "a few channels": ({"in_channels": 6, "kernel_size": 5}, 2, (9, 9)),
    "few samples": ({"in_channels": 8, "kernel_size": 3, "padding": 1}, 2, (6, 6)),
    "many samples": ({"in_channels": 16, "kernel_size": 3, "padding": 1}, 11, (12, 12)),
    "groups": ({"in_channels": 8, "kernel_size": 3, "groups": 4}, 2, (6, 6)),
}


def products_of(module: nn.Module, layout: Layout | None) -> LayerProducts:
    gradients = GradientMap(nn.Sequential(module), dtype=torch.float64)
    loss = gradients.loss_under(gradients.criterion)
    with evaluating(loss, "cpu", torch.float64, substitutes=False) as at:
        (layer,) = known_layers(loss, at, layout)
    return layer.rule.products


@pytest.mark.parametrize("rule", [None, "contiguous", "channels_last"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(
    name: str, layout: torch.memory_format, rule: Layout | None
) -> None:
    how, samples, size = CONVOLUTIONS[name]
    torch.manual_seed(0)
    module = nn.Conv2d(out_channels=8, **how).double()
    op = products_of(module, rule)
    attacks = 3
    a = torch.randn(attacks * samples, module.in_channels, *size, dtype=torch.float64)
    a = a.contiguous(memory_format=layout)
    w = torch.randn(attacks, *module.weight.shape, dtype=torch.float64)
    b = torch.randn(attacks, 8, dtype=torch.float64)
    leaves = [t.clone().requires_grad_() for t in (a, w, b)]
    parts = zip(leaves[0].chunk(attacks), leaves[1], leaves[2], strict=True)
    how = {k: v for k, v in how.items() if k not in ("in_channels", "kernel_size")}
    expected = torch.cat([F.conv2d(ai, wi, bi, **how) for ai, wi, bi in parts])
    delta = torch.randn_like(expected).contiguous(memory_format=layout)
    image, weight, bias = torch.autograd.grad(expected, leaves, delta)

    rows, kept = op.inputs(a, attacks), op.arrange(w.flatten(1))
    d = op.backprops(delta, attacks)
    torch.testing.assert_close(op.output_adjoint(kept, b, rows, a), expected, **CLOSE)
    without = expected - b.repeat_interleave(samples, 0)[:, :, None, None]
    torch.testing.assert_close(op.output_adjoint(kept, None, rows, a), without, **CLOSE)
    torch.testing.assert_close(op.input_adjoint(kept, d, a), image, **CLOSE)
    found = op.restore(op.weight_grad(rows, d))
    torch.testing.assert_close(found, weight.flatten(1), **CLOSE)
    torch.testing.assert_close(op.bias_grad(d), bias, **CLOSE)
    by_attack = (weight * w).flatten(1).sum(1)
    along = op.along(kept, None, rows, d, a)
    torch.testing.assert_close(along, by_attack, **CLOSE)
    along = op.along(kept, b, rows, d, a)
    torch.testing.assert_close(along, by_attack + (bias * b).sum(1), **CLOSE)


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
