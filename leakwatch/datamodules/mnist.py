"""MNIST through torchvision."""

from __future__ import annotations

from typing import final

from torchvision.datasets import MNIST

from leakwatch.datamodules.torchvision_base import (
    GreyTorchvisionDataModule,
    TorchvisionSource,
)


@final
class MNISTDataModule(GreyTorchvisionDataModule):
    """60,000 + 10,000 handwritten digits of 28×28 pixels (LeCun et al. 1998).

    `data_dir` holds, or will hold, `MNIST/raw`; see `GreyTorchvisionDataModule` for
    all arguments.
    """

    _source = TorchvisionSource(
        name="MNIST",
        reader=MNIST,
        folder="MNIST/raw",
        files="the four files named *-ubyte.gz",
        url="https://ossci-datasets.s3.amazonaws.com/mnist/",
    )
    _classes = tuple("0123456789")
    _moments = ((0.1307,), (0.3081,))
