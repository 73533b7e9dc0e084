"""Fashion-MNIST through torchvision."""

from __future__ import annotations

from typing import final

from torchvision.datasets import FashionMNIST

from leakwatch.datamodules.torchvision_base import (
    GreyTorchvisionDataModule,
    TorchvisionSource,
)

_CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)


@final
class FashionMNISTDataModule(GreyTorchvisionDataModule):
    """60,000 + 10,000 pieces of clothing, 28×28 pixels (Xiao et al. 2017).

    `data_dir` holds, or will hold, `FashionMNIST/raw`; see
    `GreyTorchvisionDataModule` for all arguments.
    """

    _source = TorchvisionSource(
        name="Fashion-MNIST",
        reader=FashionMNIST,
        folder="FashionMNIST/raw",
        files="the four files named *-ubyte.gz",
        url="https://github.com/zalandoresearch/fashion-mnist",
    )
    _classes = _CLASSES
    _moments = ((0.2860,), (0.3530,))
