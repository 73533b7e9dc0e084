from __future__ import annotations

import logging

import pytest
import torch
from cases import CASES, dense_jacobian, mlp, relative
from torch import Tensor, nn

from leakwatch.gradients import GradientMap
from leakwatch.gram import columns_stored, gram

BY_NAME = {case.name: case for case in CASES}

# Every case is compared with the dense Jacobian in test_gradients; here is what only
# the layer-by-layer form can get wrong.


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        # out·in + bias is replaced by out + in: 7·36+7, 5·7+5, 3·5
        ("mlp", (7 + 36) + (5 + 7) + (3 + 5)),
        ("lenet", 30 + 112 + (36 + 3)),
        # Both factors of a also serve nothing else.
        ("frozen", 6 * 3),
        ("unused", 6 * 36 + 6 + (6 + 3)),
        ("one-dimensional", 5 + 3),
        ("tied", 36 * 36 + 36 + 36 + (36 + 3)),
        ("linear-twice", (36 + 6) + (6 * 6 + 6) + (6 + 3)),
        ("subclass", 36 * 6 + 6 + (6 + 3)),
        ("tokens", 36 * 6 + 6 + 6 * 3 + 3),
        ("pruned", 36 * 6 + 6 + (6 + 3)),
        ("old-spectral-norm", 36 * 6 + 6 + (6 + 3)),
        ("custom-new", 36 * 6 + 6 + 6 * 3 + 3),
        ("lstm", None),
        ("no-linear", None),
    ],
)
def test_which_layers_are_taken_apart(name: str, stored: int | None) -> None:
    case = BY_NAME[name]
    x, y = case.data(1)
    at = GradientMap(case.module(), dtype=torch.float64)
    assert columns_stored(at, x[0], y[0]) == (at.size if stored is None else stored)


def test_a_weight_read_outside_its_layer(caplog: pytest.LogCaptureFixture) -> None:
    case = BY_NAME["read-outside"]
    x, y = case.data(2)
    at = GradientMap(case.module(), dtype=torch.float64)
    at(x, y)
    assert columns_stored(at, x[0], y[0]) < at.size
    with caplog.at_level(logging.WARNING, "leakwatch"):
        for i in range(2):
            _, jacobian = dense_jacobian(case.reference(), x[i], y[i])
            assert relative(gram(at, x[i], y[i]).h, jacobian.T @ jacobian) < 1e-10
    assert caplog.text.count("read outside of its layer") == 1
    assert columns_stored(at, x[0], y[0]) == at.size


def test_a_network_that_is_blind_to_constants() -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: Tensor) -> Tensor:
            x = x - x.mean((1, 2, 3), keepdim=True)
            return self.net(x) + self.net[1].weight[:3, 0] * x[:, 0, 0, :3]

    x, y = BY_NAME["mlp"].data(1)
    module = Centred()
    at = GradientMap(module, dtype=torch.float64)
    found = gram(at, x[0], y[0]).h
    _, jacobian = dense_jacobian(module.double().eval(), x[0], y[0])
    assert relative(found, jacobian.T @ jacobian) < 1e-10


@pytest.mark.parametrize("name", ["mlp", "lenet", "lstm"])
def test_weight_and_input_scale(name: str) -> None:
    case = BY_NAME[name]
    x, y = case.data(1)
    at = GradientMap(case.module(), dtype=torch.float64)
    scale = torch.linspace(0.5, 3.0, 36, dtype=torch.float64)
    plain = gram(at, x[0], y[0])
    found = gram(at, x[0], y[0], weight=torch.tensor(0.25), input_scale=scale)
    torch.testing.assert_close(found.h, plain.h * torch.outer(scale, scale) / 16)
    torch.testing.assert_close(found.along, plain.along * scale / 4)
    assert found.norm == pytest.approx(plain.norm / 4, rel=1e-12)


@pytest.mark.parametrize("name", ["mlp", "attention", "batchnorm"])
def test_float32_tangents_and_float64_products(name: str) -> None:
    case = BY_NAME[name]
    x, y = case.data(1)
    found = gram(GradientMap(case.module()), x[0].float(), y[0])
    _, jacobian = dense_jacobian(case.reference(), x[0], y[0])
    assert found.h.dtype == found.along.dtype == torch.float64
    assert torch.equal(found.h, found.h.T)
    assert relative(found.h, jacobian.T @ jacobian) < 1e-5


def test_a_gradient_of_zero() -> None:
    module = mlp()
    nn.init.zeros_(module[5].weight)
    at = GradientMap(module, lambda m, x, y: m(x).square().sum(1))
    x, y = BY_NAME["mlp"].data(1, torch.float32)
    found = gram(at, x[0], y[0])
    assert found.norm == 0
    assert not bool(found.h.any())
    assert not bool(found.along.any())
