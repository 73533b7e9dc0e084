"""Generators that a module holds are found wherever they are held, and put back."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from leakwatch.derivatives.runtime.own_streams import OwnStreams, own_streams_kept

OF_THIS_FILE = np.random.default_rng(7)


class Slotted:
    __slots__ = ("stream",)

    def __init__(self, stream: Any) -> None:
        self.stream = stream


class OfItsClass(nn.Linear):
    stream = random.Random(3)


def torch_stream() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def draw(stream: Any) -> float:
    if isinstance(stream, torch.Generator):
        return float(torch.rand((), generator=stream))
    return float(stream.random())


HOLDERS: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda s: s,
    "list": lambda s: [1, [s]],
    "dict": lambda s: {"a": {"b": s}},
    "object": lambda s: SimpleNamespace(inner=SimpleNamespace(stream=s)),
    "slot": Slotted,
    "method": lambda s: getattr(s, "random", s),
    "closure": lambda s: lambda: draw(s),
    "partial": lambda s: functools.partial(draw, s),
}


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize(
    "make",
    [
        torch_stream,
        lambda: np.random.default_rng(5),
        lambda: np.random.RandomState(5),
        lambda: random.Random(5),
    ],
)
def test_streams_are_put_back(holder: str, make: Callable[[], Any]) -> None:
    stream, expected = make(), [draw(s) for s in [make()] for _ in range(2)]
    net = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    net[1].held = HOLDERS[holder](stream)
    assert draw(stream) == expected[0]
    with own_streams_kept(net) as own:
        before = own.states()
        seen = [draw(stream) for _ in range(3)]
        assert own.states() != before
        own.seed(1)
        first = draw(stream)
        own.seed(1)
        assert draw(stream) == first
    assert seen[0] == expected[1]
    assert draw(stream) == expected[1]


def test_streams_of_classes_and_files_are_put_back() -> None:
    states = OfItsClass.stream.getstate(), OF_THIS_FILE.bit_generator.state
    with own_streams_kept(OfItsClass(1, 1)):
        draw(OfItsClass.stream)
        draw(OF_THIS_FILE)
    assert OfItsClass.stream.getstate() == states[0]
    assert OF_THIS_FILE.bit_generator.state == states[1]


def test_iterators_are_named_and_data_is_not_read() -> None:
    net = nn.Linear(1, 1)
    assert OwnStreams(net).iterators == []
    net.numbers = itertools.count()
    net.squares = (i**2 for i in range(3))
    net.data = [random.Random(i) for i in range(2000)]
    own = OwnStreams(net)
    assert own.iterators == ["numbers", "squares"]
    assert own.found == []


@pytest.mark.parametrize(("package", "ours"), [("leakwatch.x", True), ("mine", False)])
def test_noise_of_our_own_is_not_drawn_twice(package: str, ours: bool) -> None:
    """A defense hooks into the module, and draws while that is watched."""

    class Hooked:
        def __init__(self) -> None:
            self.draws = torch.Generator()

        def hook(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
            pass

    Hooked.__module__ = package
    net, hooked = nn.Linear(1, 1), Hooked()
    net.register_forward_hook(hooked.hook)
    found = any(stream is hooked.draws for stream in OwnStreams(net).found)
    assert found != ours
