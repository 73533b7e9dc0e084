"""What every data module shares: split, subset, normalisation, loaders."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple, TypeAlias

import lightning as L
from torch import Tensor
from torch.utils.data import DataLoader

from leakwatch.checks import check_integer, check_number
from leakwatch.datamodules.dataset import ImageArrays, ImageDataset
from leakwatch.datamodules.files import ImageFileDataset, ImageFiles
from leakwatch.datamodules.splits import stratified_first, stratified_split

Stored: TypeAlias = ImageArrays | ImageFiles
"""Images in memory, or files that are read at each access."""


class Splits(NamedTuple):
    """Stored images of each split; None: there is none."""

    train: Stored
    val: Stored | None
    test: Stored | None


class ImageDataModule(L.LightningDataModule, ABC):
    """Loads stored images, splits them and feeds them to a Trainer.

    A concrete data module states what its images are and implements `load`. After
    `setup` there are `train_dataset`, `val_dataset`, `test_dataset` (None when the
    data has no test images) and `probe_dataset`: the training samples, in the same
    order, never augmented. Each has `.targets`.

    Args:
        class_names: One name per class.
        image_shape: (C, H, W) of one image.
        mean: Per channel, in pixel units ([0, 1]).
        std: Per channel, in pixel units.
        batch_size: Samples per batch.
        num_workers: Loader processes; 0 loads in the main process, which is quickest
            for images that lie in memory.
        seed: Of the validation split, by a generator of its own. Shuffling follows
            the global generator, as ever in PyTorch.
        val_fraction: Share of each class of the training data that becomes
            validation data when the data has none of its own, in (0, 1).
        subset: At most this many samples of each split, the first of each class,
            evenly; None: all.
        normalize: Give out (pixel − mean) / std; False: pixels in [0, 1].
        augment: Random crop and flip of training images: for images in memory with 4
            pixels of border, for files of random area and shape.

    Attributes:
        mean: What is subtracted, per channel: zeros when `normalize` is False.
        std: What is divided by, per channel: ones when `normalize` is False.
        num_classes: Number of classes.

    Raises:
        TypeError: An argument of the wrong kind.
        ValueError: An argument out of range.
    """

    def __init__(
        self,
        *,
        class_names: tuple[str, ...],
        image_shape: tuple[int, int, int],
        mean: tuple[float, ...],
        std: tuple[float, ...],
        batch_size: int = 64,
        num_workers: int = 0,
        seed: int = 0,
        val_fraction: float = 0.1,
        subset: int | None = None,
        normalize: bool = True,
        augment: bool = False,
    ) -> None:
        super().__init__()
        check_integer("batch_size", batch_size, example=64)
        check_integer("num_workers", num_workers, smallest=0)
        check_integer("seed", seed, smallest=0)
        if subset is not None:
            check_integer("subset", subset, example=1000)
        check_number("val_fraction", val_fraction, "(0, 1)", example=0.1)
        channels = image_shape[0]
        self.class_names = class_names
        self.num_classes = len(class_names)
        self.image_shape = image_shape
        self.mean = mean if normalize else (0.0,) * channels
        self.std = std if normalize else (1.0,) * channels
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.seed = seed
        self.val_fraction = val_fraction
        self.subset = subset
        self.normalize = normalize
        self.augment = augment
        self.train_dataset: ImageDataset | ImageFileDataset | None = None
        self.probe_dataset: ImageDataset | ImageFileDataset | None = None
        self.val_dataset: ImageDataset | ImageFileDataset | None = None
        self.test_dataset: ImageDataset | ImageFileDataset | None = None

    @abstractmethod
    def load(self) -> Splits:
        """Return the stored images of every split."""

    def setup(self, stage: str | None = None) -> None:
        """Load and split, once; later calls change nothing.

        Args:
            stage: The Trainer's; all splits are made whatever it is.
        """
        if self.train_dataset is not None:
            return
        train, val, test = self.load()
        if val is None:
            rest, part = stratified_split(train.labels, self.val_fraction, self.seed)
            train, val = train.take(rest), train.take(part)
        train, val = self._limit(train), self._limit(val)
        self.probe_dataset = train.dataset(self.mean, self.std)
        self.train_dataset = self.probe_dataset
        if self.augment:
            self.train_dataset = train.dataset(self.mean, self.std, augment=True)
        self.val_dataset = val.dataset(self.mean, self.std)
        if test is not None:
            self.test_dataset = self._limit(test).dataset(self.mean, self.std)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, int]]:
        """Return the shuffled training batches."""
        return self._loader("train", self.train_dataset, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, int]]:
        """Return the validation batches, in order."""
        return self._loader("val", self.val_dataset, shuffle=False)

    def test_dataloader(self) -> DataLoader[tuple[Tensor, int]]:
        """Return the test batches, in order.

        Raises:
            RuntimeError: The data has no test images.
        """
        return self._loader("test", self.test_dataset, shuffle=False)

    def _limit(self, stored: Stored) -> Stored:
        if self.subset is None:
            return stored
        return stored.take(stratified_first(stored.labels, self.subset))

    def _loader(
        self,
        split: str,
        dataset: ImageDataset | ImageFileDataset | None,
        *,
        shuffle: bool,
    ) -> DataLoader[tuple[Tensor, int]]:
        if dataset is None:
            if self.train_dataset is None:
                raise RuntimeError(
                    f"{type(self).__name__} is not set up: call prepare_data() and "
                    "setup(), or pass it to a Trainer."
                )
            raise RuntimeError(f"{type(self).__name__} has no {split} images.")
        return DataLoader(
            dataset,
            batch_size=self.batch_size,
            shuffle=shuffle,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
        )
