from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from cases import CASES, dense_jacobian, mlp, relative
from torch import Tensor, nn

from leakwatch import GradientJacobian
from leakwatch.derivatives import GradientMap
from leakwatch.derivatives.gram.conv_factors import Workspace
from leakwatch.derivatives.gram.forms import Isometric
from leakwatch.derivatives.gram.gram import columns_stored, gram
from leakwatch.derivatives.gram.tangents import Taps
from leakwatch.derivatives.layers import taps as layers

BY_NAME = {case.name: case for case in CASES}

# Every case is compared with the dense Jacobian in test_gradients; here is what only
# the layer-by-layer form can get wrong.


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        # out·in + bias is replaced by out + in + 1
        ("mlp", (7 + 37) + (5 + 8) + (3 + 5)),
        # Of two tokens: twice 6 + 36 + 1; of the other layer, Ġ takes as little.
        ("tokens", 2 * (6 + 37) + 3 * 6 + 3),
        # Where Δ is known to have rank 3, what comes in and at most one more for it.
        ("mlp-relu", (36 + 4) + (7 + 4) + (5 + 4)),
        # Nothing is between the only layer that is shared and itself.
        ("frozen", 6 + 4),
        # What is not called at all, is not taken apart.
        ("unused", 6 * 36 + 6 + (3 + 7)),
        ("one-dimensional", 3 + 6),
        # Two calls with one weight are two tokens; the second bias is beside it.
        ("tied", 2 * (36 + 36) + 36 + 36 + (3 + 37)),
        ("linear-twice", (6 + 37) + (6 * 2 + 2 * 7) + (3 + 7)),
        ("subclass", 36 * 6 + 6 + (3 + 7)),
        ("pruned", 36 * 6 + 6 + (3 + 7)),
        ("old-spectral-norm", 36 * 6 + 6 + (3 + 7)),
        ("nested-functorch", 36 * 6 + 6 + (3 + 7)),
        ("read-outside", 36 * 6 + 6 + (3 + 7)),
        ("parameter-as-buffer", 36 * 6 + 6 + (3 + 7)),
        ("custom-new", None),
        ("lstm", None),
    ],
)
def test_which_layers_are_taken_apart(name: str, stored: int | None) -> None:
    case = BY_NAME[name]
    x, y = case.data(1)
    at = GradientMap(case.module(), dtype=torch.float64)
    assert columns_stored(at, x[0], y[0]) == (at.size if stored is None else stored)


def test_a_layer_that_does_not_come_apart_as_expected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = BY_NAME["read-outside"]
    x, y = case.data(2)
    seen = layers._Reading._note

    def half_blind(self: Any, use: Any, found: Any, out: Any) -> None:
        if use is not None:
            seen(self, use, found, out)

    monkeypatch.setattr(layers._Reading, "_note", half_blind)
    at = GradientMap(case.module(), dtype=torch.float64)
    for i in range(2):
        _, jacobian = dense_jacobian(case.reference(), x[i], y[i])
        assert relative(gram(at, x[i], y[i]).h, jacobian.T @ jacobian) < 1e-10
    assert at.formed == {"module.a.weight"}
    assert not at.notes
    assert columns_stored(at, x[0], y[0]) == 36 * 6 + 6 + (3 + 7)


def test_sums_that_disagree_are_not_returned(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = BY_NAME["mlp"]
    x, y = case.data(1)
    at = GradientMap(case.module(), dtype=torch.float64)
    at(x, y)
    right = Isometric.of_inputs
    monkeypatch.setattr(Isometric, "of_inputs", lambda *args: right(*args) * 1.01)
    _, jacobian = dense_jacobian(case.reference(), x[0], y[0])
    with caplog.at_level(logging.WARNING, "leakwatch"):
        for _ in range(2):
            assert relative(gram(at, x[0], y[0]).h, jacobian.T @ jacobian) < 1e-10
    assert caplog.text.count("the whole Jacobian is formed") == 1
    assert columns_stored(at, x[0], y[0]) == at.size


class TwoHeads(nn.Module):
    """Piecewise linear up to its last layer, which is not the only way to the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(36, 6), nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.a(x.flatten(1)))
        return self.b(h).exp() + self.c(h)


def test_a_loss_that_does_not_pass_the_last_layer_alone() -> None:
    x, y = BY_NAME["mlp"].data(1)
    module = TwoHeads().double()
    at = GradientMap(module, dtype=torch.float64)
    space = Workspace()
    found = gram(at, x[0], y[0], workspace=space)
    _, jacobian = dense_jacobian(module, x[0], y[0])
    assert relative(found.h, jacobian.T @ jacobian) < 1e-13
    assert space.trusted
    assert not at.formed
    assert columns_stored(at, x[0], y[0]) == (6 + 37) + 2 * (3 + 7)


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


def wide_net() -> nn.Module:
    """Its second convolution has 72 weights per filter and four output positions."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=3),
        nn.Sigmoid(),
        nn.Conv2d(8, 9, 2, padding=0, stride=1),
        nn.Sigmoid(),
        nn.Flatten(),
        nn.Linear(9, 3),
    )


def test_the_cheaper_way_is_chosen() -> None:
    at = GradientMap(wide_net(), dtype=torch.float64)
    x, y = torch.rand(1, 6, 6), torch.tensor(0)
    # The first convolution as it is, of the second δ and a, of a linear layer δ, a, 1.
    assert columns_stored(at, x, y) == 80 + (9 + 32) + (3 + 10)


def test_the_smallest_eigenvalue_of_float32_tangents() -> None:
    torch.manual_seed(3)
    x, y = torch.rand(1, 6, 6), torch.tensor(2)
    found = gram(GradientMap(wide_net()), x, y)
    _, jacobian = dense_jacobian(wide_net().double(), x.double(), y)
    truth = torch.linalg.svdvals(jacobian).square()
    torch.testing.assert_close(
        torch.linalg.eigvalsh(found.h).flip(0), truth, rtol=1e-4, atol=0
    )


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each comparison with plain derivatives."""
    calls: list[int] = []
    plain = Taps.plain

    def seen(taps: Taps, v: Tensor) -> Any:
        calls.append(1)
        return plain(taps, v)

    monkeypatch.setattr(Taps, "plain", seen)
    return calls


def test_only_the_first_sample_is_compared_with_plain_derivatives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = BY_NAME["lenet"]
    x, y = case.data(2, torch.float32)
    at = GradientMap(case.module())
    jacobian = GradientJacobian(at, x, y)
    calls = counted(monkeypatch)
    first = jacobian.gram(0).h.clone()
    again = [jacobian.gram(i).h for i in (1, 0)]
    assert len(calls) == 1
    # Nothing of one sample is left in the memory that the next one uses.
    assert torch.equal(again[1], first)
    assert not torch.equal(again[0], first)


def test_a_sample_on_which_the_norm_disagrees_is_compared_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = BY_NAME["mlp"]
    x, y = case.data(1)
    at = GradientMap(case.module(), dtype=torch.float64)
    space = Workspace()
    right = gram(at, x[0], y[0], workspace=space)
    assert space.trusted
    calls = counted(monkeypatch)
    gram(at, x[0], y[0], norm=right.norm, workspace=space)
    assert not calls
    gram(at, x[0], y[0], norm=2 * right.norm, workspace=space)
    assert calls


def test_a_vanishing_gradient_earns_no_trust() -> None:
    module = mlp()
    nn.init.zeros_(module[5].weight)
    at = GradientMap(module, lambda m, x, y: m(x).square().sum(1))
    x, y = BY_NAME["mlp"].data(1, torch.float32)
    space = Workspace()
    gram(at, x[0], y[0], workspace=space)
    assert not space.trusted
