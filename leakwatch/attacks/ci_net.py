"""CI-Net: an untrained, over-parameterised generator as the search space.

Zhang et al., "Generative Gradient Inversion via Over-Parameterized Networks in
Federated Learning" (ICCV 2023). The paper's text and its code differ; what follows
which is said with each argument.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from leakwatch.attacks.candidate_search import Phase, search
from leakwatch.attacks.candidates import OutputScale, Weights
from leakwatch.attacks.generator_attack import (
    Plan,
    changed,
    check_start,
    labels_of,
    reconstruction,
)
from leakwatch.attacks.matching import MatchingProblem
from leakwatch.attacks.pixels import PixelScale
from leakwatch.attacks.protocol import Progress
from leakwatch.attacks.result import Reconstruction
from leakwatch.attacks.sharing import SharedGradient
from leakwatch.attacks.starts import Start, stream
from leakwatch.gradients import GradientMap
from leakwatch.isolation import isolated_rng

__all__ = ["CINet", "CINetAttack", "choose_width"]

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


@final
@dataclass(frozen=True)
class CINetAttack:
    """Searches the parameters of a CI-Net, from random ones, for a fixed latent.

    Each image of a gradient has a latent of its own, N(0, 1); the generator is shared
    by them, its BatchNorm in train mode. Adam takes the *sign* of the parameters'
    gradients, without decay. The best images by matching distance are returned.

    Args:
        steps: of Adam; 2,000 in the CIFAR-10 notebook, 150,000 in the paper for 256
            images.
        lr: learning rate.
        distance: ``"cosine"`` as in the code; the paper's Algorithm 1 writes a norm
            of the difference: ``"l1"`` or ``"l2"``.
        width: hidden channels, or the rule by which to choose them, see
            :func:`choose_width`.
        signed: see above.
        tv: weight of total variation; the code has none.
        latent: length of the latent vectors.

    The generator's tanh is mapped to the range of pixels; the authors' code compares
    (−1, 1) with pixels in [0, 1] as it is. Without a known range its output is not
    bounded. Other sizes than 4 · 2^k are cropped from the next larger one.

    Raises:
        ValueError: for values out of range, here or in ``run``.
    """

    steps: int = 2000
    lr: float = 1e-3
    distance: str = "cosine"
    width: int | Literal["paper", "code"] = "paper"
    signed: bool = True
    tv: float = 0.0
    latent: int = 128

    def __post_init__(self) -> None:
        self._phase()
        if isinstance(self.width, int) and self.width < 1:
            raise ValueError(f"width must be positive, got {self.width}.")
        if self.latent < 1:
            raise ValueError(f"latent must be positive, got {self.latent}.")

    @property
    def name(self) -> str:
        """``"ci-net"``."""
        return "ci-net"

    def run(
        self,
        gradients: GradientMap,
        shared: SharedGradient,
        *,
        pixels: PixelScale,
        start: Start,
        seed: int,
        restarts: int,
        time_limit: float | None = None,
        progress: Progress | None = None,
        initial: Float[Tensor, "restarts targets images *sample"] | None = None,
    ) -> Reconstruction:
        """Attacks all targets; see :class:`leakwatch.attacks.protocol.Attack`.

        Raises:
            ValueError: for samples that are not images, or another start than normal.
        """
        check_start(start, self.name, initial)
        if len(shared.sample_shape) != 3:
            raise ValueError(
                f"CI-Net makes images (channels, height, width), the network takes "
                f"samples of shape {shared.sample_shape}."
            )
        plan = Plan(shared, restarts, self.steps, time_limit, progress)
        labels, doubts = labels_of(shared, gradients)
        problem = MatchingProblem(gradients, shared, self.distance)
        with problem.opened() as matcher:
            candidates = self._candidates(gradients, plan, pixels, seed)
            found = search(
                matcher,
                candidates,
                labels.repeat(restarts, 1),
                plan.targets,
                self._phase(),
                deadline=plan.deadline,
                tick=plan.tick(),
            )
        return reconstruction(
            plan, gradients, found, labels, doubts, self.name, self.distance
        )

    def changed(self, **fields: object) -> CINetAttack:
        """The same attack with other settings.

        Raises:
            ValueError: for a field that there isn't.
        """
        return changed(self, fields)

    def _phase(self) -> Phase:
        return Phase(self.steps, self.lr, signed=self.signed, tv=self.tv)

    def _candidates(
        self, gradients: GradientMap, plan: Plan, pixels: PixelScale, seed: int
    ) -> Weights:
        shared = plan.shared
        channels, height, width = shared.sample_shape
        side = enclosing_side(max(height, width))
        hidden = self.width
        if not isinstance(hidden, int):
            hidden = choose_width(
                hidden,
                shared_parameters=gradients.size,
                images=shared.images,
                channels=channels,
                side=side,
                latent=self.latent,
            )
        generators, latents = [], []
        for place in plan.places:
            draws = stream(seed, *place)
            latents.append(torch.randn(shared.images, self.latent, generator=draws))
            with isolated_rng(draws.initial_seed()):
                generators.append(
                    CINet(channels, side, hidden, self.latent, pixels.boxed)
                )
        device = next(gradients.module.parameters()).device
        return Weights(
            generators,
            torch.stack(latents).to(device, gradients.dtype),
            OutputScale(
                (-1.0, 1.0) if pixels.boxed else None, pixels, shared.sample_shape
            ),
            train=True,
        )
