"""What an attack searches through: parameters that stand for images.

A generator's latents, if it was trained on such images; or its parameters, whose
structure alone already prefers images over noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, final

from jaxtyping import Float
from torch import Tensor, nn

from leakwatch.attacks.generators.stacked_modules import ModuleCopies
from leakwatch.attacks.pixels import PixelScale

__all__ = [
    "Candidates",
    "GeneratorWeights",
    "Latents",
    "OutputScale",
]


class Candidates(Protocol):
    """A search space for a number of independent attacks."""

    @property
    def attacks(self) -> int:
        """How many there are."""

    @property
    def parameters(self) -> tuple[Float[Tensor, "rows ..."], ...]:
        """Leaves that are optimised.

        Each has as many rows as there are attacks, or a multiple k of that: rows i·k
        to i·k + k − 1 belong to attack i alone.
        """

    def images(self) -> Float[Tensor, "attacks images ..."]:
        """Images of all attacks, network-input units, as a graph of the parameters."""


@final
@dataclass(frozen=True)
class OutputScale:
    """From what a generator puts out to network inputs.

    Args:
        bounds: what stands for the darkest and for the brightest pixel: (−1, 1) for
            tanh, (0, 1) for sigmoid. ``None``: the generator puts out network inputs.
        pixels: normalisation and range of the images.
        shape: of one sample; larger outputs are cropped around the centre.

    Raises:
        ValueError: if bounds are in the wrong order, or are given and the range of
            pixels isn't known.
    """

    bounds: tuple[float, float] | None
    pixels: PixelScale
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.bounds is None:
            return
        low, high = self.bounds
        if not -math.inf < low < high < math.inf:
            raise ValueError(
                f"a generator's output must range from low to a larger high, got "
                f"{low} and {high}."
            )
        if not self.pixels.boxed:
            raise ValueError(
                f"the generator's output in [{low}, {high}] stands for pixels, whose "
                f"range is not known; give pixels=PixelScale(low=0, "
                f"high=1, ...), or output_range=None for a generator of network inputs."
            )

    def __call__(self, out: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        """Network inputs, cropped to the shape of a sample.

        Raises:
            ValueError: if the outputs don't have the channels or the size of a sample.
        """
        out = self._cropped(out)
        low, high = self.pixels.low, self.pixels.high
        if self.bounds is None or low is None or high is None:
            return out
        share = (out - self.bounds[0]) / (self.bounds[1] - self.bounds[0])
        return self.pixels.to_input(low + share * (high - low))

    def _cropped(self, out: Tensor) -> Tensor:
        sample = out.shape[-len(self.shape) :]
        fits = out.ndim > len(self.shape) and all(
            a >= b for a, b in zip(sample, self.shape, strict=True)
        )
        spatial = len(self.shape) == 3
        if not fits or (sample != self.shape and not spatial):
            raise ValueError(
                f"the generator makes samples of shape {tuple(sample)}, the network "
                f"takes {self.shape}."
            )
        if sample == self.shape:
            return out
        if sample[0] != self.shape[0]:
            raise ValueError(
                f"the generator makes {sample[0]} channels, the network takes "
                f"{self.shape[0]}."
            )
        top, left = (
            (a - b) // 2 for a, b in zip(sample[1:], self.shape[1:], strict=True)
        )
        height, width = self.shape[1:]
        return out[..., top : top + height, left : left + width]


@final
class Latents:
    """Inputs of one trained generator, which itself stays as it is.

    Args:
        generator: takes ``(batch, *latent)`` and returns samples; runs in eval mode.
            It is not changed.
        start: first latents, ``(attacks, images, *latent)``.
        scale: from its outputs to network inputs.
    """

    def __init__(
        self,
        generator: nn.Module,
        start: Float[Tensor, "attacks images ..."],
        scale: OutputScale,
    ) -> None:
        self.z = start.detach().clone().requires_grad_()
        self._copies = ModuleCopies([generator], dtype=start.dtype, device=start.device)
        for p in self._copies.parameters.values():
            p.requires_grad_(False)
        self._scale = scale

    @property
    def attacks(self) -> int:
        """How many there are."""
        return len(self.z)

    @property
    def parameters(self) -> tuple[Float[Tensor, "attacks ..."], ...]:
        """The latents."""
        return (self.z,)

    def images(self) -> Float[Tensor, "attacks images ..."]:
        """What the generator makes of the latents."""
        out = self._copies(self.z.flatten(0, 1)[None])[0]
        return self._scale(out.reshape(*self.z.shape[:2], *out.shape[1:]))


@final
class GeneratorWeights:
    """Parameters of generators whose latents are fixed.

    Args:
        generators: one for each attack to start from, or for each image of each
            attack, in order. They are copied.
        latents: ``(attacks, images, *latent)``, fixed.
        scale: from their outputs to network inputs.
        train: see :class:`leakwatch.attacks.generators.stacked_modules.ModuleCopies`.

    Raises:
        ValueError: if there are neither as many generators as attacks nor as images.
    """

    def __init__(
        self,
        generators: Sequence[nn.Module],
        latents: Float[Tensor, "attacks images ..."],
        scale: OutputScale,
        *,
        train: bool = False,
    ) -> None:
        attacks, images = latents.shape[:2]
        if len(generators) not in (attacks, attacks * images):
            raise ValueError(
                f"{attacks} attacks of {images} images need {attacks} generators, one "
                f"each, or {attacks * images}, one for each image; got "
                f"{len(generators)}."
            )
        self._by_image = len(generators) != attacks
        self._copies = ModuleCopies(
            generators, train=train, dtype=latents.dtype, device=latents.device
        )
        self._latents = latents.detach()
        self._scale = scale

    @property
    def attacks(self) -> int:
        """How many there are."""
        return len(self._latents)

    @property
    def parameters(self) -> tuple[Float[Tensor, "generators ..."], ...]:
        """The generators' parameters."""
        return tuple(self._copies.parameters.values())

    def images(self) -> Float[Tensor, "attacks images ..."]:
        """What the generators make of their latents."""
        z = self._latents
        if self._by_image:
            z = z.flatten(0, 1)[:, None]
        out = self._copies(z)
        if self._by_image:
            out = out.reshape(*self._latents.shape[:2], *out.shape[2:])
        return self._scale(out)
