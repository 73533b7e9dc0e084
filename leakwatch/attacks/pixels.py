"""Between network inputs, in which attacks work, and pixels, in which images live."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from leakwatch.checks import check_number
from leakwatch.normalization import (
    Channels,
    check_channels,
    per_channel,
    to_input,
    to_pixels,
)

__all__ = ["PixelScale"]


@final
@dataclass(frozen=True)
class PixelScale:
    """The normalisation that made network inputs from pixels, and the pixels' range.

    input = (pixel − mean) / std per channel, low ≤ pixel ≤ high.

    Args:
        mean: per channel mean of the normalisation, or one for all channels; ``None``
            together with ``std`` when network inputs are pixels.
        std: per channel standard deviation, positive.
        low: smallest pixel value, ``None`` when it is not known.
        high: largest pixel value, ``None`` when it is not known.
        channel: the dimension of the channels, counted from the end: −3 for images.

    Raises:
        ValueError: if only one of mean and std, or of low and high, is given, if their
            lengths differ, std is not positive, or low is not below high.
        TypeError: if mean or std are no numbers.

    Example:
        >>> import torch
        >>> scale = PixelScale(mean=[0.5], std=[0.25])
        >>> x = torch.tensor([[[[-4.0, 0.0, 1.0]]]])
        >>> scale.to_pixels(x).flatten().tolist()
        [-0.5, 0.5, 0.75]
        >>> scale.clamp(x).flatten().tolist()
        [-2.0, 0.0, 1.0]
    """

    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    low: float | None = 0.0
    high: float | None = 1.0
    channel: int = -3

    def __post_init__(self) -> None:
        if (self.low is None) != (self.high is None):
            raise ValueError(
                f"low and high belong together, got low={self.low} and "
                f"high={self.high}; pass both, or neither when the range is unknown."
            )
        if self.channel >= 0:
            raise ValueError(
                f"channel counts from the end, so it must be negative, got "
                f"{self.channel}; images (…, channels, height, width) have −3."
            )
        mean, std = check_channels(self.mean, self.std)
        object.__setattr__(self, "mean", mean)
        object.__setattr__(self, "std", std)
        if self.low is not None and self.high is not None:
            low, high = float(self.low), float(self.high)
            if not (math.isfinite(low) and math.isfinite(high) and low < high):
                raise ValueError(
                    f"low must be below high and both finite, got {low} and {high}."
                )

    @classmethod
    def unknown(cls) -> PixelScale:
        """Network inputs taken for pixels, of no known range: no box."""
        return cls(low=None, high=None)

    @classmethod
    def of(
        cls,
        mean: Channels | None,
        std: Channels | None,
        data_range: float | None,
    ) -> PixelScale:
        """Pixels in [0, ``data_range``], [0, 1] by default, where anything is known.

        Args:
            mean: per channel, see the class.
            std: per channel.
            data_range: largest pixel value.
        """
        if mean is None and std is None and data_range is None:
            return cls.unknown()
        if data_range is not None:
            check_number("data_range", data_range, example=1.0)
        mean, std = check_channels(mean, std)
        return cls(mean, std, 0.0, 1.0 if data_range is None else data_range)

    @property
    def boxed(self) -> bool:
        """Whether the range of pixels is known."""
        return self.low is not None

    @property
    def data_range(self) -> float | None:
        """The peak of a PSNR in pixel units, high − low; ``None`` when unknown."""
        if self.low is None or self.high is None:
            return None
        return self.high - self.low

    def input_std(self, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """d(pixel)/d(input), to broadcast against ``x``: std, or ones without it."""
        return per_channel(self.std or (1.0,), x, self.channel)

    def to_pixels(self, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Pixels of network inputs: x · std + mean.

        Args:
            x: network inputs, any leading dimensions.

        Returns:
            Pixels, the shape and dtype of ``x``.

        Raises:
            ValueError: if ``x`` doesn't have as many channels as there are means.
        """
        return to_pixels(x, self.mean, self.std, self.channel)

    def to_input(self, p: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Network inputs of pixels: (p − mean) / std.

        Args:
            p: pixels, any leading dimensions.

        Returns:
            Network inputs, the shape and dtype of ``p``.

        Raises:
            ValueError: if ``p`` doesn't have as many channels as there are means.
        """
        return to_input(p, self.mean, self.std, self.channel)

    def box(
        self, x: Float[Tensor, "..."]
    ) -> tuple[Float[Tensor, "..."], Float[Tensor, "..."]] | None:
        """Bounds of network inputs, to broadcast against ``x``; ``None`` if unknown."""
        if self.low is None or self.high is None:
            return None
        shape = per_channel(self.mean or (0.0,), x, self.channel)
        return (
            self.to_input(torch.full_like(shape, self.low)),
            self.to_input(torch.full_like(shape, self.high)),
        )

    def clamp(self, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Network inputs moved to the nearest ones whose pixels lie in the range.

        Args:
            x: network inputs, any leading dimensions.

        Returns:
            ``x`` itself where the range is unknown, otherwise a new tensor.
        """
        bounds = self.box(x)
        return x if bounds is None else torch.clamp(x, *bounds)
