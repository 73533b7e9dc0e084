from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from leakwatch.datamodules import ArrayDataModule

TEST_DATA = os.environ.get("LEAKWATCH_TEST_DATA")


def content(**changes: Any) -> dict[str, Any]:
    """Return a good file's arrays; a change of None leaves the key out."""
    generator = np.random.default_rng(0)
    good = {
        "train_images": generator.integers(0, 256, (30, 6, 8, 3), dtype=np.uint8),
        "train_labels": np.arange(30) % 3,
        "test_images": generator.integers(0, 256, (9, 6, 8, 3), dtype=np.uint8),
        "test_labels": np.arange(9) % 3,
        "classes": np.array(["cat", "dog", "owl"]),
    }
    return {k: v for k, v in {**good, **changes}.items() if v is not None}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "mine.npz"


def module(path: Path, arrays: dict[str, Any], **kwargs: Any) -> ArrayDataModule:
    np.savez(path, **arrays)
    return ArrayDataModule(str(path), **kwargs)


def test_colour_images(path: Path) -> None:
    arrays = content()
    data = module(path, arrays, val_fraction=0.2)
    assert (data.image_shape, data.num_classes) == ((3, 6, 8), 3)
    assert data.class_names == ("cat", "dog", "owl")
    pixels = arrays["train_images"] / 255
    assert data.mean == pytest.approx(pixels.mean((0, 1, 2)))
    assert data.std == pytest.approx(pixels.std((0, 1, 2)))
    data.prepare_data()
    data.setup()
    assert data.train_dataset
    assert data.val_dataset
    assert data.test_dataset
    assert (len(data.train_dataset), len(data.val_dataset)) == (24, 6)
    x, y = data.test_dataset[4]
    expected = (arrays["test_images"][4] / 255 - data.mean) / data.std
    torch.testing.assert_close(
        x, torch.tensor(expected).permute(2, 0, 1).float(), rtol=1e-5, atol=1e-6
    )
    assert y == 1


def test_grey_images_without_a_channel_axis(path: Path) -> None:
    images = np.linspace(0, 1, 30 * 6 * 8, dtype=np.float64).reshape(30, 6, 8)
    data = module(
        path, content(train_images=images, test_images=None, test_labels=None)
    )
    assert data.image_shape == (1, 6, 8)
    assert data.mean == pytest.approx((0.5,))
    data.setup()
    assert data.test_dataset is None
    assert data.train_dataset
    assert data.train_dataset.images.dtype == torch.float32


def test_own_validation_split_and_column_labels(path: Path) -> None:
    arrays = content(
        train_labels=(np.arange(30, dtype=np.uint8) % 3)[:, None],
        val_images=np.zeros((6, 6, 8, 3), np.uint8),
        val_labels=np.arange(6) % 3,
    )
    data = module(path, arrays)
    data.setup()
    assert data.train_dataset
    assert data.val_dataset
    assert data.train_dataset.targets.tolist() == [i % 3 for i in range(30)]
    assert data.val_dataset.images.count_nonzero() == 0


def test_class_names_default_to_numbers(path: Path) -> None:
    data = module(path, content(classes=None))
    assert (data.num_classes, data.class_names) == (3, ("0", "1", "2"))


def test_given_moments(path: Path) -> None:
    data = module(path, content(), mean=[0.5, 0.4, 0.3], std=[1, 2, 3])
    assert (data.mean, data.std) == ((0.5, 0.4, 0.3), (1.0, 2.0, 3.0))


def test_constant_channel_is_not_divided_by_zero(path: Path) -> None:
    images = content()["train_images"]
    images[..., 1] = 7
    assert module(path, content(train_images=images)).std[1] == 1.0


IMAGES = content()["train_images"]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"train_images": None}, "has 'train_labels' but no 'train_images'"),
        ({"train_labels": None}, "has 'train_images' but no 'train_labels'"),
        (
            {"train_images": None, "train_labels": None},
            "no 'train_images'; it has classes, test_images, test_labels",
        ),
        ({"test_labels": None}, "has 'test_images' but no 'test_labels'"),
        ({"train_images": IMAGES[0, 0]}, r"\(N, H, W\) or .* got \(8, 3\)"),
        ({"train_images": IMAGES[:0]}, "with no side 0"),
        ({"train_images": IMAGES.transpose(0, 3, 1, 2)}, "looks like channels first"),
        ({"train_images": IMAGES.astype(float)}, r"in \[0, 1\], found 0 to 255"),
        ({"train_images": IMAGES / 255 - 0.5}, r"\[0, 1\], found -0.5 to 0.5"),
        ({"train_images": IMAGES * np.nan}, "found nan to nan"),
        ({"train_images": IMAGES.astype(int)}, "must be uint8 or float, got int64"),
        ({"test_images": IMAGES[:9, :5]}, r"are \(5, 8, 3\), train_images are \(6, 8"),
        ({"train_labels": np.arange(29) % 3}, "30 train_images, 29 train_labels"),
        ({"train_labels": np.eye(30)}, "one-hot labels: numpy.argmax"),
        ({"train_labels": np.arange(30) / 30}, "must be integers of shape"),
        ({"train_labels": np.arange(30) % 4}, "run from 0 to 3, expected 0 to 2"),
        ({"test_labels": np.arange(9) - 1}, "labels run from -1 to 7, expected 0 to 2"),
        ({"classes": np.array([["a", "b", "c"]])}, r"classes must be \(classes,\)"),
        (
            {"train_labels": np.zeros(30, int), "test_labels": None}
            | {"test_images": None, "classes": None},
            "at least 2 classes, found 1",
        ),
        ({"classes": np.array(["a", "b", None])}, "class names as strings"),
    ],
)
def test_faulty_files(path: Path, changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        module(path, content(**changes))


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"mean": [0.5]}, r"mean must be 3 finite number\(s\)"),
        ({"std": [1, 0, 1]}, "each above 0"),
        ({"std": [1, float("nan"), 1]}, "std must be finite"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
    ],
)
def test_bad_arguments(path: Path, kwargs: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        module(path, content(), **kwargs)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no file .*none.npz. Make one: numpy"):
        ArrayDataModule(str(tmp_path / "none.npz"))


@pytest.mark.parametrize("kind", ["text", "npy", "truncated", "empty"])
def test_not_an_archive(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "mine.npz"
    np.savez(path, **content())
    if kind == "npy":
        with path.open("wb") as file:
            np.save(file, np.zeros(3))
    else:
        good = path.read_bytes()
        path.write_bytes(
            {"text": b"hello", "truncated": good[:900], "empty": b""}[kind]
        )
    with pytest.raises(ValueError, match=r"not a \.npz archive of plain arrays"):
        ArrayDataModule(str(path))


@pytest.mark.skipif(
    TEST_DATA is None, reason="LEAKWATCH_TEST_DATA names no folder with real data"
)
def test_real_cifar() -> None:
    assert TEST_DATA is not None
    data = ArrayDataModule(str(Path(TEST_DATA) / "cifar10.npz"), subset=50)
    assert (data.image_shape, data.num_classes) == ((3, 32, 32), 10)
    assert data.mean == pytest.approx((0.4914, 0.4822, 0.4465), abs=0.01)
    assert data.std == pytest.approx((0.2470, 0.2435, 0.2616), abs=0.01)
    data.setup()
    assert data.train_dataset
    assert data.train_dataset.targets.bincount().tolist() == [5] * 10
