"""A user's own images in one folder per class."""

from __future__ import annotations

from pathlib import Path
from typing import final

from leakwatch.datamodules.base import ImageDataModule, Splits
from leakwatch.datamodules.channels import imagenet_moments, per_channel
from leakwatch.datamodules.files import ImageFiles, check_cut
from leakwatch.datamodules.folders import class_folders, list_images
from leakwatch.normalization import Channels


@final
class ImageFolderDataModule(ImageDataModule):
    """Image files in class folders, read at each access.

    Either all images in one place, of which `val_fraction` is split off,

        data_dir/<class>/<image>.jpg

    or with splits of their own, of which `val` and `test` may be missing:

        data_dir/train/<class>/<image>.jpg
        data_dir/val/<class>/<image>.jpg
        data_dir/test/<class>/<image>.jpg

    Classes are numbered in the alphabetical order of their folders. The folders are
    looked at here, in the constructor, so that `num_classes` is known and a missing
    folder is reported before training starts.

    Args:
        data_dir: The folder.
        image_size: Side of the square that each image is cut and resized to.
        channels: 3: colour; 1: grey. Images of the other kind are converted.
        crop: Share of the shorter side that the central square keeps, in (0, 1].
        batch_size: Samples per batch.
        num_workers: Loader processes; files decode faster with a few.
        seed: Of the validation split.
        val_fraction: Share of the training data that becomes validation data when
            there is no folder `val`.
        subset: At most this many samples of each split, evenly by class.
        normalize: Give out (pixel − mean) / std; False: pixels in [0, 1].
        augment: Random crop, resized, and flip of training images.
        mean: Per channel, in pixel units; None: ImageNet's, for grey their average.
        std: Per channel, in pixel units; None: ImageNet's, for grey their average.

    Raises:
        FileNotFoundError: The folder, or what should be in it, is missing.
        TypeError: An argument of the wrong kind.
        ValueError: An argument out of range, or folders that don't fit together.
    """

    def __init__(
        self,
        data_dir: str,
        image_size: int = 224,
        channels: int = 3,
        crop: float = 1.0,
        batch_size: int = 64,
        num_workers: int = 0,
        seed: int = 0,
        val_fraction: float = 0.1,
        subset: int | None = None,
        normalize: bool = True,
        augment: bool = False,
        mean: Channels | None = None,
        std: Channels | None = None,
    ) -> None:
        check_cut(image_size, channels, crop)
        self.data_dir = data_dir
        root = Path(data_dir).expanduser()
        self._hint = (
            f"Expected {root}/<class>/<image>.jpg, or {root}/train/<class>/<image>.jpg "
            "with val and test beside train if you have them."
        )
        self._split = (root / "train").is_dir()
        self._root = root
        self._folders = class_folders(self._folder("train"), self._hint)
        own_mean, own_std = imagenet_moments(channels)
        super().__init__(
            class_names=self._folders,
            image_shape=(channels, image_size, image_size),
            mean=per_channel("mean", mean, own_mean),
            std=per_channel("std", std, own_std),
            batch_size=batch_size,
            num_workers=num_workers,
            seed=seed,
            val_fraction=val_fraction,
            subset=subset,
            normalize=normalize,
            augment=augment,
        )
        self.crop = crop

    def load(self) -> Splits:
        """List the files of every split."""
        return Splits(
            train=self._files("train"),
            val=self._files("val") if self._has("val") else None,
            test=self._files("test") if self._has("test") else None,
        )

    def _folder(self, split: str) -> Path:
        return self._root / split if self._split else self._root

    def _has(self, split: str) -> bool:
        return self._split and (self._root / split).is_dir()

    def _files(self, split: str) -> ImageFiles:
        paths, labels = list_images(
            self._folder(split), self._folders, self._hint, complete=split == "train"
        )
        channels, side, _ = self.image_shape
        return ImageFiles(paths, labels, side, channels, self.crop)
