"""EMNIST from files in their true format."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchvision.datasets import EMNIST

from leakwatch.datamodules import EMNISTDataModule, FEMNISTDataModule


def write(path: Path, array: np.ndarray[Any, Any]) -> None:
    sizes = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    path.write_bytes(sizes + array.tobytes())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """124 training and 62 test images; image i has i in its first row."""
    raw = tmp_path / "EMNIST" / "raw"
    raw.mkdir(parents=True)
    for part, n, start in (("train", 124, 0), ("test", 62, 150)):
        index = np.arange(start, start + n, dtype=np.uint8)
        images = np.zeros((n, 28, 28), np.uint8)
        images[:, :, 0] = index[:, None]  # stored transposed
        write(raw / f"emnist-byclass-{part}-images-idx3-ubyte", images)
        labels = np.arange(n, dtype=np.uint8) % 62
        write(raw / f"emnist-byclass-{part}-labels-idx1-ubyte", labels)
    return tmp_path


def test_files_are_read_upright(root: Path) -> None:
    data = EMNISTDataModule(str(root), download=False, val_fraction=0.5)
    data.prepare_data()
    data.setup()
    images = torch.cat([data.train_dataset.images, data.val_dataset.images])
    labels = torch.cat([data.train_dataset.targets, data.val_dataset.targets])
    assert images.shape == (124, 1, 28, 28)
    assert sorted(images[:, 0, 0, 27].tolist()) == list(range(124))
    assert images[:, :, 1:].count_nonzero() == 0
    assert torch.equal(images[:, 0, 0, 5].long() % 62, labels)
    assert data.val_dataset.targets.bincount().tolist() == [1] * 62
    x, y = data.test_dataset[3]
    torch.testing.assert_close(
        x[0, 0], torch.full((28,), (153 / 255 - 0.174) / 0.332), rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(
        x[0, 1:], torch.full((27, 28), -0.174 / 0.332), rtol=1e-5, atol=1e-6
    )
    assert y == 3


def test_classes_are_those_of_femnist_and_torchvision() -> None:
    names = EMNISTDataModule().class_names
    assert names == FEMNISTDataModule().class_names
    assert names == tuple(EMNIST.classes_split_dict["byclass"])


def test_missing_files_name_the_folder(tmp_path: Path) -> None:
    data = EMNISTDataModule(str(tmp_path), download=False)
    for step in (data.prepare_data, data.setup):
        with pytest.raises(FileNotFoundError, match="EMNIST/raw") as caught:
            step()
        assert "download=False" in str(caught.value)
        assert "https://" in str(caught.value)
