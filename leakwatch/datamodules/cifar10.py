"""CIFAR-10 through torchvision."""

from __future__ import annotations

from typing import final

from torchvision.datasets import CIFAR10

from leakwatch.datamodules.base import ImageDataModule, Splits
from leakwatch.datamodules.sources import TorchvisionSource

_SOURCE = TorchvisionSource(
    name="CIFAR-10",
    reader=CIFAR10,
    folder="cifar-10-batches-py",
    files="cifar-10-python.tar.gz",
    url="https://www.cs.toronto.edu/~kriz/cifar.html",
)
_CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)


@final
class CIFAR10DataModule(ImageDataModule):
    """50,000 + 10,000 colour photographs of 32×32 pixels (Krizhevsky 2009).

    Args:
        data_dir: Folder that holds, or will hold, `cifar-10-batches-py`.
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
        super().__init__(
            class_names=_CLASSES,
            image_shape=(3, 32, 32),
            mean=(0.4914, 0.4822, 0.4465),
            std=(0.2470, 0.2435, 0.2616),
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
        _SOURCE.fetch(self.data_dir, download=self.download)

    def load(self) -> Splits:
        """Read both splits."""
        return Splits(
            train=_SOURCE.read(self.data_dir, train=True),
            val=None,
            test=_SOURCE.read(self.data_dir, train=False),
        )
