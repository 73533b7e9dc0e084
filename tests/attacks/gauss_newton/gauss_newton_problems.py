"""Small networks that a second-order attack can be checked on."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from leakwatch.attacks import PixelScale, SharedGradient
from leakwatch.derivatives import GradientMap

PIXELS = PixelScale(mean=[0.4], std=[0.25])
SHAPE = (1, 6, 6)
CLASSES = 4


def net(activation: type[nn.Module] = nn.Sigmoid, seed: int = 0) -> nn.Module:
    """Two convolutions and a linear layer; its gradient determines the image."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1),
            activation(),
            nn.Conv2d(6, 6, 3, padding=1, stride=2),
            activation(),
            nn.Flatten(),
            nn.Linear(54, CLASSES),
        )


def samples(n: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Images with pixels in [0, 1], many of them on the bounds, as network inputs."""
    generator = torch.Generator().manual_seed(seed)
    p = torch.rand(n, *SHAPE, generator=generator, dtype=torch.float64)
    p = (2 * p - 0.5).clamp(0, 1)
    return PIXELS.to_input(p), torch.arange(n) % CLASSES


def problem(
    n: int = 2,
    activation: type[nn.Module] = nn.Sigmoid,
    noise_std: float = 0.0,
    images: int = 1,
) -> tuple[GradientMap, SharedGradient, Tensor]:
    """A map, what was shared, and the true samples."""
    gradients = GradientMap(net(activation), dtype=torch.float64)
    x, y = samples(n)
    shared = SharedGradient.of(
        gradients,
        x,
        y,
        images=images,
        noise_std=noise_std,
        generator=torch.Generator().manual_seed(2),
    )
    return gradients, shared, x


def psnr(found: Tensor, truth: Tensor) -> Tensor:
    """Of each image, dB, peak 1."""
    gap = PIXELS.to_pixels(found) - PIXELS.to_pixels(truth)
    return -10 * gap.double().square().flatten(1).mean(1).clamp_min(1e-40).log10()
