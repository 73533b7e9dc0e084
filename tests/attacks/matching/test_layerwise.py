from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import CLASSES
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from leakwatch.attacks.matching.engines import LoopPath
from leakwatch.attacks.matching.layerwise import LayerwisePath
from leakwatch.attacks.matching.selection import built
from leakwatch.derivatives.layers.products import Layout
from leakwatch.derivatives.losses import classification_criterion
from leakwatch.derivatives.runtime import SampleLoss, evaluating
from leakwatch.derivatives.runtime.modules import NotLayerwiseError

LAYOUTS: tuple[Layout, ...] = ("contiguous", "channels_last")

CONVOLUTIONS: list[dict[str, Any]] = [
    {"kernel_size": 3, "padding": 1},
    {"kernel_size": 3, "padding": 1, "bias": False},
    {"kernel_size": 5, "padding": 2, "stride": 2},
    {"kernel_size": 3, "padding": 4},  # wider than the kernel turned around allows
    {"kernel_size": (2, 3), "padding": (0, 1), "stride": (2, 1)},
    {"kernel_size": 3, "padding": 2, "dilation": 2},
    {"kernel_size": (3, 2), "dilation": (1, 2), "stride": (1, 2)},
    {"kernel_size": 1, "stride": 2},
    {"kernel_size": 3, "stride": 3},
    {"kernel_size": 3, "padding": 1, "groups": 4},
    {"kernel_size": 3, "padding": 1, "groups": 8, "stride": 2},
]


def convolutional(first: dict[str, Any], second: dict[str, Any]) -> nn.Module:
    body = nn.Sequential(
        nn.Conv2d(8, 8, **first),
        nn.Tanh(),
        nn.Conv2d(8, 8, **second),
        nn.Tanh(),
    )
    size = body(torch.zeros(1, 8, 7, 9)).numel()
    return nn.Sequential(body, nn.Flatten(), nn.Linear(size, CLASSES))


def compare(module: nn.Module, shape: tuple[int, ...], *, images: int = 2) -> None:
    """Layerwise gradients and pulls against the loop, for both layouts."""
    module = module.double()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, images, *shape, generator=generator, dtype=torch.float64)
    y = torch.arange(3 * images).view(3, images) % CLASSES
    weight = torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64)
    loss = SampleLoss(module, classification_criterion)
    with evaluating(loss, "cpu", torch.float64, substitutes=False) as at:
        loop = LoopPath(loss, at)
        each = [
            loop.graph(x[i : i + 1], y[i : i + 1], weight[i : i + 1], False)
            for i in range(3)
        ]
        expected = torch.cat([g.flat for g in each])
        u = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
        back = torch.cat([g.pull(u[i : i + 1]).images for i, g in enumerate(each)])
        for layout in LAYOUTS:
            path = LayerwisePath(loss, at, layout)
            torch.testing.assert_close(path.restore(path.arrange(u)), u, rtol=0, atol=0)
            for settled in (False, True):
                with loss.holding():
                    if settled:
                        path.settle(x[0], y[0])
                    graph = path.graph(x, y, weight, False)
                    found = path.restore(graph.flat)
                    pulled = graph.pull(path.arrange(u)).images
                torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
                torch.testing.assert_close(pulled, back, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("options", CONVOLUTIONS, ids=str)
def test_every_kind_of_convolution(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    plain = {"kernel_size": 3, "padding": 1}
    compare(convolutional(plain, options), (8, 7, 9))
    compare(convolutional(options, plain), (8, 7, 9), images=1)


class Functional(nn.Module):
    def __init__(self, forward: Callable[[Any, Tensor], Tensor], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.run = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "linear on sequences": lambda: nn.Sequential(
        nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Flatten(), nn.Linear(48, 3)
    ),
    "layer norm": lambda: nn.Sequential(
        nn.LayerNorm((2, 6, 6)), nn.Flatten(), nn.LayerNorm(72), nn.Linear(72, 3)
    ),
    "layer norm without bias": lambda: nn.Sequential(
        nn.Flatten(), nn.LayerNorm(72, bias=False), nn.Linear(72, 3)
    ),
    "group norm": lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(64, 3)
    ),
    "batch norm in one dimension": lambda: nn.Sequential(
        nn.Flatten(), nn.BatchNorm1d(72), nn.Tanh(), nn.Linear(72, 3)
    ),
    "image used twice": lambda: Functional(
        lambda m, x: m.b((m.a(x) * x.mean((1, 2, 3), keepdim=True)).flatten(1).sin()),
        a=nn.Conv2d(2, 2, 3, padding=1),
        b=nn.Linear(72, 3),
    ),
    "layer called twice": lambda: Functional(
        lambda m, x: m.b(m.a(m.a(x).tanh()).flatten(1).sin()),
        a=nn.Conv2d(2, 2, 3, padding=1),
        b=nn.Linear(72, 3),
    ),
    "outputs written into": lambda: Functional(
        lambda m, x: m.b(m.c(m.a(x).mul_(2)).mul_(2).relu_().flatten(1)).mul_(3),
        c=nn.Conv2d(2, 2, 3, padding=1),
        a=nn.Conv2d(2, 2, 3, padding=1),
        b=nn.Linear(72, 3),
    ),
    "a layer nobody calls": lambda: Functional(
        lambda m, x: m.b(x.flatten(1).sin()),
        a=nn.Conv2d(2, 2, 3),
        b=nn.Linear(72, 3),
    ),
    "only the bias is shared": lambda: Functional(
        lambda m, x: m.b(m.a(x).flatten(1).sin()),
        a=nn.Conv2d(2, 2, 3, padding=1),
        b=nn.Linear(72, 3),
    ),
    "only the weight is shared": lambda: Functional(
        lambda m, x: m.b(m.c(m.a(x)).flatten(1).sin()),
        a=nn.Conv2d(2, 2, 3, padding=1),
        c=nn.BatchNorm2d(2),
        b=nn.Linear(72, 3),
    ),
    "many channels": lambda: nn.Sequential(
        nn.Conv2d(2, 64, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.AvgPool2d(3),
        nn.Flatten(),
        nn.Linear(256, 3),
    ),
    # Torch has no second derivative of it.
    "hardsigmoid": lambda: Functional(
        lambda m, x: m.b(m.a(F.hardsigmoid(m.c(x))).flatten(1)),
        c=nn.Conv2d(2, 2, 3, padding=1),
        a=nn.Conv2d(2, 2, 3, padding=1),
        b=nn.Linear(72, 3),
    ),
    "hardsigmoid in a checkpointed part": lambda: Functional(
        lambda m, x: m.b(
            checkpoint(
                lambda t: F.hardsigmoid(t) * t, m.c(x), use_reentrant=False
            ).flatten(1)
        ),
        c=nn.Conv2d(2, 2, 3, padding=1),
        b=nn.Linear(72, 3),
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_every_kind_of_layer_and_use(name: str) -> None:
    torch.manual_seed(0)
    module = NETWORKS[name]()
    for key, p in module.named_parameters():
        if name == "only the bias is shared" and key.endswith("weight"):
            p.requires_grad_(False)
        if name == "only the weight is shared" and key.endswith("bias"):
            p.requires_grad_(False)
    compare(module, (2, 6, 6))


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Embedding(4, 3)),
        nn.Sequential(nn.Conv2d(1, 2, 3, padding="same")),
        nn.Sequential(nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular")),
        nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)),
        nn.BatchNorm2d(3, track_running_stats=False),
    ],
    ids=["embedding", "same", "circular", "parametrized", "batch statistics"],
)
def test_other_layers_are_not_taken_for_known_ones(module: nn.Module) -> None:
    loss = SampleLoss(module, classification_criterion)
    with evaluating(loss, "cpu", torch.float64) as at:
        with pytest.raises(NotLayerwiseError, match="belong to no linear"):
            LayerwisePath(loss, at, "contiguous")
        assert (
            built(loss, at, "auto", torch.zeros(1, 1, 3), "layerwise, contiguous")
            is None
        )


def _penalised(module: Any, x: Tensor, y: Tensor) -> Tensor:
    tiny = 1e-9 * module[2].weight.square().sum()
    return classification_criterion(module, x, y) + tiny


def _scaled(module: Any, x: Tensor, y: Tensor) -> Tensor:
    return classification_criterion(module, x / module[2].weight.detach().norm(), y)


def _scaled_unseen(module: Any, x: Tensor, y: Tensor) -> Tensor:
    return classification_criterion(module, x / module[2].weight.data.norm(), y)


def _looking(module: Any, x: Tensor, y: Tensor) -> Tensor:
    return classification_criterion(module, x.sin() if x.mean() > 2 else x, y)


@pytest.mark.parametrize(
    ("criterion", "text"),
    [
        (classification_criterion, ""),
        (_penalised, r"uses 2\.weight outside"),
        (_scaled, r"uses 2\.weight outside"),
        (_scaled_unseen, r"uses 2\.weight outside"),
        (_looking, "looks at numbers"),
    ],
)
def test_what_happens_beside_the_layers_is_refused(criterion: Any, text: str) -> None:
    module = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, CLASSES))
    x, y, weight = torch.rand(2, 1, 6), torch.tensor([[0], [1]]), torch.ones(2)
    loss = SampleLoss(module, criterion)
    with evaluating(loss, "cpu", torch.float32, substitutes=False) as at:
        path = LayerwisePath(loss, at, "contiguous")
        if text:
            with pytest.raises(NotLayerwiseError, match=text):
                path.graph(x, y, weight, False)
        else:
            assert path.graph(x, y, weight, False).flat.shape == (2, at.size)


def test_a_forward_that_writes_is_not_quiet_and_left_as_it_was() -> None:
    class Counting(nn.Module):
        def __init__(self, how: str) -> None:
            super().__init__()
            self.fc = nn.Linear(3, CLASSES)
            self.register_buffer("total", torch.zeros(3))
            self.count, self.kept, self.plain = 0, [1], torch.zeros(1)
            self.how = how

        def forward(self, x: Tensor) -> Tensor:
            if self.how == "buffer":
                self.total += 1
            if self.how == "number":
                self.count += 1
            if self.how == "list":
                self.kept.append(2)
            if self.how == "tensor":
                self.plain.add_(1)
            return self.fc(x)

    x, y = torch.rand(2, 3, dtype=torch.float64), torch.tensor([0, 1])
    for how in ("nothing", "buffer", "number", "list", "tensor"):
        module = Counting(how)
        loss = SampleLoss(module, classification_criterion)
        with evaluating(loss, "cpu", torch.float64) as at:
            tensors = at.shared | {k: t.clone() for k, t in at.fixed.items()}
            assert loss.is_quiet(tensors, x, y) == (how == "nothing")
            assert loss.criterion is classification_criterion
        assert (module.count, module.kept, float(module.plain)) == (0, [1], 0.0)
        assert not module.total.any()
