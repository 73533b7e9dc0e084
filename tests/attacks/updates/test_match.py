"""The surrogate's match layer by layer, against autograd's double backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from leakwatch import WeightUpdate
from leakwatch.attacks.matching import distances
from leakwatch.attacks.matching.priors import Priors
from leakwatch.attacks.matching.selection import opened
from leakwatch.attacks.updates.match import LayeredMatch
from leakwatch.attacks.updates.surrogate import SurrogateObjective
from leakwatch.derivatives import GradientMap
from leakwatch.models import FEMNISTCNN, SMELeNet

from ..matching.test_update_paths import Frozen, Residual, batch_normed
from ..update_problems import cosine_distance, flat, gradient


class Twice(nn.Module):
    """A linear layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(36, 36)
        self.head = nn.Linear(36, 3)

    def forward(self, x: Tensor) -> Tensor:
        a = torch.tanh(self.body(x.flatten(1)))
        return self.head(torch.tanh(self.body(a)) + a)


class Branches(nn.Module):
    """The image meets several layers, one of them without any curvature."""

    def __init__(self) -> None:
        super().__init__()
        self.curved = nn.Linear(36, 12, bias=False)
        self.plain = nn.Linear(36, 12)
        self.unused = nn.Linear(40, 40)
        self.head = nn.Linear(12, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.head(torch.tanh(self.curved(x)) + self.plain(x))


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(36, 20),
        nn.Sigmoid(),
        nn.Linear(20, 15, bias=False),
        nn.ReLU(inplace=True),
        nn.Linear(15, 3),
    )


def fixed_bias() -> nn.Module:
    net = mlp()
    layer = net[1]
    assert isinstance(layer, nn.Linear)
    layer.bias.requires_grad_(False)
    return net


def tokens() -> nn.Module:
    return nn.Sequential(
        nn.Linear(12, 20), nn.GELU(), nn.Flatten(), nn.Linear(60, 20), nn.Linear(20, 3)
    )


NETWORKS: dict[str, tuple[Any, tuple[int, ...], int, set[int]]] = {
    "mlp": (mlp, (1, 6, 6), 2, {0, 1, 2}),
    "mlp, more samples": (mlp, (1, 6, 6), 8, {0, 1}),
    "mlp, many samples": (mlp, (1, 6, 6), 13, set()),
    "fixed bias": (fixed_bias, (1, 6, 6), 2, {0, 1, 2}),
    "twice": (Twice, (1, 6, 6), 2, {1}),
    "branches": (Branches, (1, 6, 6), 2, {0, 1, 2, 3}),
    "tokens": (tokens, (3, 12), 2, {0, 1, 2}),
    "frozen": (Frozen, (2, 6, 6), 1, {2, 3}),
    "residual": (Residual, (2, 6, 6), 2, {3}),
    "batch norm": (batch_normed, (2, 6, 6), 2, {2}),
    "lenet": (lambda: SMELeNet(image_size=12, num_classes=3), (1, 12, 12), 2, set()),
    "cnn": (lambda: FEMNISTCNN(3, 3, 8), (3, 8, 8), 2, set()),
}


def problem(
    name: str, dtype: torch.dtype = torch.float64
) -> tuple[nn.Module, WeightUpdate, Tensor, Tensor, Tensor]:
    """Two clients, the second attacked twice and first."""
    build, shape, samples, _ = NETWORKS[name]
    torch.manual_seed(0)
    net = build().to(dtype).eval()
    w = flat(net)
    final = w + 0.1 * torch.randn(3, len(w), dtype=dtype)
    labels = torch.randint(3, (3, samples))
    update = WeightUpdate(w, final, labels, shape, samples)
    clients = torch.tensor([2, 0, 1, 2, 0, 1])
    x = torch.randn(6, samples, *shape, dtype=dtype)
    alpha = torch.tensor([0.2, 0.5, 0.9, 0.0, 1.0, 0.4], dtype=dtype)
    return net, update, x, alpha, clients


@contextmanager
def objective(net: nn.Module, update: WeightUpdate) -> Iterator[SurrogateObjective]:
    gradients = GradientMap(net, dtype=update.initial.dtype)
    assert update.labels is not None
    with opened(gradients, "layers") as path_for:
        yield SurrogateObjective(
            gradients, update, update.labels, path_for, Priors(), every=2
        )


@pytest.mark.parametrize("name", NETWORKS)
def test_distance_and_derivatives_are_those_of_double_backward(name: str) -> None:
    net, update, x, alpha, clients = problem(name)
    assert update.labels is not None
    with objective(net, update) as evaluate:
        found = evaluate(x, alpha, clients, 0)
        held = evaluate(x, alpha, clients, 1)
        match = evaluate._path
    assert held.slope is None
    assert found.slope is not None
    torch.testing.assert_close(held.gradient, found.gradient, rtol=1e-12, atol=1e-14)
    for i, client in enumerate(clients.tolist()):
        xi, ai = x[i].clone().requires_grad_(), alpha[i].clone().requires_grad_()
        w = ai * update.initial + (1 - ai) * update.final[client]
        g = gradient(net, w, xi, update.labels[client])
        d = cosine_distance(g, update.difference[client])
        image, slope = torch.autograd.grad(d, [xi, ai])
        close = {"rtol": 1e-9, "atol": 1e-13}
        torch.testing.assert_close(found.distance[i], d.detach(), **close)
        torch.testing.assert_close(found.gradient[i], image, **close)
        torch.testing.assert_close(found.slope[i], slope, **close)
    # Linear layers that see few vectors and are used once, by position.
    assert isinstance(match, LayeredMatch)
    thin, expected = match._thin, NETWORKS[name][3]
    assert not expected or thin == expected


def test_attacks_one_by_one_find_the_same() -> None:
    net, update, x, alpha, clients = problem("cnn")
    with objective(net, update) as evaluate:
        found = evaluate(x, alpha, clients, 0)
        for i in range(len(x)):
            at = slice(i, i + 1)
            alone = evaluate(x[at], alpha[at], clients[at], 0)
            assert alone.slope is not None
            assert found.slope is not None
            close = {"rtol": 1e-10, "atol": 1e-14}
            torch.testing.assert_close(alone.distance, found.distance[at], **close)
            torch.testing.assert_close(alone.gradient, found.gradient[at], **close)
            torch.testing.assert_close(alone.slope, found.slope[at], **close)


class Largest(TorchDispatchMode):
    """Notes the most numbers that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else [out]:
            made = isinstance(t, Tensor) and not t._is_view()
            if made and t.is_contiguous():
                self.numbers = max(self.numbers, t.numel())
        return out


def test_nothing_as_large_as_the_weights_of_one_client_is_formed() -> None:
    net, update, x, alpha, clients = problem("mlp")
    with objective(net, update) as evaluate:
        evaluate(x, alpha, clients, 0)  # tries the path out
        with Largest() as seen:
            evaluate(x, alpha, clients, 0)
    assert x.numel() <= seen.numbers < update.initial.numel()


def test_single_precision_keeps_the_digits_of_a_small_distance() -> None:
    # A client's update that is its gradient at w_0, so that 1 − cos is zero at α = 1.
    net, update, x, _, _ = problem("mlp", torch.float32)
    assert update.labels is not None
    w = update.initial
    step = torch.stack(
        [
            gradient(net, w.clone().requires_grad_(), xi, yi).detach()
            for xi, yi in zip(x[:3], update.labels, strict=True)
        ]
    )
    update = WeightUpdate(w, w - step, update.labels, (1, 6, 6), 2)
    with objective(net, update) as evaluate:
        found = evaluate(x[:3], torch.ones(3), torch.arange(3), 0)
    assert float(found.distance.min()) >= 0
    assert float(found.distance.max()) < 1e-6
    assert float(found.gradient.abs().max()) < 1e-4


def test_convolutions_keep_all_digits_of_a_small_distance() -> None:
    """Nothing cancels where gradients are formed."""
    net, update, x, _, _ = problem("cnn", torch.float32)
    assert update.labels is not None
    w, rows = update.initial, torch.arange(3)
    steps = [
        gradient(net, w.clone().requires_grad_(), xi, yi).detach()
        for xi, yi in zip(x[:3], update.labels, strict=True)
    ]
    step = torch.stack(steps)
    step += 1e-4 * step.norm(dim=1, keepdim=True) * torch.randn_like(step) / 50
    samples = update.samples
    update = WeightUpdate(w, w - step, update.labels, (3, 8, 8), samples)
    with objective(net, update) as evaluate:
        found = evaluate(x[:3], torch.ones(3), rows, 0).distance
    wide = WeightUpdate(
        w.double(), update.final.double(), update.labels, (3, 8, 8), samples
    )
    with objective(net.double(), wide) as evaluate:
        exact = evaluate(x[:3].double(), torch.ones(3).double(), rows, 0).distance
    assert float(exact.max()) < 1e-7
    # The rounding of the gradients themselves moves it by a tenth. A sum of squares in
    # single precision would move it by 1e-7, more than all of it.
    torch.testing.assert_close(found.double(), exact, rtol=0.3, atol=0.0)


def test_a_gradient_that_vanishes_leaves_numbers() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 3))
    torch.manual_seed(0)
    w = flat(net)
    # Logits so far apart that the loss has no slope.
    w = torch.cat([w[:-3], torch.tensor([1e4, 0.0, 0.0])])
    final = w + 0.01 * torch.randn(2, len(w))
    labels = torch.zeros(2, 1, dtype=torch.long)
    update = WeightUpdate(w, final, labels, (1, 6, 6), 1)
    x = torch.randn(2, 1, 1, 6, 6)
    with objective(net, update) as evaluate:
        found = evaluate(x, torch.ones(2), torch.arange(2), 0)
    # No direction explains nothing, also by double backward.
    torch.testing.assert_close(found.distance, torch.ones(2))
    _, plain = distances.get("cosine")(torch.zeros(1, 3), torch.ones(1, 3))
    assert bool(torch.isfinite(plain).all())
    assert float(distances.get("cosine")(torch.zeros(1, 3), torch.ones(1, 3))[0]) == 1
    assert bool(torch.isfinite(found.gradient).all())


def test_the_last_layer_alone_is_matched() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(36, 3)).double()
    torch.manual_seed(0)
    w = flat(net)
    final = w + 0.1 * torch.randn(1, len(w), dtype=torch.float64)
    update = WeightUpdate(w, final, torch.tensor([[1]]), (1, 6, 6), 1)
    x = torch.randn(1, 1, 1, 6, 6, dtype=torch.float64)
    alpha = torch.tensor([0.3], dtype=torch.float64)
    with objective(net, update) as evaluate:
        found = evaluate(x, alpha, torch.tensor([0]), 0)
    leaf = x[0].clone().requires_grad_()
    at = final[0] + alpha * update.difference[0]
    g = gradient(net, at.requires_grad_(), leaf, torch.tensor([1]))
    d = cosine_distance(g, update.difference[0])
    (image,) = torch.autograd.grad(d, leaf)
    torch.testing.assert_close(found.gradient[0], image, rtol=1e-9, atol=1e-14)
    assert F.cosine_similarity(found.gradient[0].flatten(), image.flatten(), 0) > 0.99
