"""A network is examined again when anything in it has changed, and only then."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from leakwatch.derivatives import GradientMap, network
from leakwatch.derivatives.losses import cross_entropy

X, Y = torch.rand(2, 4), torch.tensor([0, 2])


class Scaled(nn.Module):
    """With attributes of several kinds that its forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        self.register_buffer("shift", torch.zeros(3))
        self.factor = 2.0
        self.options = {"power": [1]}
        self.act: Callable[[Tensor], Tensor] = torch.tanh

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.act(self.body(x)) ** self.options["power"][0]
        return out * self.factor + self.shift


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """One entry for each examination."""
    calls: list[object] = []
    examine = network.examine

    def counted(*args: object) -> object:
        calls.append(args)
        return examine(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(network, "examine", counted)
    return calls


def test_the_same_network_is_examined_once(examined: list[object]) -> None:
    net = Scaled()
    first, again = GradientMap(net), GradientMap(net)
    torch.testing.assert_close(first(X, Y), again(X, Y), rtol=0, atol=0)
    assert (first.path, first.notes) == (again.path, again.notes)
    net.train()  # inference is what is examined
    GradientMap(net)(X, Y)
    assert len(examined) == 1


def test_other_uses_are_examined(examined: list[object]) -> None:
    net = Scaled()
    GradientMap(net)(X, Y)
    GradientMap(net, dtype=torch.float64)(X, Y)
    GradientMap(net, path="loop")(X, Y)
    GradientMap(net, parameters="body.0")(X, Y)
    for _ in range(2):  # what a criterion closes over is not seen
        GradientMap(net, lambda m, x, y: cross_entropy(m(x), y))(X, Y)
    assert len(examined) == 6


def _replace(net: Scaled) -> None:
    net.body[0] = nn.Linear(4, 5)


def _hook(net: Scaled) -> None:
    net.body.register_forward_hook(lambda *_: None)


CHANGES: dict[str, Callable[[Scaled], object]] = {
    "weights": lambda net: nn.init.normal_(net.body[0].weight),
    "a buffer": lambda net: net.shift.add_(1),  # type: ignore[operator]
    "a module": _replace,
    "frozen": lambda net: net.body[2].weight.requires_grad_(False),
    "a number": lambda net: setattr(net, "factor", 3.0),
    "in a container": lambda net: net.options["power"].append(2),
    "a function": lambda net: setattr(net, "act", torch.sin),
    "a hook": _hook,
    "a forward": lambda net: setattr(net.body[1], "forward", torch.sin),
    "of its type": lambda net: setattr(net, "__class__", type("B", (Scaled,), {})),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_network_is_examined_again(
    change: str, examined: list[object]
) -> None:
    net = Scaled()
    GradientMap(net)(X, Y)
    with torch.no_grad():
        CHANGES[change](net)
    GradientMap(net)(X, Y)
    assert len(examined) == 2


def test_functions_at_one_address_are_told_apart(examined: list[object]) -> None:
    net = Scaled()
    for i in range(4):
        net.act = lambda x, i=i: x * (i + 1.0)  # type: ignore[misc]
        GradientMap(net)(X, Y)
        net.act = torch.tanh
    assert len(examined) == 4


def test_what_nobody_can_tell_is_examined_each_time(examined: list[object]) -> None:
    net = Scaled()
    net.helper = object()
    GradientMap(net)(X, Y)
    GradientMap(net)(X, Y)
    assert len(examined) == 2


def test_a_network_is_not_kept_alive() -> None:
    net = Scaled()
    GradientMap(net)(X, Y)
    gone = weakref.ref(net)
    del net
    gc.collect()
    assert gone() is None
