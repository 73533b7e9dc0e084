"""The generator of CI-Net, and how wide it has to be."""

from __future__ import annotations

from typing import Final, Literal, final

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

__all__ = ["CINet", "choose_width", "enclosing_side", "parameter_count"]

_FIRST_SIDE: Final = 4
_HALVING_SIDES: Final = (64, 128)
_LEAST_WIDTH: Final = 32
_SLOPE: Final = 0.1


@final
class CINet(nn.Module):
    """The generator: one fixed latent vector to one image.

    A transposed convolution makes a 4×4 map, then blocks of two 3×3 convolutions with
    spectral norm, BatchNorm and LeakyReLU(0.1) alternate with nearest-neighbour
    upsampling, and a 1×1 convolution makes the image directly. The width halves at
    64 and again at 128 pixels.

    Args:
        channels: of the image.
        side: of the square that is made: 4 · 2^k.
        width: channels of the hidden layers.
        latent: length of the latent vector; 128 in the paper's notebooks.
        bounded: whether a tanh bounds the output.

    Raises:
        ValueError: if ``side`` isn't 4 · 2^k, or a size is not positive.

    Example:
        >>> import torch
        >>> net = CINet(channels=3, side=32, width=32)
        >>> net(torch.zeros(2, 128)).shape, sum(p.numel() for p in net.parameters())
        (torch.Size([2, 3, 32, 32]), 140227)
    """

    def __init__(
        self,
        channels: int = 3,
        side: int = 32,
        width: int = 32,
        latent: int = 128,
        bounded: bool = True,
    ) -> None:
        super().__init__()
        if min(channels, width, latent) < 1:
            raise ValueError(
                f"channels, width and latent must be positive, got {channels}, {width} "
                f"and {latent}."
            )
        if side != enclosing_side(side):
            raise ValueError(
                f"CI-Net makes squares of 4, 8, 16, ... pixels, not of {side}; use "
                f"{enclosing_side(side)} and crop."
            )
        self.first = nn.Sequential(
            nn.ConvTranspose2d(latent, width, _FIRST_SIDE),
            nn.BatchNorm2d(width),
            nn.LeakyReLU(_SLOPE),
        )
        first, *others = _widths(side, width)
        blocks: list[nn.Module] = [_block(*first)]
        for pair in others:
            blocks += [nn.Upsample(scale_factor=2.0), _block(*pair)]
        self.blocks = nn.Sequential(*blocks)
        self.last = nn.Conv2d((first, *others)[-1][1], channels, 1)
        self.bounded = bounded

    def forward(
        self, z: Float[Tensor, "batch latent"]
    ) -> Float[Tensor, "batch channels side side"]:
        """Images in (−1, 1), or of any value when not bounded."""
        out: Tensor = self.last(self.blocks(self.first(z[:, :, None, None])))
        return out.tanh() if self.bounded else out


def enclosing_side(side: int) -> int:
    """The smallest 4 · 2^k that is not below ``side``."""
    size = _FIRST_SIDE
    while size < side:
        size *= 2
    return size


def _block(fan_in: int, width: int) -> nn.Module:
    layers: list[nn.Module] = []
    for channels in (fan_in, width):
        layers += [
            spectral_norm(nn.Conv2d(channels, width, 3, padding=1)),
            nn.BatchNorm2d(width),
            nn.LeakyReLU(_SLOPE),
        ]
    return nn.Sequential(*layers)


def choose_width(
    rule: Literal["paper", "code"],
    *,
    shared_parameters: int,
    images: int,
    channels: int,
    side: int,
    latent: int = 128,
) -> int:
    """Hidden channels: 32, doubled until the generator is over-parameterised.

    Args:
        rule: ``"paper"``: more parameters than the attacked network shares, P(G) >
            P(F); ``"code"``: more than 4 · images · side² of them.
        shared_parameters: P(F).
        images: in one gradient.
        channels: of an image.
        side: of the generated square.
        latent: length of the latent vector.

    Returns:
        The width.

    Raises:
        ValueError: for another rule.

    Example:
        >>> choose_width("paper", shared_parameters=11_173_962, images=16, channels=3,
        ...              side=32)
        512
    """
    if rule not in ("paper", "code"):
        raise ValueError(f"width must be an integer, 'paper' or 'code', got {rule!r}.")
    needed = shared_parameters if rule == "paper" else 4 * images * side**2
    width = _LEAST_WIDTH
    while parameter_count(channels, side, width, latent) <= needed:
        width *= 2
    return width


def parameter_count(channels: int, side: int, width: int, latent: int) -> int:
    """P(G), without building the network.

    Example:
        >>> parameter_count(3, 64, 32, 128) == sum(
        ...     p.numel() for p in CINet(3, 64, 32).parameters())
        True
    """
    # Each convolution has a bias and a BatchNorm behind it: three numbers a channel.
    total = latent * width * _FIRST_SIDE**2 + 3 * width
    for fan_in, fan_out in _widths(side, width):
        total += 9 * (fan_in + fan_out) * fan_out + 6 * fan_out
        width = fan_out
    return total + (width + 1) * channels


def _widths(side: int, width: int) -> list[tuple[int, int]]:
    """Channels into and out of each block."""
    pairs, size = [(width, width)], _FIRST_SIDE
    while size < side:
        size *= 2
        before = pairs[-1][1]
        halved = size in _HALVING_SIDES
        pairs.append((before, max(1, before // 2) if halved else before))
    return pairs
