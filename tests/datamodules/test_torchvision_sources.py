from __future__ import annotations

import hashlib
import os
import pickle
import struct
import warnings
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
import pytest
import torch
from torchvision import datasets

from leakwatch.datamodules import (
    CIFAR10DataModule,
    CIFAR100DataModule,
    FashionMNISTDataModule,
    MNISTDataModule,
)
from leakwatch.datamodules.torchvision_base import TorchvisionSource

GREY = [
    pytest.param(MNISTDataModule, "MNIST", id="mnist"),
    pytest.param(FashionMNISTDataModule, "FashionMNIST", id="fashion-mnist"),
]
TEST_DATA = os.environ.get("LEAKWATCH_TEST_DATA")
needs_data = pytest.mark.skipif(
    TEST_DATA is None, reason="LEAKWATCH_TEST_DATA names no folder with real data"
)


def write_idx(path: Path, array: np.ndarray[Any, Any]) -> None:
    header = struct.pack(">HBB", 0, 8, array.ndim)
    sizes = struct.pack(f">{array.ndim}I", *array.shape)
    path.write_bytes(header + sizes + array.tobytes())


def write_mnist(root: Path, folder: str) -> None:
    raw = root / folder / "raw"
    raw.mkdir(parents=True)
    for prefix, n, start in (("train", 40, 0), ("t10k", 20, 100)):
        index = np.arange(start, start + n, dtype=np.uint8)
        images = np.broadcast_to(index[:, None, None], (n, 28, 28))
        write_idx(raw / f"{prefix}-images-idx3-ubyte", images)
        write_idx(raw / f"{prefix}-labels-idx1-ubyte", index % 10)


def write_cifar(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five training batches of 8 images and one of test, as Python 2 wrote them."""
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    sums: dict[str, str] = {}

    def dump(name: str, content: object) -> None:
        # NumPy of that time wrote its dtype flags as the integers 0 and 1
        data = pickle.dumps(content, protocol=2).replace(b"\x89\x88\x87", b"K\0K\1\x87")
        (folder / name).write_bytes(data)
        sums[name] = hashlib.md5(data, usedforsecurity=False).hexdigest()

    names = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
    for number, name in enumerate(names):
        images = np.zeros((8, 3, 32, 32), np.uint8)
        images[:, 0] = np.arange(8 * number, 8 * number + 8)[:, None, None]
        images[:, 1, 5, 7] = 255
        labels = [i % 2 for i in range(8)]
        dump(name, {"data": images.reshape(8, 3072), "labels": labels})
    dump("batches.meta", {"label_names": ["x"] * 10})
    cifar = datasets.CIFAR10
    monkeypatch.setattr(cifar, "train_list", [[n, sums[n]] for n in names[:5]])
    monkeypatch.setattr(cifar, "test_list", [[names[5], sums[names[5]]]])
    monkeypatch.setattr(cifar, "meta", {**cifar.meta, "md5": sums["batches.meta"]})


def write_cifar100(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """200 images to train on and 100 to test, in one file each."""
    folder = root / "cifar-100-python"
    folder.mkdir(parents=True)
    sums: dict[str, str] = {}

    def dump(name: str, content: object) -> None:
        data = pickle.dumps(content, protocol=2)
        (folder / name).write_bytes(data)
        sums[name] = hashlib.md5(data, usedforsecurity=False).hexdigest()

    for name, n, channel in (("train", 200, 0), ("test", 100, 2)):
        images = np.zeros((n, 3, 32, 32), np.uint8)
        images[:, channel] = np.arange(n)[:, None, None]
        fine = [i % 100 for i in range(n)]
        dump(
            name,
            {
                "data": images.reshape(n, 3072),
                "filenames": [f"{i}.png" for i in range(n)],
                "fine_labels": fine,
                "coarse_labels": [label // 5 for label in fine],
                "batch_label": f"{name}ing batch 1 of 1",
            },
        )
    names = list(CIFAR100DataModule().class_names)
    dump("meta", {"fine_label_names": names, "coarse_label_names": ["x"] * 20})
    cifar = datasets.CIFAR100
    monkeypatch.setattr(cifar, "train_list", [["train", sums["train"]]])
    monkeypatch.setattr(cifar, "test_list", [["test", sums["test"]]])
    monkeypatch.setattr(cifar, "meta", {**cifar.meta, "md5": sums["meta"]})


@pytest.mark.parametrize(("module", "folder"), GREY)
def test_idx_files(module: Any, folder: str, tmp_path: Path) -> None:
    write_mnist(tmp_path, folder)
    data = module(str(tmp_path), download=False, val_fraction=0.25)
    data.prepare_data()
    data.setup()
    images = torch.cat([data.train_dataset.images, data.val_dataset.images])
    labels = torch.cat([data.train_dataset.targets, data.val_dataset.targets])
    assert images.shape == (40, *data.image_shape)
    assert images.dtype == torch.uint8
    assert sorted(images[:, 0, 0, 0].tolist()) == list(range(40))
    assert torch.equal(images[:, 0, 3, 4].long() % 10, labels)
    assert data.val_dataset.targets.bincount().tolist() == [1] * 10
    assert data.test_dataset.images[:, 0, 0, 0].tolist() == list(range(100, 120))
    x, y = data.test_dataset[3]
    expected = (103 / 255 - data.mean[0]) / data.std[0]
    torch.testing.assert_close(
        x, torch.full((1, 28, 28), expected), rtol=1e-5, atol=1e-6
    )
    assert y == 3


def test_cifar_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar(tmp_path, monkeypatch)
    data = CIFAR10DataModule(str(tmp_path), download=False, val_fraction=0.25)
    data.prepare_data()
    data.setup()
    images = torch.cat([data.train_dataset.images, data.val_dataset.images])
    assert images.shape == (40, *data.image_shape)
    assert sorted(images[:, 0, 0, 0].tolist()) == list(range(40))
    assert (images[:, 1, 5, 7] == 255).all()
    assert images[:, 1].long().sum() == 40 * 255
    assert images[:, 2].count_nonzero() == 0
    assert data.train_dataset.targets.dtype == torch.int64
    assert data.train_dataset.targets.bincount().tolist() == [15, 15]
    assert data.test_dataset.images[:, 0, 0, 0].tolist() == list(range(40, 48))


def test_cifar100_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar100(tmp_path, monkeypatch)
    data = CIFAR100DataModule(
        str(tmp_path), download=False, val_fraction=0.5, subset=50, augment=True
    )
    data.prepare_data()
    data.setup()
    # one image of each class on either side, and of those the first 50 classes
    assert sorted(data.probe_dataset.targets.tolist()) == list(range(50))
    assert sorted(data.val_dataset.targets.tolist()) == list(range(50))
    found = torch.cat([data.train_dataset.images, data.val_dataset.images])
    assert sorted(found[:, 0, 7, 9].tolist()) == [*range(50), *range(100, 150)]
    assert found[:, 1:].count_nonzero() == 0
    x, y = data.test_dataset[49]
    expected = [
        (value - mean) / std
        for value, mean, std in zip((0, 0, 49 / 255), data.mean, data.std, strict=True)
    ]
    torch.testing.assert_close(x[:, 3, 4], torch.tensor(expected), rtol=1e-5, atol=1e-6)
    assert y == 49
    probe = data.probe_dataset[20][0]
    assert torch.equal(probe, data.probe_dataset[20][0])
    torch.manual_seed(0)
    assert any(not torch.equal(probe, data.train_dataset[20][0]) for _ in range(5))


def test_cifar100_class_names_are_in_the_order_of_the_labels() -> None:
    names = CIFAR100DataModule().class_names
    assert len(names) == 100
    assert list(names) == sorted(set(names))
    assert (names[0], names[8], names[99]) == ("apple", "bicycle", "worm")


def warning_source(message: str) -> TorchvisionSource:
    def reader(root: str, *, train: bool, download: bool) -> object:
        warnings.warn(message, UserWarning, stacklevel=2)
        return object()

    return TorchvisionSource("Toy", reader, "toy", "files", "https://example.org")


def test_only_the_warning_about_old_pickles_is_silenced(tmp_path: Path) -> None:
    old = "dtype(): align should be passed as Python or NumPy boolean"
    warning_source(old).fetch(tmp_path, download=False)
    with pytest.warns(UserWarning, match="another"):
        warning_source("another").fetch(tmp_path, download=False)


def test_only_photographs_are_augmented_and_when_asked_for() -> None:
    assert not CIFAR10DataModule().augment
    assert CIFAR10DataModule(augment=True).augment
    assert not MNISTDataModule().augment
    with pytest.raises(TypeError, match="augment"):
        MNISTDataModule(augment=True)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("module", "folder"),
    [
        *GREY,
        (CIFAR10DataModule, "cifar-10-batches-py"),
        (CIFAR100DataModule, "cifar-100-python"),
    ],
)
def test_missing_files(module: Any, folder: str, tmp_path: Path) -> None:
    data = module(str(tmp_path), download=False)
    for step in (data.prepare_data, data.setup):
        with pytest.raises(FileNotFoundError) as caught:
            step()
        text = str(caught.value)
        assert str(tmp_path / folder) in text
        assert "download=False" in text
        assert "https://" in text
        assert "\n" not in text


@pytest.mark.parametrize(
    ("module", "reader"),
    [
        (MNISTDataModule, datasets.MNIST),
        (FashionMNISTDataModule, datasets.FashionMNIST),
        (CIFAR10DataModule, datasets.CIFAR10),
        (CIFAR100DataModule, datasets.CIFAR100),
    ],
)
def test_failed_download(
    module: Any, reader: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(self: object) -> None:
        raise URLError("no\nnetwork")

    monkeypatch.setattr(reader, "download", offline)
    with pytest.raises(
        FileNotFoundError, match=r"could not be downloaded .*no network"
    ):
        module(str(tmp_path)).prepare_data()


def test_truncated_file(tmp_path: Path) -> None:
    write_mnist(tmp_path, "MNIST")
    path = tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(FileNotFoundError, match="MNIST can't be read"):
        MNISTDataModule(str(tmp_path), download=False).setup()


def test_class_names_are_torchvisions() -> None:
    assert FashionMNISTDataModule().class_names == tuple(datasets.FashionMNIST.classes)
    assert MNISTDataModule().class_names == tuple("0123456789")
    assert len(CIFAR10DataModule().class_names) == CIFAR10DataModule().num_classes == 10


@needs_data
@pytest.mark.parametrize(("module", "folder"), GREY)
def test_real_data_has_the_stated_moments(module: Any, folder: str) -> None:
    assert TEST_DATA is not None
    data = module(TEST_DATA, download=False)
    data.prepare_data()
    data.setup()
    assert len(data.train_dataset) + len(data.val_dataset) == 60_000
    assert len(data.val_dataset) == pytest.approx(6_000, abs=10)
    assert len(data.test_dataset) == 10_000
    images = torch.cat([data.train_dataset.images, data.val_dataset.images])
    pixels = images.float() / 255
    torch.testing.assert_close(
        torch.stack([pixels.mean(), pixels.std()]),
        torch.tensor([data.mean[0], data.std[0]]),
        rtol=0.0,
        atol=1e-3,
    )
