from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import CLASSES, relative
from torch import Tensor, nn

from leakwatch.derivatives import GradientMap

X = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(2, 6).sin()
Y = torch.tensor([0, 2])
V = X.flip(1)


class Keeping(nn.Module):
    """Reads a table of biases through a cache, in eval mode, in one of three ways."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 4), nn.Linear(4, CLASSES)
        self.table = nn.Parameter(torch.randn(3))
        self.register_buffer("index", torch.tensor([0, 1, 1, 2]))
        self.kind = kind
        self.tables: dict[str, Tensor] = {}
        self.kept: Tensor | None = None
        self.constants = {"half": torch.tensor(0.5, dtype=torch.float64)}
        self.offset = torch.tensor(0.25, dtype=torch.float64)
        self.unused = None

    def biases(self, device: str) -> Tensor:
        fresh = self.table[self.index]
        if self.training or self.kind == "none":
            return fresh
        if self.kind == "dict":
            if device not in self.tables:
                self.tables[device] = fresh
            return self.tables[device]
        if self.kept is None:
            self.kept = fresh
        return self.kept

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) + self.biases(str(x.device)) * self.constants["half"]
        return self.b((h + self.offset).tanh())


@pytest.mark.parametrize("path", ["vmap", "loop"])
@pytest.mark.parametrize("validated", [False, True])
@pytest.mark.parametrize("kind", ["dict", "attribute"])
def test_caches_of_weights_are_formed_anew(
    kind: str, validated: bool, path: Any
) -> None:
    net = Keeping(kind).eval()
    if validated:  # before an optimiser's step, so that what is kept is old
        with torch.no_grad():
            net(X.float())
            net.table += 1
    kept, tables = net.kept, dict(net.tables)
    plain = Keeping("none").eval()
    plain.load_state_dict(net.state_dict())
    ours = GradientMap(net, dtype=torch.float64, path=path)
    exact = GradientMap(plain, dtype=torch.float64)
    assert relative(ours(X, Y), exact(X, Y)) < 1e-14
    assert relative(ours.jvp(X, Y, V), exact.jvp(X, Y, V)) < 1e-13
    assert ours.notes == ()
    single = ours.in_dtype(torch.float32)
    assert relative(single(X, Y).double(), exact(X, Y)) < 1e-5
    assert net.kept is kept
    assert net.tables.keys() == tables.keys()
    assert all(net.tables[key] is tables[key] for key in tables)


def test_a_state_that_depends_on_the_input_is_no_cache() -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a = nn.Linear(6, CLASSES)
            self.mean: Tensor | None = torch.full((6,), 0.5, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            if self.mean is None:
                self.mean = x.detach().mean(0)
            return self.a((x - self.mean).square())

    net = Centred()
    g = GradientMap(net, dtype=torch.float64)(X, Y)
    weight = net.a.weight.detach().double()
    for i in range(2):
        h = (X[i] - 0.5).square()
        probabilities = (weight @ h + net.a.bias.detach()).softmax(0)
        probabilities[Y[i]] -= 1
        exact = torch.cat([torch.outer(probabilities, h).reshape(-1), probabilities])
        assert relative(g[i], exact) < 1e-12
