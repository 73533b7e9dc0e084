from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from leakwatch.models import (
    LeNet,
    ResNet8,
    Scheme,
    initialize,
    register_scheme,
    registered_schemes,
)
from leakwatch.models import initialization as initialization_module

RANDOM = ("uniform", "normal", "kaiming", "xavier", "orthogonal", "pytorch")


def layer() -> nn.Conv2d:
    return nn.Conv2d(16, 64, 5)  # fan-in 400, fan-out 1600, 25,600 weights


def values(module: nn.Module) -> list[Tensor]:
    return [v.clone() for v in module.state_dict().values()]


def test_names() -> None:
    assert registered_schemes() == (
        "default",
        "kaiming",
        "normal",
        "orthogonal",
        "pytorch",
        "uniform",
        "xavier",
    )


@pytest.mark.parametrize(
    ("scheme", "variance", "bound"),
    [
        ("uniform", 1 / 12, 0.5),
        ("normal", 0.5, math.inf),
        ("kaiming", 2 / 400, math.inf),
        ("xavier", 2 / 2000, math.sqrt(6 / 2000)),
    ],
)
def test_weight_moments(scheme: str, variance: float, bound: float) -> None:
    weight = initialize(layer(), scheme, seed=1).weight
    scale = math.sqrt(variance / weight.numel())
    assert abs(weight.mean().item()) < 4 * scale
    torch.testing.assert_close(
        weight.var(), torch.tensor(variance), rtol=0.04, atol=0.0
    )
    assert weight.abs().max() <= bound
    if bound < math.inf:
        assert weight.abs().max() > 0.99 * bound


@pytest.mark.parametrize(("scheme", "variance"), [("uniform", 1 / 12), ("normal", 0.5)])
def test_biases_follow_the_weights(scheme: str, variance: float) -> None:
    bias = initialize(nn.Linear(1, 20_000), scheme, seed=1).bias
    torch.testing.assert_close(bias.var(), torch.tensor(variance), rtol=0.05, atol=0.0)


@pytest.mark.parametrize("scheme", ["kaiming", "xavier", "orthogonal"])
def test_biases_are_zero(scheme: str) -> None:
    assert initialize(layer(), scheme, seed=1).bias.count_nonzero() == 0


@pytest.mark.parametrize("scheme", RANDOM)
def test_seed_decides_and_the_global_generator_rests(scheme: str) -> None:
    first, second = LeNet(), LeNet()
    state = torch.get_rng_state()
    initialize(first, scheme, seed=7)
    torch.rand(3)
    initialize(second, scheme, seed=7)
    torch.set_rng_state(state)
    assert all(map(torch.equal, values(first), values(second)))
    initialize(second, scheme, seed=8)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(first.fc.weight, second.fc.weight)


def test_without_a_seed_the_global_generator_decides() -> None:
    torch.manual_seed(5)
    first = initialize(LeNet(), "uniform")
    torch.manual_seed(5)
    second = initialize(LeNet(), "uniform")
    third = initialize(LeNet(), "uniform")
    assert all(map(torch.equal, values(first), values(second)))
    assert not torch.equal(second.fc.weight, third.fc.weight)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_values_do_not_depend_on_the_dtype(dtype: torch.dtype) -> None:
    single = initialize(layer(), "xavier", seed=3).weight
    other = initialize(layer().to(dtype), "xavier", seed=3).weight
    assert other.dtype == dtype
    assert torch.equal(other, single.to(dtype))


@pytest.mark.parametrize("scheme", RANDOM)
def test_normalisation_layers_are_left_alone(scheme: str) -> None:
    net = ResNet8()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.weight.fill_(1.5)
                module.bias.fill_(-0.5)
    initialize(net, scheme, seed=0)
    norms = [m for m in net.modules() if isinstance(m, nn.BatchNorm2d)]
    assert len(norms) == 9
    assert all((m.weight == 1.5).all() and (m.bias == -0.5).all() for m in norms)


def test_default_changes_nothing() -> None:
    net = LeNet()
    before = values(net)
    state = torch.get_rng_state()
    assert initialize(net, "default") is net
    assert all(map(torch.equal, before, values(net)))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "module", [nn.Conv2d(3, 5, 4, groups=1), nn.Linear(7, 3), nn.Conv1d(4, 6, 3)]
)
def test_pytorch_is_what_the_layers_draw_for_themselves(module: nn.Module) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        module.reset_parameters()  # type: ignore[operator]
    own = values(module)
    initialize(module, "uniform", seed=0)
    initialize(module, "pytorch", seed=11)
    for ours, theirs in zip(values(module), own, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)


def test_orthogonal_rows() -> None:
    weight = initialize(nn.Conv2d(3, 8, 5), "orthogonal", seed=2).weight.flatten(1)
    torch.testing.assert_close(weight @ weight.T, torch.eye(8), rtol=0.0, atol=1e-5)


def test_a_function_of_ones_own() -> None:
    def draw(module: nn.Module, generator: torch.Generator | None) -> None:
        for parameter in module.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator))

    first, second = initialize(LeNet(), draw, seed=3), LeNet()
    state = torch.get_rng_state()
    initialize(second, draw, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, values(first), values(second)))
    with pytest.raises(TypeError, match=r"function \(module, generator\).* got 3"):
        initialize(LeNet(), 3)  # type: ignore[arg-type]


def test_requires_grad_is_kept() -> None:
    net = layer()
    net.weight.requires_grad_(False)
    initialize(net, "uniform")
    assert not net.weight.requires_grad
    assert net.bias is not None
    assert net.bias.requires_grad
    assert net.bias.is_leaf


def test_layers_without_bias() -> None:
    net = initialize(nn.Linear(3, 4, bias=False), "uniform", seed=0)
    assert net.bias is None


def test_unknown_scheme_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"'he'; known: default .*kaiming .*xavier"):
        initialize(LeNet(), "he")


def test_nothing_to_initialise() -> None:
    with pytest.raises(ValueError, match="no linear or convolutional layer in ReLU"):
        initialize(nn.ReLU(), "uniform")


@pytest.mark.parametrize(
    "module",
    [parametrizations.weight_norm(nn.Linear(3, 4)), nn.LazyLinear(4)],
    ids=["weight-norm", "lazy"],
)
def test_weights_that_cannot_be_written(module: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"layer '0': .*parametrized or not yet"):
        initialize(nn.Sequential(module), "uniform")


def test_own_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        initialization_module, "_SCHEMES", dict(initialization_module._SCHEMES)
    )
    ones = Scheme(lambda t, g: t.fill_(1.0), lambda t, g: t.fill_(2.0), "ones")
    register_scheme("ones", ones)
    net = initialize(layer(), "ones")
    assert (net.weight == 1).all()
    assert (net.bias == 2).all()
    with pytest.raises(ValueError, match="'ones' is already registered"):
        register_scheme("ones", ones)
