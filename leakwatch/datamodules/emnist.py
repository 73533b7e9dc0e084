"""EMNIST by class through torchvision: FEMNIST's images, without their writers."""

from __future__ import annotations

import string
from functools import partial
from typing import final

from torchvision.datasets import EMNIST

from leakwatch.datamodules.dataset import ImageArrays
from leakwatch.datamodules.torchvision_base import (
    GreyTorchvisionDataModule,
    TorchvisionSource,
)


@final
class EMNISTDataModule(GreyTorchvisionDataModule):
    """697,932 + 116,323 handwritten digits and letters of 28×28 pixels, 62 classes.

    Cohen et al., "EMNIST: Extending MNIST to handwritten letters" (2017), split "by
    class". LEAF's FEMNIST is made of the same handwriting; this is its stand-in where
    LEAF's script hasn't run. Classes have the same order: digits, capitals, small
    letters. It differs in three ways: writers are not known, ink is 1 and paper 0, and
    the files hold images transposed, which are given out upright.

    All images are in memory: 0.6 GB, twice that while they are read; a download is 0.5
    GB. Mean and standard deviation are about those in common use, 0.174 and 0.332.

    `data_dir` holds, or will hold, `EMNIST/raw`; see `GreyTorchvisionDataModule` for
    all arguments.
    """

    _source = TorchvisionSource(
        name="EMNIST",
        reader=partial(EMNIST, split="byclass"),
        folder="EMNIST/raw",
        files="the four files named emnist-byclass-*-ubyte",
        url="https://www.nist.gov/itl/products-and-services/emnist-dataset",
    )
    _classes = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)
    _moments = ((0.174,), (0.332,))

    def _read(self, *, train: bool = False) -> ImageArrays:
        stored = super()._read(train=train)
        return stored._replace(images=stored.images.transpose(2, 3).contiguous())
