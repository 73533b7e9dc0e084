"""FEMNIST from the files that LEAF makes: handwriting, by writer."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Literal, final

import torch
from jaxtyping import Int
from torch import Tensor

from leakwatch.checks import check_choice, check_integer
from leakwatch.datamodules.base import ImageDataModule, Splits
from leakwatch.datamodules.dataset import ImageArrays, ImageDataset
from leakwatch.datamodules.leaf import LeafSamples, read_leaf

_CLASSES = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)
_SIDE = 28


@final
class FEMNISTDataModule(ImageDataModule):
    """Digits and letters of 28×28 pixels in 62 classes, from about 3,600 writers.

    Caldas et al., "LEAF: A Benchmark for Federated Settings" (2018). There is no
    download: LEAF's script makes the files, which must lie in

        data_dir/train/*.json
        data_dir/test/*.json        (may be missing)

    Each file is `{"users": [...], "num_samples": [...], "user_data": {user: {"x":
    [[784 pixels in 0 … 1], …], "y": [labels]}}}`. As LEAF writes them, paper is 1 and
    ink 0. After `setup`, `writers`, `samples_per_writer` and `writer_indices` say
    whose the samples are, so that each writer can be one client.

    Args:
        data_dir: Folder that holds `train`.
        batch_size: Samples per batch.
        num_workers: Loader processes.
        seed: Of the validation split, which takes its share of each class.
        val_fraction: Share of the training data that becomes validation data.
        subset: At most this many samples of each split, evenly by class.
        max_writers: Read only so many writers, the first in the order of the files;
            of the test files the same ones, or its own first where LEAF was asked to
            split by writer. None: all, which takes minutes for the whole data set.
        normalize: Give out (pixel − 0.96) / 0.16, about the mean and standard
            deviation of the data set; False: pixels in [0, 1].

    Raises:
        TypeError: An argument of the wrong kind.
        ValueError: An argument out of range; from `setup`: a file that is not as
            described.
        FileNotFoundError: From `prepare_data` and `setup`: files missing.
    """

    def __init__(
        self,
        data_dir: str = "data/femnist",
        batch_size: int = 64,
        num_workers: int = 0,
        seed: int = 0,
        val_fraction: float = 0.1,
        subset: int | None = None,
        max_writers: int | None = None,
        normalize: bool = True,
    ) -> None:
        if max_writers is not None:
            check_integer("max_writers", max_writers, example=100)
        super().__init__(
            class_names=_CLASSES,
            image_shape=(1, _SIDE, _SIDE),
            mean=(0.96,),
            std=(0.16,),
            batch_size=batch_size,
            num_workers=num_workers,
            seed=seed,
            val_fraction=val_fraction,
            subset=subset,
            normalize=normalize,
        )
        self.data_dir = data_dir
        self.max_writers = max_writers
        self._names: tuple[str, ...] = ()

    def prepare_data(self) -> None:
        """Raise early when the files are not there."""
        folder = self._root / "train"
        if not any(folder.glob("*.json")):
            raise FileNotFoundError(
                f"FEMNIST is not in {self._root}: expected {folder}/*.json, and "
                f"{self._root}/test/*.json if you have them. Clone "
                "https://github.com/TalwalkarLab/leaf, run './preprocess.sh -s niid "
                "--sf 0.05 -k 0 -t sample' in its data/femnist (0.05 is the share of "
                "the data), and copy the folders train and test that it makes in "
                f"data/femnist/data to {self._root}, or pass their place as data_dir."
            )

    def load(self) -> Splits:
        """Read the files of both splits."""
        self.prepare_data()
        train = self._read("train", self.max_writers)
        names = {name: i for i, name in enumerate(train.writers)}
        test = None
        if any((self._root / "test").glob("*.json")):
            test = self._test(names)
        self._names = tuple(names)
        return Splits(
            ImageArrays(train.images, train.labels, train.owners), val=None, test=test
        )

    @property
    def writers(self) -> tuple[str, ...]:
        """Writers with a training sample left after split and subset.

        Raises:
            RuntimeError: Before `setup`.
        """
        return tuple(self.samples_per_writer)

    @property
    def samples_per_writer(self) -> dict[str, int]:
        """Number of training samples of each writer that has any.

        Raises:
            RuntimeError: Before `setup`.
        """
        counts = self._owners("train").bincount(minlength=len(self._names)).tolist()
        pairs = zip(self._names, counts, strict=True)
        return {name: count for name, count in pairs if count}

    def writer_indices(
        self, writer: str, split: Literal["train", "val", "test"] = "train"
    ) -> Int[Tensor, " m"]:
        """Return which samples of a split are of one writer, ascending.

        `torch.utils.data.Subset(data.probe_dataset, indices.tolist())` is then the
        data of one client.

        Args:
            writer: A name; those with training samples are in `writers`.
            split: "train" (also for `probe_dataset`), "val" or "test".

        Raises:
            RuntimeError: Before `setup`, or the data has no such split.
            ValueError: There is no such writer or split.
        """
        owners = self._owners(split)
        if writer not in self._names:
            first = ", ".join(self._names[:5])
            raise ValueError(
                f"There is no writer {writer!r}; there are {len(self._names)}: {first}"
                f"{', …' * (len(self._names) > 5)}."
            )
        return (owners == self._names.index(writer)).nonzero().flatten()

    @property
    def _root(self) -> Path:
        return Path(self.data_dir).expanduser()

    def _read(self, split: str, most: int | None) -> LeafSamples:
        return read_leaf(self._root / split, _SIDE, len(_CLASSES), most)

    def _test(self, names: dict[str, int]) -> ImageArrays:
        """The test samples; their writers join `names`."""
        stored = self._read("test", None)
        chosen = stored.writers
        if self.max_writers is not None:
            same = tuple(name for name in chosen if name in names)
            chosen = same or chosen[: self.max_writers]
        position = [
            names.setdefault(name, len(names)) if name in set(chosen) else -1
            for name in stored.writers
        ]
        groups = torch.tensor(position)[stored.owners]
        kept = (groups >= 0).nonzero().flatten()
        return ImageArrays(stored.images, stored.labels, groups).take(kept)

    def _owners(self, split: str) -> Int[Tensor, " n"]:
        datasets = {
            "train": self.probe_dataset,
            "val": self.val_dataset,
            "test": self.test_dataset,
        }
        check_choice("split", split, datasets)
        dataset = datasets[split]
        if not isinstance(dataset, ImageDataset) or dataset.groups is None:
            missing = (
                f"FEMNIST has no {split} images in {self._root}."
                if self.probe_dataset is not None
                else "FEMNISTDataModule is not set up: call prepare_data() and setup()."
            )
            raise RuntimeError(missing)
        return dataset.groups
