"""Between network inputs, in which attacks work, and pixels, in which images live."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from leakwatch.checks import check_number

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
        if (self.mean is None) != (self.std is None):
            raise ValueError(
                f"mean and std belong together, got mean={self.mean} and "
                f"std={self.std}; pass both, or neither when inputs are pixels."
            )
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
        if self.mean is not None and self.std is not None:
            mean, std = tuple(map(float, self.mean)), tuple(map(float, self.std))
            if len(mean) != len(std) or not mean:
                raise ValueError(
                    f"mean and std must have one entry per channel each, got "
                    f"{len(mean)} and {len(std)}."
                )
            if not all(math.isfinite(n) for n in mean) or not all(
                math.isfinite(n) and n > 0 for n in std
            ):
                raise ValueError(
                    f"mean must be finite and std finite and positive, got mean={mean} "
                    f"and std={std}."
                )
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
        mean: Sequence[float] | None,
        std: Sequence[float] | None,
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
        for name, numbers in (("mean", mean), ("std", std)):
            if isinstance(numbers, Real):
                raise TypeError(
                    f"{name} has one value per channel, got {numbers!r}; give "
                    f"{name}=[{numbers!r}] for one channel."
                )
        if data_range is not None:
            check_number("data_range", data_range, example=1.0)
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
        return self._column(x, self.std, 1.0)

    def to_pixels(self, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Pixels of network inputs: x · std + mean.

        Args:
            x: network inputs, any leading dimensions.

        Returns:
            Pixels, the shape and dtype of ``x``.

        Raises:
            ValueError: if ``x`` doesn't have as many channels as there are means.
        """
        if self.mean is None:
            return x
        return x * self._column(x, self.std, 1.0) + self._column(x, self.mean, 0.0)

    def to_input(self, p: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Network inputs of pixels: (p − mean) / std.

        Args:
            p: pixels, any leading dimensions.

        Returns:
            Network inputs, the shape and dtype of ``p``.

        Raises:
            ValueError: if ``p`` doesn't have as many channels as there are means.
        """
        if self.mean is None:
            return p
        return (p - self._column(p, self.mean, 0.0)) / self._column(p, self.std, 1.0)

    def box(
        self, x: Float[Tensor, "..."]
    ) -> tuple[Float[Tensor, "..."], Float[Tensor, "..."]] | None:
        """Bounds of network inputs, to broadcast against ``x``; ``None`` if unknown."""
        if self.low is None or self.high is None:
            return None
        shape = self._column(x, self.mean, 0.0)
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

    def _column(
        self, x: Tensor, numbers: Sequence[float] | None, otherwise: float
    ) -> Tensor:
        if numbers is None or len(numbers) == 1:
            return x.new_full((), otherwise if numbers is None else numbers[0])
        if x.ndim < -self.channel or x.shape[self.channel] != len(numbers):
            raise ValueError(
                f"mean and std have {len(numbers)} entries, so dimension "
                f"{self.channel} of the images must have that size, got shape "
                f"{tuple(x.shape)}."
            )
        return x.new_tensor(numbers).view(-1, *[1] * (-self.channel - 1))
