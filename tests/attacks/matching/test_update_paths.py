"""Derivatives at weights of one's own, against autograd's double backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leakwatch import score_update
from leakwatch.attacks.matching.selection import UpdatePathName, opened
from leakwatch.derivatives import GradientMap, UnsupportedModuleError
from leakwatch.federated import (
    LocalTraining,
    client_updates,
    segment_similarity,
    train_client,
)
from leakwatch.models import SMELeNet

from ..update_problems import flat, gradient


class Residual(nn.Module):
    """A skip, a layer that is used twice and an operation that writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 8, 3, padding=1, stride=2)
        self.twice = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.relu = nn.ReLU(inplace=True)
        self.norm = nn.GroupNorm(2, 8)
        self.head = nn.Linear(72, 3)

    def forward(self, x: Tensor) -> Tensor:
        a = self.relu(self.first(x))
        a = a + torch.tanh(self.twice(a))
        a = self.norm(self.twice(a))
        return self.head(a.flatten(1))


class Frozen(nn.Module):
    """Trains only some of its weights, and one layer that it never uses."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(72, 6)
        self.norm = nn.LayerNorm(6)
        self.unused = nn.Linear(2, 2)
        self.head = nn.Linear(6, 3)
        self.body.weight.requires_grad_(False)
        self.norm.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.body(x.flatten(1)))))


class Own(nn.Module):
    """A parameter that belongs to no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(72))
        self.head = nn.Linear(72, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.scale * x.flatten(1)))


def batch_normed() -> nn.Module:
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3, dilation=2),
        nn.BatchNorm2d(4),
        nn.Sigmoid(),
        nn.Flatten(),
        nn.Linear(16, 3),
    )
    norm = net[1]
    assert isinstance(norm, nn.BatchNorm2d)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    return net.eval()


NETWORKS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "residual": (Residual, (2, 6, 6)),
    "frozen": (Frozen, (2, 6, 6)),
    "batch norm": (batch_normed, (2, 6, 6)),
    "own": (Own, (2, 6, 6)),
    "lenet": (lambda: SMELeNet(image_size=12, num_classes=3), (1, 12, 12)),
    "tokens": (
        lambda: nn.Sequential(
            nn.Linear(4, 5), nn.GELU(), nn.Flatten(), nn.Linear(15, 3)
        ),
        (3, 4),
    ),
}


def oracle(
    module: nn.Module, w: Tensor, x: Tensor, y: Tensor, c: Tensor, v: Tensor
) -> tuple[Tensor, ...]:
    w, x = w.clone().requires_grad_(), x.clone().requires_grad_()
    g = gradient(module, w, x, y)
    image, weights = torch.autograd.grad(
        g, [x, w], c, allow_unused=True, materialize_grads=True
    )
    return g.detach(), image, weights @ v, weights


@pytest.mark.parametrize("path", ["layers", "plain"])
@pytest.mark.parametrize("name", NETWORKS)
def test_derivatives_are_those_of_double_backward(
    name: str, path: UpdatePathName
) -> None:
    build, shape = NETWORKS[name]
    torch.manual_seed(0)
    net = build().double().eval()
    if name == "own" and path == "layers":
        pytest.skip("has a parameter outside of its layers")
    torch.manual_seed(1)
    w = flat(net) + 0.1 * torch.randn(3, flat(net).numel(), dtype=torch.float64)
    x = torch.rand(3, 4, *shape, dtype=torch.float64)
    y = torch.randint(3, (3, 4))
    c, v = torch.randn(2, *w.shape, dtype=torch.float64)
    before = flat(net)
    with opened(GradientMap(net, dtype=torch.float64), path) as path_for:
        graph = path_for(w, x, y).graph_at(w, x, y)
        g = graph.flat.clone()
        found = graph.pull(c, along=v, weights=True)
    assert found.slope is not None
    assert found.weights is not None
    for i in range(3):
        expected = oracle(net, w[i], x[i], y[i], c[i], v[i])
        ours = g[i], found.images[i], found.slope[i], found.weights[i]
        for a, b in zip(ours, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(flat(net), before, rtol=0, atol=0)
    assert not any("forward" in vars(m) for m in net.modules())


def test_only_what_is_asked_for_is_formed() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3)).double()
    w = flat(net)[None]
    x, y = torch.rand(1, 2, 1, 2, 2, dtype=torch.float64), torch.tensor([[0, 1]])
    for path in ("layers", "plain"):
        with opened(GradientMap(net, dtype=torch.float64), path) as path_for:
            found = path_for(w, x, y).graph_at(w, x, y).pull(torch.ones_like(w))
        assert found.slope is None
        assert found.weights is None


def test_other_networks_are_attacked_one_by_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    net = Own().double()
    w = flat(net).expand(2, -1)
    x, y = torch.rand(2, 3, 2, 6, 6, dtype=torch.float64), torch.ones(2, 3).long()
    gradients = GradientMap(net, dtype=torch.float64)
    with opened(gradients) as path_for:
        assert path_for(w, x, y).name == "loop"
    assert "scale belong to no linear" in caplog.text
    with (
        opened(gradients, "layers") as path_for,
        pytest.raises(UnsupportedModuleError, match="use path='auto'"),
    ):
        path_for(w, x, y)


def penalised(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Moves gradients by far less than two paths may differ in float32."""
    penalty = sum(p.square().sum() for p in module.parameters())
    return F.cross_entropy(module(x), y, reduction="none") + 1e-5 * penalty


def test_a_penalty_in_the_criterion_is_not_forgotten(
    caplog: pytest.LogCaptureFixture,
) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(72, 8), nn.Tanh(), nn.Linear(8, 3))
    w = flat(net).expand(2, -1)
    x, y = torch.rand(2, 3, 2, 6, 6), torch.ones(2, 3).long()
    with opened(GradientMap(net, penalised)) as path_for:
        path = path_for(w, x, y)
        assert path.name == "loop"
        found = path.graph_at(w, x, y).flat[0]
    assert "uses 1.bias, 1.weight, 3.bias, 3.weight outside their layers" in caplog.text
    loss = penalised(net, x[0], y[0]).mean()
    g = torch.autograd.grad(loss, list(net.parameters()))
    expected = torch.cat([t.flatten() for t in g])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


class Normed(nn.Module):
    """Divides by a norm that has no gradient: another number at other weights only."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(72, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.body(x.flatten(1))))
        return out / self.body.weight.detach().norm()


def test_weights_without_a_gradient_are_followed() -> None:
    net = Normed().double()
    at, away = flat(net).expand(2, -1), 1.5 * flat(net).expand(2, -1)
    x, y = torch.rand(2, 3, 2, 6, 6, dtype=torch.float64), torch.ones(2, 3).long()
    with opened(GradientMap(net, dtype=torch.float64)) as path_for:
        path = path_for(at, x, y)  # where nothing differs
        assert path.name == "loop"
        found = path.graph_at(away, x, y).flat[0]
    expected = gradient(net, away[0].clone().requires_grad_(), x[0], y[0]).detach()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


class Hidden(nn.Module):
    """Reads a parameter through a list, where no other can take its place."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(72, 3)
        self.kept = [self.head.weight]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x.flatten(1)) / self.kept[0].norm()
        return out


def test_parameters_that_can_t_be_replaced_are_refused() -> None:
    net = Hidden().double()
    w = flat(net).expand(2, -1)
    x, y = torch.rand(2, 3, 2, 6, 6, dtype=torch.float64), torch.ones(2, 3).long()
    for name in ("auto", "plain"):
        with (
            opened(GradientMap(net, dtype=torch.float64), name) as path_for,  # type: ignore[arg-type]
            pytest.raises(UnsupportedModuleError, match=r"'head\.weight' by a ref"),
        ):
            path_for(w, x, y)
    how = LocalTraining(epochs=1, batch_size=3, lr=0.1)
    with pytest.raises(UnsupportedModuleError, match=r"'head\.weight' by a ref"):
        train_client(net, x[0], y[0], how)
    plain = nn.Sequential(nn.Flatten(), nn.Linear(72, 3)).double()
    sent = train_client(plain, x[0], y[0], how)
    with pytest.raises(UnsupportedModuleError, match=r"'head\.weight' by a ref"):
        segment_similarity(net, sent)
    with pytest.raises(UnsupportedModuleError, match=r"'head\.weight' by a ref"):
        score_update(net, x[:1], y[:1], client_updates([sent])[0])


class Mixes(nn.Module):
    """Looks at the whole batch, so that clients would see each other."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        out: Tensor = self.head(x - x.mean(0))
        return out


def test_a_network_that_mixes_samples_keeps_clients_apart() -> None:
    net = Mixes().double()
    w = flat(net).expand(2, -1)
    x, y = torch.rand(2, 3, 2, 2, 2, dtype=torch.float64), torch.ones(2, 3).long()
    with opened(GradientMap(net, dtype=torch.float64)) as path_for:
        path = path_for(w, x, y)
        assert path.name == "loop"
        found = path.graph_at(w, x, y).flat
    for i in range(2):
        expected = gradient(net, w[i].clone().requires_grad_(), x[i], y[i])
        torch.testing.assert_close(found[i], expected.detach(), rtol=1e-12, atol=0)
