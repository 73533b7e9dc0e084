"""MNIST through torchvision."""

from __future__ import annotations

from typing import final

from torchvision.datasets import MNIST

from leakwatch.datamodules.base import ImageDataModule, Splits
from leakwatch.datamodules.sources import TorchvisionSource

_SOURCE = TorchvisionSource(
    name="MNIST",
    reader=MNIST,
    folder="MNIST/raw",
    files="the four files named *-ubyte.gz",
    url="https://ossci-datasets.s3.amazonaws.com/mnist/",
)


@final
class MNISTDataModule(ImageDataModule):
    """60,000 + 10,000 handwritten digits of 28×28 pixels (LeCun et al. 1998).

    Args:
        data_dir: Folder that holds, or will hold, `MNIST/raw`.
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
            class_names=tuple("0123456789"),
            image_shape=(1, 28, 28),
            mean=(0.1307,),
            std=(0.3081,),
            batch_size=batch_size,
            num_workers=num_workers,
            seed=seed,
            val_fraction=val_fraction,
            subset=subset,
            normalize=normalize,
            augment=False,
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
