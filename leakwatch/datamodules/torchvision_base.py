"""Data sets that torchvision reads: where they are from, and what they share."""

from __future__ import annotations

import warnings
from abc import ABC
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, ClassVar, final

import torch

from leakwatch.datamodules.base import ImageDataModule, Splits
from leakwatch.datamodules.dataset import ImageArrays

_FAILURES = (RuntimeError, OSError, ValueError, AssertionError, EOFError, HTTPException)


@final
@dataclass(frozen=True)
class TorchvisionSource:
    """Where a torchvision data set lies and how it is read.

    Args:
        name: Of the data set, for error texts.
        reader: torchvision's class: `reader(root, train=..., download=...)`.
        folder: Where its files lie, relative to `data_dir`.
        files: Which files these are, in words.
        url: Where a person gets them.
    """

    name: str
    reader: Callable[..., Any]
    folder: str
    files: str
    url: str

    def fetch(self, data_dir: str | Path, *, download: bool) -> None:
        """Make sure that the files are there, downloading them when allowed.

        Raises:
            FileNotFoundError: They are not; the message gives the expected folder.
        """
        self._open(data_dir, train=False, download=download)

    def read(self, data_dir: str | Path, *, train: bool) -> ImageArrays:
        """Read one split, as uint8 (n, C, H, W).

        Raises:
            FileNotFoundError: The files are missing or can't be read.
        """
        dataset = self._open(data_dir, train=train, download=False)
        images = torch.as_tensor(dataset.data)
        images = images.permute(0, 3, 1, 2) if images.ndim == 4 else images.unsqueeze(1)
        labels = torch.as_tensor(dataset.targets, dtype=torch.int64)
        return ImageArrays(images.contiguous(), labels)

    def _open(self, data_dir: str | Path, *, train: bool, download: bool) -> Any:
        root = Path(data_dir).expanduser()
        try:
            with warnings.catch_warnings():
                # NumPy 2.4.0 to 2.4.4 warn about pickles as old as CIFAR's
                warnings.filterwarnings("ignore", message=r"dtype\(\): align should be")
                return self.reader(str(root), train=train, download=download)
        except _FAILURES as error:
            tried = "could not be downloaded" if download else "can't be read"
            raise FileNotFoundError(
                f"{self.name} {tried} ({' '.join(str(error).split())}): get "
                f"{self.files} from {self.url}, put the unpacked files in "
                f"{root / self.folder}, and pass data_dir={str(data_dir)!r} and "
                "download=False; or pass download=True where there is a network."
            ) from error


class TorchvisionDataModule(ImageDataModule, ABC):
    """Training and test images that torchvision reads, all of which are in memory.

    A concrete data module states where its images are from, their classes and shape,
    and mean and standard deviation per channel.

    Args:
        data_dir: Folder that holds, or will hold, the data set's own folder.
        download: Fetch the files when they are missing.
        batch_size: Samples per batch.
        num_workers: Loader processes.
        seed: Of the validation split.
        val_fraction: Share of the training data that becomes validation data.
        subset: At most this many samples of each split, evenly by class.
        normalize: Give out (pixel − mean) / std; False: pixels in [0, 1].
        augment: Random crop with 4 pixels of border, and flip, of training images.

    Raises:
        TypeError: An argument of the wrong kind.
        ValueError: An argument out of range.
        FileNotFoundError: From `prepare_data` and `setup`: files missing.
    """

    _source: ClassVar[TorchvisionSource]
    _classes: ClassVar[tuple[str, ...]]
    _shape: ClassVar[tuple[int, int, int]]
    _moments: ClassVar[tuple[tuple[float, ...], tuple[float, ...]]]

    def __init__(
        self,
        data_dir: str = "data",
        download: bool = True,
        batch_size: int = 64,
        num_workers: int = 0,
        seed: int = 0,
        val_fraction: float = 0.1,
        subset: int | None = None,
        normalize: bool = True,
        augment: bool = False,
    ) -> None:
        mean, std = self._moments
        super().__init__(
            class_names=self._classes,
            image_shape=self._shape,
            mean=mean,
            std=std,
            batch_size=batch_size,
            num_workers=num_workers,
            seed=seed,
            val_fraction=val_fraction,
            subset=subset,
            normalize=normalize,
            augment=augment,
        )
        self.data_dir = data_dir
        self.download = download

    def prepare_data(self) -> None:
        """Find the files, or download them."""
        self._source.fetch(self.data_dir, download=self.download)

    def load(self) -> Splits:
        """Read both splits."""
        return Splits(train=self._read(train=True), val=None, test=self._read())

    def _read(self, *, train: bool = False) -> ImageArrays:
        return self._source.read(self.data_dir, train=train)


class GreyTorchvisionDataModule(TorchvisionDataModule, ABC):
    """Those of grey images of 28×28 pixels, which nobody mirrors.

    Args:
        data_dir: Folder that holds, or will hold, the data set's own folder.
        download: Fetch the files when they are missing.
        batch_size: Samples per batch.
        num_workers: Loader processes.
        seed: Of the validation split.
        val_fraction: Share of the training data that becomes validation data.
        subset: At most this many samples of each split, evenly by class.
        normalize: Give out (pixel − mean) / std; False: pixels in [0, 1].

    Raises:
        TypeError: An argument of the wrong kind.
        ValueError: An argument out of range.
        FileNotFoundError: From `prepare_data` and `setup`: files missing.
    """

    _shape = (1, 28, 28)

    def __init__(
        self,
        data_dir: str = "data",
        download: bool = True,
        batch_size: int = 64,
        num_workers: int = 0,
        seed: int = 0,
        val_fraction: float = 0.1,
        subset: int | None = None,
        normalize: bool = True,
    ) -> None:
        super().__init__(
            data_dir,
            download,
            batch_size,
            num_workers,
            seed,
            val_fraction,
            subset,
            normalize,
        )
