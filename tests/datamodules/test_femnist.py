from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Subset

from leakwatch.datamodules import FEMNISTDataModule

SIZES = {"f0001_41": 6, "f0002_07": 4, "f0003_11": 2}


def user(start: int, n: int) -> dict[str, Any]:
    """Image i is white but for its first pixel, i/255; its label is i mod 2."""
    images = [[(start + i) / 255] + [1.0] * 783 for i in range(n)]
    return {"x": images, "y": [(start + i) % 2 for i in range(n)]}


def write(path: Path, users: dict[str, dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "users": list(users),
        "num_samples": [len(data["y"]) for data in users.values()],
        "user_data": users,
    }
    path.write_text(json.dumps(content))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three writers in two files, as LEAF's script makes them."""
    stem = "all_data_{}_niid_0_keep_0_{}_9.json"
    users, start = {}, 0
    for name, n in SIZES.items():
        users[name] = user(start, n)
        start += n
    names = list(users)
    train, test = tmp_path / "train", tmp_path / "test"
    write(train / stem.format(0, "train"), {n: users[n] for n in names[:2]})
    write(train / stem.format(1, "train"), {names[2]: users[names[2]]})
    held = {name: user(100 + 10 * i, 2) for i, name in enumerate(names)}
    write(test / stem.format(0, "test"), held)
    return tmp_path


def ready(root: Path, **kwargs: Any) -> FEMNISTDataModule:
    data = FEMNISTDataModule(str(root), **{"val_fraction": 0.34, **kwargs})
    data.prepare_data()
    data.setup()
    return data


def ids(dataset: Any) -> list[int]:
    return dataset.images[:, 0, 0, 0].tolist()


def owner(sample: int) -> str:
    return next(n for n, last in zip(SIZES, (5, 9, 11), strict=True) if sample <= last)


def test_files_of_leaf(root: Path) -> None:
    data = ready(root)
    assert (data.num_classes, data.image_shape) == (62, (1, 28, 28))
    assert (data.class_names[9], data.class_names[10], data.class_names[61]) == (
        "9",
        "A",
        "z",
    )
    assert sorted(ids(data.train_dataset) + ids(data.val_dataset)) == list(range(12))
    assert data.val_dataset.targets.tolist().count(0) == 2
    assert ids(data.test_dataset) == [100, 101, 110, 111, 120, 121]
    assert data.train_dataset.images.dtype == torch.uint8
    x, y = data.test_dataset[3]
    expected = torch.full((1, 28, 28), (1 - 0.96) / 0.16)
    expected[0, 0, 0] = (111 / 255 - 0.96) / 0.16
    torch.testing.assert_close(x, expected, rtol=1e-5, atol=1e-6)
    assert y == 1


def test_samples_by_writer(root: Path) -> None:
    data = ready(root)
    for split, dataset in (
        ("train", data.probe_dataset),
        ("val", data.val_dataset),
    ):
        found = []
        for name in SIZES:
            indices = data.writer_indices(name, split)
            assert indices.tolist() == sorted(indices.tolist())
            samples = [ids(dataset)[i] for i in indices]
            assert {owner(sample) for sample in samples} <= {name}
            found += samples
        assert sorted(found) == sorted(ids(dataset))
    counts = data.samples_per_writer
    assert data.writers == tuple(counts)
    assert sum(counts.values()) == len(data.train_dataset) == 8
    assert counts == {
        name: len(data.writer_indices(name)) for name in counts if name in SIZES
    }
    held = data.writer_indices("f0002_07", "test")
    assert [ids(data.test_dataset)[i] for i in held] == [110, 111]


def test_one_writer_as_a_client(root: Path) -> None:
    data = ready(root)
    indices = data.writer_indices("f0001_41")
    client = Subset(data.probe_dataset, indices.tolist())
    assert len(client) == data.samples_per_writer["f0001_41"]
    assert torch.equal(client[0][0], data.probe_dataset[int(indices[0])][0])


def test_the_split_is_deterministic(root: Path) -> None:
    assert ids(ready(root).val_dataset) == ids(ready(root).val_dataset)
    splits = {tuple(ids(ready(root, seed=s).val_dataset)) for s in range(4)}
    assert len(splits) > 1


def test_only_so_many_writers(root: Path) -> None:
    data = ready(root, max_writers=2)
    assert sorted(ids(data.train_dataset) + ids(data.val_dataset)) == list(range(10))
    assert set(data.writers) == {"f0001_41", "f0002_07"}
    assert ids(data.test_dataset) == [100, 101, 110, 111]


def test_a_split_by_writer(root: Path) -> None:
    write(root / "test" / "all_data_0_niid_0_keep_0_test_9.json", {"g1": user(50, 2)})
    write(root / "test" / "all_data_1_niid_0_keep_0_test_9.json", {"g2": user(60, 2)})
    data = ready(root, max_writers=1)
    assert ids(data.test_dataset) == [50, 51]
    assert data.writer_indices("g1", "test").tolist() == [0, 1]
    assert data.writer_indices("g1").tolist() == []
    assert "g1" not in data.writers


def test_subset(root: Path) -> None:
    data = ready(root, subset=2)
    assert data.train_dataset.targets.tolist() == [0, 1]
    assert sum(data.samples_per_writer.values()) == 2


def test_pixels_that_are_no_255ths_are_kept(root: Path) -> None:
    data = {"x": [[0.1234] * 784], "y": [3]}
    write(root / "train" / "b.json", {"h": data, "nothing": {"x": [], "y": []}})
    module = ready(root, normalize=False)
    stored = [*module.train_dataset.images, *module.val_dataset.images]
    assert {image.dtype for image in stored} == {torch.float32}
    firsts = sorted(float(image[0, 0, 0]) for image in stored)
    assert firsts == pytest.approx(sorted([*(i / 255 for i in range(12)), 0.1234]))


def test_without_test_files(root: Path) -> None:
    for path in (root / "test").iterdir():
        path.unlink()
    data = ready(root)
    with pytest.raises(RuntimeError, match="has no test images"):
        data.test_dataloader()
    with pytest.raises(RuntimeError, match="FEMNIST has no test images"):
        data.writer_indices("f0001_41", "test")


def test_missing_files(tmp_path: Path) -> None:
    data = FEMNISTDataModule(str(tmp_path))
    for step in (data.prepare_data, data.setup):
        with pytest.raises(FileNotFoundError) as caught:
            step()
        text = str(caught.value)
        assert f"{tmp_path}/train/*.json" in text
        assert "github.com/TalwalkarLab/leaf" in text
        assert "\n" not in text


def test_before_setup_and_unknown_names(root: Path) -> None:
    with pytest.raises(RuntimeError, match="is not set up"):
        _ = FEMNISTDataModule(str(root)).writers
    data = ready(root)
    with pytest.raises(ValueError, match="no writer 'me'; there are 3: f0001_41, f000"):
        data.writer_indices("me")
    with pytest.raises(ValueError, match="'train', 'val', 'test', got 'all'"):
        data.writer_indices("f0001_41", "all")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("{", "is not JSON"),
        ("[]", "holds no object; a LEAF file is"),
        ('{"users": [], "num_samples": []}', "holds users, num_samples; a LEAF"),
        (
            '{"users": ["a"], "num_samples": [], "user_data": {}}',
            "1 users, 0 num_samples",
        ),
        (
            '{"users": ["a"], "num_samples": [1], "user_data": {}}',
            "user 'a' has no x and y",
        ),
        ('{"users": [], "num_samples": [], "user_data": {}}', "hold no sample"),
    ],
)
def test_damaged_files(text: str, match: str, tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "a.json").write_text(text)
    with pytest.raises(ValueError, match=match):
        FEMNISTDataModule(str(tmp_path)).setup()


@pytest.mark.parametrize(
    ("data", "match"),
    [
        ({"x": [[1.0] * 784], "y": [62]}, "integers from 0 to 61, got"),
        ({"x": [[1.0] * 784], "y": [0.5]}, "labels must be integers"),
        ({"x": [[1.0] * 783], "y": [0]}, r"the shape \(1, 783\), expected \(1, 784\)"),
        ({"x": [[1.0], [1.0, 1.0]], "y": [0, 1]}, "images of unequal length"),
        ({"x": [[255.0] * 784], "y": [0]}, "0 ... 1, found 255 to 255"),
        ({"x": [[float("nan")] * 784], "y": [0]}, "found nan to nan"),
        ({"x": [], "y": [0]}, "num_samples 1, but 0 images and 1 labels"),
    ],
)
def test_damaged_samples(data: dict[str, Any], match: str, tmp_path: Path) -> None:
    write(tmp_path / "train" / "a.json", {"a": data})
    with pytest.raises(ValueError, match=match):
        FEMNISTDataModule(str(tmp_path)).setup()


@pytest.mark.parametrize("given", [0, -1, True, 2.0, "all"])
def test_bad_max_writers(given: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=f"max_writers.*{given!r}"):
        FEMNISTDataModule(max_writers=given)
