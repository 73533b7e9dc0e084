"""EMNIST by class through torchvision: FEMNIST's images, without their writers."""

from __future__ import annotations

import string
from functools import partial
from typing import final

from torchvision.datasets import EMNIST

from leakwatch.datamodules.base import ImageDataModule, Splits
from leakwatch.datamodules.dataset import ImageArrays
from leakwatch.datamodules.sources import TorchvisionSource

_SOURCE = TorchvisionSource(
    name="EMNIST",
    reader=partial(EMNIST, split="byclass"),
    folder="EMNIST/raw",
    files="the four files named emnist-byclass-*-ubyte",
    url="https://www.nist.gov/itl/products-and-services/emnist-dataset",
)


@final
class EMNISTDataModule(ImageDataModule):
    """697,932 + 116,323 handwritten digits and letters of 28×28 pixels, 62 classes.

    Cohen et al., "EMNIST: Extending MNIST to handwritten letters" (2017), split "by
    class". LEAF's FEMNIST is made of the same handwriting; this is its stand-in where
    LEAF's script hasn't run. Classes have the same order: digits, capitals, small
    letters. It differs in three ways: writers are not known, ink is 1 and paper 0, and
    the files hold images transposed, which are given out upright.

    All images are in memory: 0.6 GB, twice that while they are read.

    Args:
        data_dir: Folder that holds, or will hold, `EMNIST/raw`.
        download: Fetch the files when they are missing, 0.5 GB.
        batch_size: Samples per batch.
        num_workers: Loader processes.
        seed: Of the validation split.
        val_fraction: Share of the training data that becomes validation data.
        subset: At most this many samples of each split, evenly by class.
        normalize: Give out (pixel − 0.174) / 0.332, about the mean and standard
            deviation that are in common use for it; False: pixels in [0, 1].

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
            class_names=tuple(
                string.digits + string.ascii_uppercase + string.ascii_lowercase
            ),
            image_shape=(1, 28, 28),
            mean=(0.174,),
            std=(0.332,),
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
        """Read both splits, upright."""
        return Splits(
            train=_upright(_SOURCE.read(self.data_dir, train=True)),
            val=None,
            test=_upright(_SOURCE.read(self.data_dir, train=False)),
        )


def _upright(stored: ImageArrays) -> ImageArrays:
    return stored._replace(images=stored.images.transpose(2, 3).contiguous())
