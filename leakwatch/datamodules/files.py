"""Image files that are read at each access, cut to a square of one size."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias, final

import numpy as np
import torch
from jaxtyping import Float, Int
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms import RandomResizedCrop

from leakwatch.checks import check_integer, check_number

_Box: TypeAlias = tuple[int, int, int, int]
_MODES = {1: "L", 3: "RGB"}
_EIGHT_BITS = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV")
_AREA, _SHAPE = [0.08, 1.0], [3 / 4, 4 / 3]


@final
@dataclass(frozen=True, eq=False)
class ImageFiles:
    """Paths of images with their labels, and how they are cut.

    Args:
        paths: One file per sample.
        labels: int64, in 0 … classes − 1, (n,).
        image_size: Side of the square that comes out, in pixels.
        channels: 3: colour; 1: grey. Images of the other kind are converted.
        crop: Share of the shorter side that the central square keeps, in (0, 1].
    """

    paths: tuple[str, ...]
    labels: Int[Tensor, " n"]
    image_size: int
    channels: int = 3
    crop: float = 1.0

    def __post_init__(self) -> None:
        check_cut(self.image_size, self.channels, self.crop)

    def take(self, index: Int[Tensor, " m"]) -> ImageFiles:
        """Return the chosen samples, in the order of `index`."""
        paths = tuple(self.paths[i] for i in index.tolist())
        return replace(self, paths=paths, labels=self.labels[index])

    def dataset(
        self, mean: tuple[float, ...], std: tuple[float, ...], *, augment: bool = False
    ) -> ImageFileDataset:
        """Return them as a data set; see `ImageFileDataset`."""
        return ImageFileDataset(self, mean, std, augment=augment)


@final
class ImageFileDataset(Dataset[tuple[Tensor, int]]):
    """Image files, given out as (pixel − mean) / std with pixel in [0, 1].

    A central square with `crop` times the shorter side is resized to `image_size`
    with an antialiasing bilinear filter; 224 and 0.875 are customary for ImageNet,
    where the square is cut after the resizing, to the same effect. The orientation
    that a camera noted is ignored, as torchvision does.

    Args:
        files: Paths, labels and the cut.
        mean: Per channel, in pixel units.
        std: Per channel, in pixel units.
        augment: Instead of the central square, one of random area (8 to 100 percent)
            and shape (3:4 to 4:3) is resized, and mirrored half of the time. Draws
            from the global generator, which every DataLoader worker has seeded.

    Attributes:
        paths: As given.
        targets: int64 labels, (n,).
        mean: As given.
        std: As given.

    Raises:
        ValueError: From an access: the file is no image of 8 bits a channel.
        FileNotFoundError: From an access: the file is gone.
    """

    def __init__(
        self,
        files: ImageFiles,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        *,
        augment: bool = False,
    ) -> None:
        self.paths = files.paths
        self.targets = files.labels
        self.mean = mean
        self.std = std
        self._files = files
        self._mean = torch.tensor(mean).view(-1, 1, 1)
        self._std = torch.tensor(std).view(-1, 1, 1)
        self._augment = augment

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(
        self, index: int
    ) -> tuple[Float[Tensor, "channels height width"], int]:
        image = _read(self.paths[index], self._files.channels)
        box = _random(image) if self._augment else _central(image, self._files.crop)
        side = self._files.image_size
        square = image.crop(box).resize((side, side), Image.Resampling.BILINEAR)
        stored = torch.from_numpy(np.array(square)).view(side, side, -1)
        stored = stored.permute(2, 0, 1)
        if self._augment and torch.rand(()) < 0.5:
            stored = stored.flip(-1)
        pixels = stored.to(torch.float32) / 255
        return (pixels - self._mean) / self._std, int(self.targets[index])


def check_cut(image_size: object, channels: object, crop: object) -> None:
    """Refuse a cut that no image has.

    Raises:
        TypeError: `image_size` is not an integer.
        ValueError: A value out of range; the message says what is expected.
    """
    check_integer("image_size", image_size, example=224)
    if isinstance(channels, bool) or channels not in _MODES:
        raise ValueError(f"channels must be 3 (colour) or 1 (grey), got {channels!r}.")
    check_number("crop", crop, "(0, 1]", example=0.875)


def _read(path: str, channels: int) -> Image.Image:
    try:
        with Image.open(path) as image:
            if image.mode not in _EIGHT_BITS:
                raise ValueError(
                    f"{path} has pixels of the kind {image.mode!r}, expected 8 bits a "
                    "channel: save it as an 8-bit PNG or JPEG, or store arrays and use "
                    "ArrayDataModule."
                )
            if "transparency" in image.info:
                # Pillow asks for this way round palettes with transparent entries
                return image.convert("RGBA").convert(_MODES[channels])
            return image.convert(_MODES[channels])
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{path} is gone since the folder was listed; restore it, or start again "
            "without it."
        ) from error
    except (OSError, SyntaxError, UnidentifiedImageError) as error:
        raise ValueError(
            f"{path} can't be read as an image ({error}); replace or remove the file."
        ) from error


def _central(image: Image.Image, crop: float) -> _Box:
    side = max(1, round(crop * min(image.size)))
    left, top = (image.width - side) // 2, (image.height - side) // 2
    return left, top, left + side, top + side


def _random(image: Image.Image) -> _Box:
    top, left, height, width = RandomResizedCrop.get_params(image, _AREA, _SHAPE)
    return left, top, left + width, top + height
