"""Images in memory as a map-style data set."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, final

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.utils.data import Dataset

Augmentation = Callable[
    [Shaped[Tensor, "channels height width"]], Shaped[Tensor, "channels height width"]
]


class ImageArrays(NamedTuple):
    """Images as they are stored, with their labels.

    Args:
        images: uint8 in 0 … 255, or float32 in [0, 1].
        labels: int64, in 0 … classes − 1.
        groups: int64, whose each image is, such as a writer; None: nobody's.
    """

    images: Shaped[Tensor, "n channels height width"]
    labels: Int[Tensor, " n"]
    groups: Int[Tensor, " n"] | None = None

    def take(self, index: Int[Tensor, " m"]) -> ImageArrays:
        """Return the chosen samples, in the order of `index`."""
        groups = None if self.groups is None else self.groups[index]
        return ImageArrays(self.images[index], self.labels[index], groups)

    def dataset(
        self, mean: tuple[float, ...], std: tuple[float, ...], *, augment: bool = False
    ) -> ImageDataset:
        """Return them as a data set; see `ImageDataset`.

        Args:
            mean: Per channel, in pixel units.
            std: Per channel, in pixel units.
            augment: Crop at random from the image with 4 pixels of border, and flip.
        """
        return ImageDataset(self, mean, std, RandomCropFlip() if augment else None)


@final
class ImageDataset(Dataset[tuple[Tensor, int]]):
    """Stored images, given out as (pixel − mean) / std with pixel in [0, 1].

    Args:
        arrays: Images and labels.
        mean: Per channel, in pixel units.
        std: Per channel, in pixel units.
        augment: Applied to the stored image at each access; None: nothing.

    Attributes:
        images: As stored, (n, C, H, W).
        targets: int64 labels, (n,).
        groups: As stored, (n,), or None.
        mean: As given.
        std: As given.

    Example:
        >>> arrays = ImageArrays(torch.full((2, 1, 4, 4), 255, dtype=torch.uint8),
        ...                      torch.tensor([0, 1]))
        >>> x, y = ImageDataset(arrays, mean=(0.5,), std=(0.25,))[1]
        >>> x.shape, x.max().item(), y
        (torch.Size([1, 4, 4]), 2.0, 1)
    """

    def __init__(
        self,
        arrays: ImageArrays,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        augment: Augmentation | None = None,
    ) -> None:
        self.images = arrays.images
        self.targets = arrays.labels
        self.groups = arrays.groups
        self.mean = mean
        self.std = std
        self._scale = 255.0 if arrays.images.dtype == torch.uint8 else 1.0
        self._mean = torch.tensor(mean).view(-1, 1, 1)
        self._std = torch.tensor(std).view(-1, 1, 1)
        self._augment = augment

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(
        self, index: int
    ) -> tuple[Float[Tensor, "channels height width"], int]:
        image = self.images[index]
        if self._augment is not None:
            image = self._augment(image)
        pixels = image.to(torch.float32) / self._scale
        return (pixels - self._mean) / self._std, int(self.targets[index])


@final
class RandomCropFlip:
    """Crop at random from the image with a black border; mirror half of the time.

    Draws from the global generator, which every DataLoader worker has seeded.

    Args:
        padding: Width of the border, in pixels.
    """

    def __init__(self, padding: int = 4) -> None:
        self.padding = padding

    def __call__(
        self, image: Shaped[Tensor, "channels height width"]
    ) -> Shaped[Tensor, "channels height width"]:
        """Return an image of the same shape and dtype."""
        _, height, width = image.shape
        border = torch.nn.functional.pad(image, (self.padding,) * 4)
        top, left = torch.randint(2 * self.padding + 1, (2,)).tolist()
        crop = border[:, top : top + height, left : left + width]
        return crop.flip(-1) if torch.rand(()) < 0.5 else crop
