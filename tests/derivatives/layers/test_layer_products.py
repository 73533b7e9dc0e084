"""Products of layers for many rows, against autograd on one after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leakwatch.attacks.matching.engines import LoopPath
from leakwatch.attacks.matching.layerwise import LayerwisePath
from leakwatch.derivatives import GradientMap
from leakwatch.derivatives.layers.modules import known_layers
from leakwatch.derivatives.layers.products import (
    RULES,
    LayerProducts,
    Layout,
    Rule,
    register,
)
from leakwatch.derivatives.runtime import evaluating

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


class Gain(nn.Module):
    """A layer of one's own."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(features) + 0.5)
        self.bias = nn.Parameter(torch.zeros(features))

    def forward(self, a: Tensor) -> Tensor:
        return a * self.weight + self.bias


class GainProducts(LayerProducts):
    def weight_grad(self, a: Tensor, d: Tensor) -> Tensor:
        return (a * d).sum(1)

    def bias_grad(self, d: Tensor) -> Tensor:
        return d.sum(1)

    def input_adjoint(self, w: Tensor, d: Tensor, like: Tensor) -> Tensor:
        return (d * w[:, None]).view(like.shape)

    def output_adjoint(
        self, w: Tensor, b: Tensor | None, a: Tensor, like: Tensor
    ) -> Tensor:
        out = a * w[:, None]
        return (out if b is None else out + b[:, None]).view(like.shape)


def test_one_rule_serves_attacks_on_gradients_and_on_updates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(RULES, Gain, lambda layer: Rule(GainProducts()))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), Gain(4), nn.Linear(4, 3)).double()
    gradients = GradientMap(net, dtype=torch.float64)
    loss = gradients.loss_under(gradients.criterion)
    x = torch.randn(2, 3, 5, dtype=torch.float64)
    y = torch.randint(3, (2, 3))
    one = torch.ones(2, dtype=torch.float64)
    with evaluating(loss, "cpu", torch.float64, substitutes=False) as at:
        w = torch.cat([p.flatten() for p in at.shared.values()])
        w = w + 0.1 * torch.randn(2, len(w), dtype=torch.float64)
        c, v = torch.randn(2, *w.shape, dtype=torch.float64)
        loop, path = LoopPath(loss, at), LayerwisePath(loss, at, "contiguous")
        graph = path.graph(x, y, one, False)
        each = [loop.graph(x[i : i + 1], y[i : i + 1], one, False) for i in range(2)]
        torch.testing.assert_close(
            path.restore(graph.flat), torch.cat([g.flat for g in each]), **CLOSE
        )
        torch.testing.assert_close(
            graph.pull(path.arrange(c)).images,
            torch.cat([g.pull(c[i : i + 1]).images for i, g in enumerate(each)]),
            **CLOSE,
        )
        graphs = [p.graph_at(w, x, y) for p in (LayerwisePath(loss, at, None), loop)]
        torch.testing.assert_close(graphs[0].flat, graphs[1].flat, **CLOSE)
        ours, theirs = (g.pull(c, along=v, weights=True) for g in graphs)
        torch.testing.assert_close(ours.images, theirs.images, **CLOSE)
        torch.testing.assert_close(ours.weights, theirs.weights, **CLOSE)
        torch.testing.assert_close(ours.slope, theirs.slope, **CLOSE)


def test_a_type_has_one_rule() -> None:
    with pytest.raises(ValueError, match="Linear has a rule already"):
        register(nn.Linear, lambda layer: None)
