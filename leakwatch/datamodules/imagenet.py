"""ImageNet from a local folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import final

from torchvision.models import ResNet18_Weights

from leakwatch.datamodules.base import ImageDataModule, Splits
from leakwatch.datamodules.channels import imagenet_moments
from leakwatch.datamodules.files import ImageFiles, check_cut
from leakwatch.datamodules.folders import class_folders, list_images


@final
class ImageNetDataModule(ImageDataModule):
    """1.28 million + 50,000 photographs of 1000 classes (Deng et al. 2009).

    ImageNet may not be downloaded without an account, so the files must be there:

        data_dir/train/n01440764/n01440764_18.JPEG
        data_dir/val/n01440764/ILSVRC2012_val_00000293.JPEG

    with one folder per WordNet id in either. Fewer classes are fine; with all 1000
    the classes have their English names, else those of their folders. The folders are
    looked at here, in the constructor, so that a missing one is reported before
    training starts.

    Args:
        data_dir: Folder that holds `train` and `val`.
        image_size: Side of the square that each image is cut and resized to.
        crop: Share of the shorter side that the central square keeps, in (0, 1].
        batch_size: Samples per batch.
        num_workers: Loader processes; files decode faster with a few.
        subset: At most this many samples of each split, evenly by class.
        normalize: Give out (pixel − mean) / std; False: pixels in [0, 1].
        augment: Random crop, resized, and flip of training images.

    Raises:
        FileNotFoundError: A folder, or what should be in it, is missing.
        TypeError: An argument of the wrong kind.
        ValueError: An argument out of range, or folders that don't fit together.
    """

    def __init__(
        self,
        data_dir: str = "data/imagenet",
        image_size: int = 224,
        crop: float = 0.875,
        batch_size: int = 64,
        num_workers: int = 0,
        subset: int | None = None,
        normalize: bool = True,
        augment: bool = False,
    ) -> None:
        check_cut(image_size, 3, crop)
        root = Path(data_dir).expanduser()
        self._root = root
        self._hint = (
            f"Expected {root}/train/<WordNet id>/<image>.JPEG and {root}/val/<WordNet "
            "id>/<image>.JPEG: get ILSVRC2012 with an account from "
            "https://image-net.org/download.php, unpack the training archive of each "
            "class into its folder, and sort the validation images likewise."
        )
        self._folders = class_folders(root / "train", self._hint)
        class_folders(root / "val", self._hint, least=1)
        mean, std = imagenet_moments(3)
        super().__init__(
            class_names=_names(self._folders),
            image_shape=(3, image_size, image_size),
            mean=mean,
            std=std,
            batch_size=batch_size,
            num_workers=num_workers,
            subset=subset,
            normalize=normalize,
            augment=augment,
        )
        self.data_dir = data_dir
        self.crop = crop

    def load(self) -> Splits:
        """List the files of both splits."""
        return Splits(train=self._files("train"), val=self._files("val"), test=None)

    def _files(self, split: str) -> ImageFiles:
        paths, labels = list_images(
            self._root / split,
            self._folders,
            self._hint,
            complete=split == "train",
        )
        return ImageFiles(paths, labels, self.image_shape[1], 3, self.crop)


def _names(folders: tuple[str, ...]) -> tuple[str, ...]:
    # torchvision states the names in the order of the ids, but not the ids
    names = tuple(ResNet18_Weights.IMAGENET1K_V1.meta["categories"])
    whole = len(folders) == len(names)
    ids = all(re.fullmatch(r"n\d{8}", folder) for folder in folders)
    return names if whole and ids else folders
