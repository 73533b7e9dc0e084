from __future__ import annotations

import logging

import pytest
import torch
from cases import CASES, dense_jacobian, mlp, relative
from torch import Tensor, nn

import leakwatch.gram as gram_module
from leakwatch import factors
from leakwatch.factors import Workspace
from leakwatch.gradients import GradientMap
from leakwatch.gram import columns_stored, gram
from leakwatch.jacobian import GradientJacobian
from leakwatch.layers import Tap

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


def conv_net(bias: bool, **options: object) -> nn.Module:
    """A convolution between two others, so that its input has tangents of its own."""
    torch.manual_seed(0)
    middle = nn.Conv2d(2, 3, bias=bias, **options)  # type: ignore[arg-type]
    net = nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), middle, nn.Sigmoid(), nn.Flatten()
    )
    features = net(torch.zeros(1, 1, 7, 8)).shape[1]
    return nn.Sequential(net, nn.Linear(features, 3)).double()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 3},
        {"kernel_size": 3, "padding": 1},
        {"kernel_size": 3, "stride": 2, "padding": 1},
        {"kernel_size": 2, "stride": 3},
        {"kernel_size": 3, "dilation": 2, "padding": 2},
        {"kernel_size": (2, 4), "stride": (1, 2), "padding": (1, 0)},
        {"kernel_size": (3, 2), "stride": (2, 3), "dilation": (2, 1), "padding": 2},
        {"kernel_size": 1},
        {"kernel_size": (7, 8)},
    ],
    ids=str,
)
@pytest.mark.parametrize("block", [factors._BLOCK, 1])
def test_products_of_a_convolution_from_its_factors(
    bias: bool,
    options: dict[str, object],
    block: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[bool] = []

    def always(tap: Tap, n: int) -> bool:
        asked.append(isinstance(tap.module, nn.Conv2d))
        return True

    monkeypatch.setattr(gram_module, "cheaper_by_factors", always)
    monkeypatch.setattr(factors, "_BLOCK", block)
    net = conv_net(bias, **options)
    torch.manual_seed(1)
    x, y = torch.rand(1, 7, 8, dtype=torch.float64), torch.tensor(1)
    space = Workspace()
    found = gram(GradientMap(net, dtype=torch.float64), x, y, workspace=space)
    g, jacobian = dense_jacobian(net, x, y)
    assert sum(asked) == 2
    assert space.trusted
    assert torch.equal(found.h, found.h.T)
    assert relative(found.h, jacobian.T @ jacobian) < 1e-13
    assert relative(found.along, jacobian.T @ g / g.norm()) < 1e-13
    assert found.norm == pytest.approx(float(g.norm()), rel=1e-13)


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
    # The first convolution as it is, of the second and the linear layer δ and a.
    assert columns_stored(at, x, y) == 80 + (9 + 32) + (3 + 9)


def test_the_smallest_eigenvalue_of_float32_tangents() -> None:
    torch.manual_seed(3)
    x, y = torch.rand(1, 6, 6), torch.tensor(2)
    found = gram(GradientMap(wide_net()), x, y)
    _, jacobian = dense_jacobian(wide_net().double(), x.double(), y)
    truth = torch.linalg.svdvals(jacobian).square()
    torch.testing.assert_close(
        torch.linalg.eigvalsh(found.h).flip(0), truth, rtol=1e-4, atol=0
    )


def test_only_the_first_sample_is_compared_with_plain_derivatives() -> None:
    case = BY_NAME["lenet"]
    x, y = case.data(2, torch.float32)
    at = GradientMap(case.module())
    jacobian = GradientJacobian(at, x, y)
    calls: list[int] = []
    plain = at.jvp

    def counted(*args: Tensor) -> Tensor:
        calls.append(1)
        return plain(*args)

    at.jvp = counted  # type: ignore[method-assign]
    first = jacobian.gram(0).h.clone()
    again = [jacobian.gram(i).h for i in (1, 0)]
    assert len(calls) == 1
    # Nothing of one sample is left in the memory that the next one uses.
    assert torch.equal(again[1], first)
    assert not torch.equal(again[0], first)


def test_a_sample_on_which_the_norm_disagrees_is_compared_again() -> None:
    case = BY_NAME["mlp"]
    x, y = case.data(1)
    at = GradientMap(case.module(), dtype=torch.float64)
    space = Workspace()
    right = gram(at, x[0], y[0], workspace=space)
    assert space.trusted
    calls: list[int] = []
    plain = at.jvp
    at.jvp = lambda *args: calls.append(1) or plain(*args)  # type: ignore[assignment,func-returns-value]
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
