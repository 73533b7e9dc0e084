"""CIFAR-10 through torchvision."""

from __future__ import annotations

from typing import final

from torchvision.datasets import CIFAR10

from leakwatch.datamodules.torchvision_base import (
    TorchvisionDataModule,
    TorchvisionSource,
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
class CIFAR10DataModule(TorchvisionDataModule):
    """50,000 + 10,000 colour photographs of 32×32 pixels (Krizhevsky 2009).

    `data_dir` holds, or will hold, `cifar-10-batches-py`; see `TorchvisionDataModule`
    for all arguments.
    """

    _source = TorchvisionSource(
        name="CIFAR-10",
        reader=CIFAR10,
        folder="cifar-10-batches-py",
        files="cifar-10-python.tar.gz",
        url="https://www.cs.toronto.edu/~kriz/cifar.html",
    )
    _classes = _CLASSES
    _shape = (3, 32, 32)
    _moments = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
