"""CIFAR-100 through torchvision."""

from __future__ import annotations

from typing import final

from torchvision.datasets import CIFAR100

from leakwatch.datamodules.base import ImageDataModule, Splits
from leakwatch.datamodules.sources import TorchvisionSource

_SOURCE = TorchvisionSource(
    name="CIFAR-100",
    reader=CIFAR100,
    folder="cifar-100-python",
    files="cifar-100-python.tar.gz",
    url="https://www.cs.toronto.edu/~kriz/cifar.html",
)
_NAMES = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge
bus butterfly camel can castle caterpillar cattle chair chimpanzee clock cloud
cockroach couch crab crocodile cup dinosaur dolphin elephant flatfish forest fox
girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man
maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree
pear pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray
road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel
streetcar sunflower sweet_pepper table tank telephone television tiger tractor train
trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""


@final
class CIFAR100DataModule(ImageDataModule):
    """50,000 + 10,000 colour photographs of 32×32 pixels in 100 classes.

    Krizhevsky, "Learning Multiple Layers of Features from Tiny Images" (2009), with
    the fine labels.

    Args:
        data_dir: Folder that holds, or will hold, `cifar-100-python`.
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
            class_names=tuple(_NAMES.split()),
            image_shape=(3, 32, 32),
            mean=(0.5071, 0.4865, 0.4409),
            std=(0.2673, 0.2564, 0.2762),
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
