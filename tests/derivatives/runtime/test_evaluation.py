from __future__ import annotations

import copy
import functools
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from cases import CASES, Case, lenet, mlp, relative
from torch import Tensor, nn
from torch.nn import functional as F

import leakwatch
from leakwatch.derivatives import GradientMap, UnsupportedModuleError, underlying
from leakwatch.derivatives.gram.gram import gram

BY_NAME = {case.name: case for case in CASES}


def snapshot(module: nn.Module) -> dict[str, Any]:
    """Everything that could have been touched, by identity and by value."""
    state: dict[str, Any] = {}
    for name, m in module.named_modules(remove_duplicate=False):
        for key, value in vars(m).items():
            if isinstance(value, dict):
                # The entries too: their order decides in which order hooks run.
                entries = [(k, id(v)) for k, v in value.items()]
                state[f"{name}.{key}"] = (id(value), entries)
            elif isinstance(value, list):
                state[f"{name}.{key}"] = (id(value), [id(v) for v in value])
            else:
                state[f"{name}.{key}"] = (id(value), None)
    for name, p in module.named_parameters():
        state[f"{name} parameter"] = (p.requires_grad, p.grad, p._version, p.dtype)
    return state


def values(module: nn.Module) -> dict[str, Tensor]:
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, m in module.named_modules():
        for key, value in vars(m).items():
            if isinstance(value, Tensor):
                tensors[f"{name}.{key}"] = value
    return {k: t.detach().clone() for k, t in tensors.items()}


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_the_live_module_is_untouched(case: Case) -> None:
    module = case.module()
    x, y = case.data(2, torch.float32)
    for m in list(module.modules())[::2]:
        m.training = False
    first = next(p for p in module.parameters() if p.requires_grad)
    first.grad = torch.ones_like(first)
    before, tensors = snapshot(module), values(module)
    streams = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    kept_x, kept_y = x.clone(), y.clone()

    at = GradientMap(module)
    u = at(x, y)
    at.jvp(x, y, x.reshape(2, -1))
    at.vjp(x, y, u)
    at.losses(x, y)
    gram(at, x[0], y[0])
    at.check(x, y)

    assert snapshot(module) == before
    after = values(module)
    assert after.keys() == tensors.keys()
    for name, t in tensors.items():
        torch.testing.assert_close(after[name], t, rtol=0, atol=0)
    assert torch.equal(x, kept_x)
    assert torch.equal(y, kept_y)
    assert torch.equal(torch.get_rng_state(), streams[0])
    assert random.getstate() == streams[1]
    assert np.array_equal(np.random.get_state()[1], streams[2])


@pytest.mark.parametrize("path", ["auto", "loop"])
def test_untouched_after_an_error(path: Any) -> None:
    module = lenet()
    module[3].register_forward_hook(lambda m, args, out: out.nonsense)
    x, y = BY_NAME["lenet"].data(2, torch.float32)
    before = snapshot(module)
    with pytest.raises(AttributeError, match="nonsense"):
        GradientMap(module, path=path)(x, y)
    assert snapshot(module) == before


def test_a_draw_that_does_not_matter_does_not_move_the_stream() -> None:
    module = nn.Sequential(mlp())
    module.register_forward_pre_hook(lambda m, args: (args[0] + 0 * torch.rand(1),))
    x, y = BY_NAME["mlp"].data(2)
    state = torch.get_rng_state()
    at = GradientMap(module, dtype=torch.float64)
    expected = GradientMap(module[0], dtype=torch.float64)(x, y)
    torch.testing.assert_close(at(x, y), expected)
    assert torch.equal(torch.get_rng_state(), state)


class Tracker:
    """A forward hook as an experiment tracker registers them."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, module: nn.Module, args: Any, out: Any) -> None:
        self.calls += 1


def test_trackers_are_set_aside_and_come_back_in_order() -> None:
    tracker = Tracker()

    def function(module: nn.Module, args: Any, out: Any) -> None:
        tracker(module, args, out)

    function.__module__ = "wandb.integration.torch"
    order: list[str] = []
    module = mlp()
    layer = module[1]
    layer.register_forward_hook(lambda m, a, out: order.append("first"))
    layer.register_forward_hook(function)
    layer.register_forward_hook(lambda m, a, out: order.append("second"))
    layer.register_forward_hook(functools.partial(function))
    layer.register_forward_hook(lambda m, a, out: out * 2)
    keys = list(layer._forward_hooks)
    x, y = BY_NAME["mlp"].data(2, torch.float32)
    g = GradientMap(module)(x, y)
    assert tracker.calls == 0
    assert list(layer._forward_hooks) == keys
    order.clear()
    loss = F.cross_entropy(module(x[:1]), y[:1])
    assert tracker.calls == 2
    assert order == ["first", "second"]
    expected = torch.autograd.grad(loss, list(module.parameters()))
    flat = torch.cat([part.reshape(-1) for part in expected])
    torch.testing.assert_close(g[0], flat)


def test_works_in_any_surroundings() -> None:
    x, y = BY_NAME["attention"].data(2, torch.float32)
    module = BY_NAME["attention"].module()
    expected = GradientMap(module)(x, y)
    with torch.inference_mode():
        inside = x.clone(), y.clone()
        at = GradientMap(module)
        torch.testing.assert_close(at(*inside), expected)
        u = torch.ones_like(expected)
        pulled = at.vjp(*inside, u)
    torch.testing.assert_close(at.vjp(x, y, u), pulled)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(GradientMap(module)(x, y), expected)
        assert torch.is_autocast_enabled("cpu")
    assert not expected.requires_grad


def test_a_criterion_may_use_the_module_by_another_name() -> None:
    x, y = BY_NAME["compiled"].data(2)
    compiled = BY_NAME["compiled"].module()
    at = GradientMap(
        compiled,
        lambda m, x, y: F.cross_entropy(compiled(x), y, reduction="none"),
        dtype=torch.float64,
    )
    expected = GradientMap(BY_NAME["mlp"].module(), dtype=torch.float64)(x, y)
    assert relative(at(x, y), expected) < 1e-12


@pytest.mark.parametrize("aside", ["list", "closure", "criterion"])
def test_a_parameter_read_behind_the_modules_back_is_refused(aside: str) -> None:
    x, y = BY_NAME["mlp"].data(2, torch.float32)
    module = nn.Sequential(mlp())
    weight = module[0][1].weight
    criterion = None
    if aside == "list":
        module.aside = [weight]
        module.register_forward_hook(lambda m, a, out: out + m.aside[0].mean())
    elif aside == "closure":
        module.register_forward_hook(lambda m, a, out: out * weight[:3, 0])
    else:

        def criterion(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            loss = F.cross_entropy(m(x), y, reduction="none")
            return loss + weight.square().sum()

    with pytest.raises(UnsupportedModuleError, match=r"'0\.1\.weight'.*not registered"):
        GradientMap(module, criterion)(x, y)


def test_wrapped_modules() -> None:
    net = mlp()
    assert underlying(net) is net
    assert underlying(nn.DataParallel(net)) is net
    assert underlying(torch.compile(nn.DataParallel(net), backend="eager")) is net


def test_a_module_that_was_copied_gives_the_same() -> None:
    x, y = BY_NAME["old-weight-norm"].data(2)
    module = BY_NAME["old-weight-norm"].module()
    expected = GradientMap(module, dtype=torch.float64)(x, y)
    again = GradientMap(module, dtype=torch.float64)(x, y)
    torch.testing.assert_close(again, expected, rtol=0, atol=0)
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(2)
    assert relative(GradientMap(module, dtype=torch.float64)(x, y), expected) > 0.1


def test_weights_are_read_anew_by_every_product() -> None:
    x, y = BY_NAME["mlp"].data(2)
    module = mlp()
    at = GradientMap(module, dtype=torch.float64)
    at(x, y)
    other = copy.deepcopy(module)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.5)
    module.load_state_dict(other.state_dict())
    torch.testing.assert_close(at(x, y), GradientMap(other, dtype=torch.float64)(x, y))
    size = at.size
    module[1].requires_grad_(False)
    assert at.size == size - 7 * 37
    assert at(x, y).shape == (2, at.size)


def test_threads_with_networks_of_their_own_wait_for_each_other() -> None:
    x, y = torch.rand(2, 4), torch.tensor([0, 1])
    nets = [nn.Sequential(nn.Linear(4, 3), nn.Tanh()) for _ in range(3)]

    def norms(net: nn.Module) -> list[float]:
        scores = leakwatch.score(net, x, y, ["jacobian_norm"])
        return scores["jacobian_norm"].tolist()

    alone = [norms(net) for net in nets]
    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(norms, nets)) == alone
