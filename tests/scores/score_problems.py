"""Small networks and, for each, a dense Jacobian that owes nothing to leakwatch."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy


def lenet() -> nn.Module:
    """The sigmoid LeNet of I²F: four 5x5 convolutions, strides 2, 2, 1, 1."""
    torch.manual_seed(1)
    strides, channels = (2, 2, 1, 1), (1, 4, 4, 4, 4)
    layers: list[nn.Module] = []
    for i, stride in enumerate(strides):
        layers += [nn.Conv2d(channels[i], channels[i + 1], 5, stride, 2), nn.Sigmoid()]
    net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(36, 10))
    for p in net.parameters():
        nn.init.uniform_(p, -0.5, 0.5)
    return net


def mlp() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.Tanh(), nn.Linear(20, 10))


class Residual(nn.Module):
    """A ResNet block with BatchNorm between a stem and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6))
        self.block = nn.Sequential(
            nn.Conv2d(6, 6, 3, padding=1, bias=False),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Conv2d(6, 6, 3, padding=1, bias=False),
            nn.BatchNorm2d(6),
        )
        self.head = nn.Linear(6 * 9, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x).relu()
        h = (h + self.block(h)).relu()
        return self.head(nn.functional.avg_pool2d(h, 2).flatten(1))


def resnet() -> nn.Module:
    torch.manual_seed(3)
    net = Residual()
    net(torch.rand(32, 3, 6, 6))  # running statistics that are not 0 and 1
    return net


class Transformer(nn.Module):
    """One encoder layer over 4x4 patches of an 8x8 image."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 12, 4, 4)
        self.position = nn.Parameter(0.1 * torch.randn(4, 12))
        self.layer = nn.TransformerEncoderLayer(
            12, 3, 24, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
        )
        self.head = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).mT + self.position
        return self.head(self.layer(tokens).mean(1))


def vit() -> nn.Module:
    torch.manual_seed(4)
    return Transformer()


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]

    def data(self, samples: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(len(self.name))
        pixels = torch.rand(samples, *self.shape, generator=generator).double()
        return pixels, torch.randint(0, 10, (samples,), generator=generator)


CASES = (
    Case("lenet", lenet, (1, 12, 12)),
    Case("mlp", mlp, (1, 8, 8)),
    Case("resnet", resnet, (3, 6, 6)),
    Case("vit", vit, (1, 8, 8)),
)


class Oracle:
    """g(pixels) of one sample by plain autograd in float64, and its derivatives.

    Args:
        net: the network.
        pixels: one image.
        label: its class.
        mean: of the normalisation, per channel.
        std: of the normalisation, per channel.
    """

    def __init__(
        self,
        net: nn.Module,
        pixels: Tensor,
        label: Tensor,
        mean: tuple[float, ...] = (0.0,),
        std: tuple[float, ...] = (1.0,),
    ) -> None:
        self.net = copy.deepcopy(net).double().eval()
        self.label = label
        self.mean, self.std = torch.tensor(mean).double(), torch.tensor(std).double()
        self.pixels = pixels
        self.g = self.gradient(pixels.flatten()).detach()
        self.j = self._jacobian()
        self.h = self.j.T @ self.j

    def loss(self, flat: Tensor) -> Tensor:
        image = flat.view(self.pixels.shape)
        normalised = (image - self.mean[:, None, None]) / self.std[:, None, None]
        with sdpa_kernel(SDPBackend.MATH):
            return cross_entropy(self.net(normalised[None]), self.label[None])

    def gradient(self, flat: Tensor) -> Tensor:
        parts = torch.autograd.grad(
            self.loss(flat), list(self.net.parameters()), create_graph=True
        )
        return torch.cat([p.reshape(-1) for p in parts])

    def _jacobian(self) -> Tensor:
        leaf = self.pixels.flatten().clone().requires_grad_()
        g = self.gradient(leaf)
        rows = torch.autograd.grad(
            g, leaf, torch.eye(len(g)).double(), is_grads_batched=True
        )
        return rows[0].detach()

    def hessian(self, distance: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Of the distance between g(pixels) and the true gradient, at the truth."""
        return torch.autograd.functional.hessian(
            lambda flat: distance(self.gradient(flat), self.g), self.pixels.flatten()
        )


@dataclass(frozen=True)
class Problem:
    """A network, two images in [0, 1] and what plain autograd says about them."""

    case: Case
    net: nn.Module
    pixels: Tensor
    y: Tensor
    oracles: tuple[Oracle, ...]

    @property
    def d_x(self) -> int:
        return self.pixels[0].numel()

    @property
    def d_theta(self) -> int:
        return len(self.oracles[0].g)


@functools.cache
def solved(case: Case) -> Problem:
    """The same networks and oracles for all test files."""
    net = case.make()
    pixels, y = case.data(2)
    oracles = tuple(Oracle(net, *sample) for sample in zip(pixels, y, strict=True))
    return Problem(case, net, pixels, y, oracles)
