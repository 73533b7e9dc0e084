"""Small networks with each kind of layer that comes apart, in the middle of others.

A new kind joins the tests of H with one entry in `KINDS`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES = 3
Build: TypeAlias = Callable[[], nn.Module]


class Tokens(nn.Module):
    """Four tokens of nine pixels each, then a body, then their mean."""

    def __init__(self, activation: Build, body: Build, width: int = 6) -> None:
        super().__init__()
        self.embed = nn.Linear(9, 6)
        self.activation = activation()
        self.body = body()
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.activation(self.embed(x.view(len(x), 4, 9)))
        return self.head(self.activation(self.body(tokens)).mean(1))


class SelfAttention(nn.Module):
    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.core = nn.MultiheadAttention(6, 2, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.core(x, x, x, need_weights=False)[0]


class CrossAttention(nn.Module):
    def __init__(self, **sizes: int) -> None:
        super().__init__()
        self.core = nn.MultiheadAttention(6, 2, batch_first=True, **sizes)

    def forward(self, x: Tensor) -> Tensor:
        return self.core(x, x.sin(), x.cos())[0]


class Twice(nn.Module):
    """Two layers of one weight, or one layer two times."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)) + x)


class Functional(nn.Module):
    """Its parameters are arguments of functions."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6) / 3)
        self.bias = nn.Parameter(torch.randn(6) / 3)

    def forward(self, x: Tensor) -> Tensor:
        out = F.linear(x, self.weight) + self.bias
        return F.linear(input=out, weight=self.weight, bias=self.bias)


class Scalar(nn.Module):
    """A parameter without dimensions, such as a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale.exp() * x


class Broadcast(nn.Module):
    """One bias for all outputs, as torch's functions allow."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6) / 3)
        self.bias = nn.Parameter(torch.randn(1))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Vector(nn.Module):
    """A vector in the place of a weight: an inner product."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return x + F.linear(x, self.weight)[..., None]


class NoInputs(nn.Module):
    """A layer of which nothing is left but its bias."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.empty = nn.Linear(0, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.empty(x[..., :0])


def twice(make: Build) -> Build:
    def build() -> nn.Module:
        layer = make()
        return Twice(layer, layer)

    return build


def tied(make: Build) -> Build:
    def build() -> nn.Module:
        first, second = make(), make()
        second.weight = first.weight
        return Twice(first, second)

    return build


def frozen(make: Build, name: str) -> Build:
    def build() -> nn.Module:
        layer = make()
        layer.get_parameter(name).requires_grad_(False)
        return layer

    return build


def settled(norm: nn.Module) -> nn.Module:
    """Statistics and scales that are not those of a new layer."""
    for p in norm.parameters():
        nn.init.uniform_(p, 0.5, 1.5)
    for b in norm.buffers():
        if b.is_floating_point():
            nn.init.uniform_(b, 0.5, 1.5)
    return norm


def conv(**options: object) -> Build:
    settings = {"in_channels": 4, "out_channels": 6, "kernel_size": 3} | options
    return lambda: nn.Conv2d(**settings)  # type: ignore[arg-type]


def conv1(**options: object) -> Build:
    settings = {"in_channels": 4, "out_channels": 6, "kernel_size": 3} | options
    return lambda: nn.Conv1d(**settings)  # type: ignore[arg-type]


# In the middle of a network on images, behind a convolution with four channels.
IMAGES: dict[str, Build] = {
    "conv": conv(),
    "conv-no-bias": conv(bias=False),
    "conv-padded": conv(padding=1),
    "conv-strided": conv(stride=2, padding=1),
    "conv-stride-beyond-kernel": conv(kernel_size=2, stride=3),
    "conv-dilated": conv(dilation=2, padding=2),
    "conv-uneven": conv(kernel_size=(2, 4), stride=(1, 2), padding=(1, 0)),
    "conv-all-at-once": conv(
        kernel_size=(3, 2), stride=(2, 3), dilation=(2, 1), padding=2
    ),
    "conv-same": conv(padding="same"),
    "conv-same-even": conv(kernel_size=(2, 4), padding="same"),
    "conv-valid": conv(padding="valid"),
    "conv-circular": conv(padding=1, padding_mode="circular"),
    "conv-reflect-even": conv(kernel_size=4, padding="same", padding_mode="reflect"),
    "conv-pointwise": conv(kernel_size=1),
    "conv-pointwise-strided": conv(kernel_size=1, stride=2, bias=False),
    "conv-one-position": conv(kernel_size=(6, 7)),
    "conv-wide": conv(out_channels=20, kernel_size=4),
    "grouped": conv(groups=2),
    "grouped-strided": conv(groups=2, stride=2, padding=1, out_channels=8),
    "depthwise": conv(groups=4, out_channels=4, padding=1),
    "depthwise-multiplied": conv(groups=4, out_channels=8, kernel_size=2),
    "conv-twice": twice(conv(out_channels=4, padding=1)),
    "conv-tied": tied(conv(out_channels=4, padding=1)),
    "conv-frozen-weight": frozen(conv(), "weight"),
    "conv-frozen-bias": frozen(conv(), "bias"),
    "transposed": lambda: nn.ConvTranspose2d(4, 3, 3),
    "batch-norm": lambda: settled(nn.BatchNorm2d(4)),
    "group-norm": lambda: settled(nn.GroupNorm(2, 4)),
    "instance-norm": lambda: settled(nn.InstanceNorm2d(4, affine=True)),
    "layer-norm-of-images": lambda: settled(nn.LayerNorm((6, 7))),
    "prelu": lambda: nn.PReLU(4),
    "conv1d": lambda: nn.Sequential(nn.Flatten(2), conv1()()),
    "conv1d-strided": lambda: nn.Sequential(
        nn.Flatten(2), conv1(kernel_size=5, stride=2, dilation=2, padding=3)()
    ),
    "conv1d-same-even": lambda: nn.Sequential(
        nn.Flatten(2), conv1(kernel_size=4, padding="same")()
    ),
    "conv1d-grouped": lambda: nn.Sequential(nn.Flatten(2), conv1(groups=2)()),
    "batch-norm-1d": lambda: nn.Sequential(nn.Flatten(2), settled(nn.BatchNorm1d(4))),
    "linear-on-rows": lambda: nn.Linear(7, 5),
}
# Between linear layers on four tokens of six features.
TOKENS: dict[str, Build] = {
    "linear": lambda: nn.Linear(6, 6),
    "linear-no-bias": lambda: nn.Linear(6, 6, bias=False),
    "linear-wide": lambda: nn.Sequential(nn.Linear(6, 40), nn.Linear(40, 6)),
    "linear-one-row": lambda: nn.Sequential(nn.Linear(6, 1), nn.Linear(1, 6)),
    "linear-twice": twice(lambda: nn.Linear(6, 6)),
    "linear-tied": tied(lambda: nn.Linear(6, 6)),
    "linear-frozen-bias": frozen(lambda: nn.Linear(6, 6), "bias"),
    "functional": Functional,
    "scalar": Scalar,
    "broadcast-bias": Broadcast,
    "vector-weight": Vector,
    "no-inputs": NoInputs,
    "layer-norm": lambda: settled(nn.LayerNorm(6)),
    "layer-norm-no-bias": lambda: settled(nn.LayerNorm(6, bias=False)),
    "rms-norm": lambda: settled(nn.RMSNorm(6)),
    "attention": SelfAttention,
    "attention-no-bias": lambda: SelfAttention(bias=False),
    "attention-extra-tokens": lambda: SelfAttention(
        add_bias_kv=True, add_zero_attn=True
    ),
    "cross-attention": CrossAttention,
    "cross-attention-sizes": lambda: CrossAttention(kdim=6, vdim=6),
    "transformer": lambda: nn.TransformerEncoderLayer(6, 2, 8, batch_first=True),
    "bilinear": lambda: nn.Sequential(nn.Linear(6, 6), _Squared()),
}


class _Squared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.form = nn.Bilinear(6, 6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.form(x, x)


def network(name: str, activation: Build) -> tuple[nn.Module, Tensor, Tensor]:
    """A network in float64 around one kind of layer, a sample and its label."""
    torch.manual_seed(0)
    if name in IMAGES:
        front = nn.Sequential(nn.Conv2d(1, 4, 3), activation(), IMAGES[name]())
        body = nn.Sequential(front, activation(), nn.Flatten())
        shape = (1, 8, 9)
        with torch.no_grad():
            features = body.eval()(torch.zeros(1, *shape)).shape[1]
        net: nn.Module = nn.Sequential(body, nn.Linear(features, CLASSES))
    else:
        shape = (36,)  # type: ignore[assignment]
        net = Tokens(activation, TOKENS[name])
    x = torch.randn(shape, dtype=torch.float64)
    return net.double().eval(), x, torch.tensor(1)


KINDS = [*IMAGES, *TOKENS]
