"""CIFAR-100 through torchvision."""

from __future__ import annotations

from typing import final

from torchvision.datasets import CIFAR100

from leakwatch.datamodules.torchvision_base import (
    TorchvisionDataModule,
    TorchvisionSource,
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
class CIFAR100DataModule(TorchvisionDataModule):
    """50,000 + 10,000 colour photographs of 32×32 pixels in 100 classes.

    Krizhevsky, "Learning Multiple Layers of Features from Tiny Images" (2009), with
    the fine labels. `data_dir` holds, or will hold, `cifar-100-python`; see
    `TorchvisionDataModule` for all arguments.
    """

    _source = TorchvisionSource(
        name="CIFAR-100",
        reader=CIFAR100,
        folder="cifar-100-python",
        files="cifar-100-python.tar.gz",
        url="https://www.cs.toronto.edu/~kriz/cifar.html",
    )
    _classes = tuple(_NAMES.split())
    _shape = (3, 32, 32)
    _moments = ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
