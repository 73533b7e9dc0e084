from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from leakwatch.datamodules import ImageFolderDataModule, ImageNetDataModule


def write(root: Path, classes: list[str], n: int, start: int = 0) -> None:
    """Grey level start + i for the i-th of all images, as JPEG files."""
    for c, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for i in range(n):
            level = start + c * n + i
            image = Image.fromarray(np.full((10, 12, 3), level, np.uint8))
            image.save(root / name / f"{i:02d}.JPEG", quality=100)


def levels(dataset: Any) -> list[int]:
    return [round(float(dataset[i][0].mean()) * 255) for i in range(len(dataset))]


def plain(root: Path, **kwargs: Any) -> ImageFolderDataModule:
    return ImageFolderDataModule(
        str(root), **{"image_size": 4, "normalize": False, **kwargs}
    )


def test_one_folder_is_split(tmp_path: Path) -> None:
    write(tmp_path, ["cat", "ant", "bee"], 5)
    data = plain(tmp_path, val_fraction=0.2)
    assert (data.num_classes, data.class_names) == (3, ("ant", "bee", "cat"))
    assert data.image_shape == (3, 4, 4)
    data.setup()
    assert data.val_dataset.targets.tolist() == [0, 1, 2]
    assert sorted(levels(data.train_dataset) + levels(data.val_dataset)) == list(
        range(15)
    )
    # cat was written first
    assert all(
        level // 5 == {0: 1, 1: 2, 2: 0}[label]
        for level, label in zip(
            levels(data.train_dataset), data.train_dataset.targets.tolist(), strict=True
        )
    )
    seeds = [0, 0, 1, 2]
    found = []
    for seed in seeds:
        again = plain(tmp_path, val_fraction=0.2, seed=seed)
        again.setup()
        found.append(levels(again.val_dataset))
    assert found[0] == found[1] == levels(data.val_dataset)
    assert any(other != found[0] for other in found)
    with pytest.raises(RuntimeError, match="has no test images"):
        data.test_dataloader()


def test_splits_of_their_own(tmp_path: Path) -> None:
    write(tmp_path / "train", ["a", "b"], 4)
    write(tmp_path / "val", ["a", "b"], 2, 100)
    write(tmp_path / "test", ["b"], 1, 200)
    data = plain(tmp_path, subset=4)
    data.prepare_data()
    data.setup()
    assert levels(data.train_dataset) == [0, 1, 4, 5]
    assert levels(data.val_dataset) == [100, 101, 102, 103]
    assert levels(data.test_dataset) == [200]
    assert data.test_dataset.targets.tolist() == [1]
    batch = next(iter(data.val_dataloader()))
    assert batch[0].shape == (4, 3, 4, 4)


def test_probes_are_never_augmented(tmp_path: Path) -> None:
    write(tmp_path, ["a", "b"], 3)
    image = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)
    Image.fromarray(image).save(tmp_path / "a" / "00.png")
    data = plain(tmp_path, val_fraction=0.34, augment=True)
    data.setup()
    assert data.probe_dataset.paths == data.train_dataset.paths
    index = next(i for i, p in enumerate(data.probe_dataset.paths) if "png" in p)
    probe = data.probe_dataset[index][0]
    torch.manual_seed(0)
    assert torch.equal(probe, data.probe_dataset[index][0])
    assert not torch.equal(probe, data.train_dataset[index][0])


def test_moments(tmp_path: Path) -> None:
    write(tmp_path, ["a", "b"], 2)
    colour = ImageFolderDataModule(str(tmp_path))
    assert colour.mean == (0.485, 0.456, 0.406)
    grey = ImageFolderDataModule(str(tmp_path), channels=1, image_size=4)
    assert (grey.mean, grey.std) == ((0.449,), (0.226,))
    own = ImageFolderDataModule(
        str(tmp_path), 4, 1, mean=[0.5], std=[0.2], val_fraction=0.5
    )
    own.setup()
    x, _ = own.probe_dataset[0]
    assert x.shape == (1, 4, 4)
    expected = torch.full((1, 4, 4), (levels_of(own, 0) / 255 - 0.5) / 0.2)
    torch.testing.assert_close(x, expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match=r"mean must be 3 finite number\(s\)"):
        ImageFolderDataModule(str(tmp_path), mean=[0.5])


def levels_of(data: ImageFolderDataModule, index: int) -> int:
    path = Path(data.probe_dataset.paths[index])
    return {"a": 0, "b": 2}[path.parent.name] + int(path.stem)


def test_hidden_and_foreign_files_do_not_count(tmp_path: Path) -> None:
    write(tmp_path, ["a", "b", ".cache"], 3)
    (tmp_path / "a" / "._00.JPEG").write_text("a Mac's")
    (tmp_path / "a" / "notes.txt").write_text("mine")
    (tmp_path / "b" / "more").mkdir()
    Image.new("RGB", (4, 4), (9, 9, 9)).save(tmp_path / "b" / "more" / "x.PNG")
    data = plain(tmp_path, val_fraction=0.34)
    data.setup()
    assert data.class_names == ("a", "b")
    assert sorted(levels(data.train_dataset) + levels(data.val_dataset)) == [
        0,
        1,
        2,
        3,
        4,
        5,
        9,
    ]


def test_missing_folders(tmp_path: Path) -> None:
    layout = "<class>/<image>.jpg, or .*/train/<class>/<image>.jpg"
    with pytest.raises(FileNotFoundError, match=f"There is no folder .*{layout}"):
        plain(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=f"holds no class folders.*{layout}"):
        plain(tmp_path)
    Image.new("RGB", (4, 4)).save(tmp_path / "x.jpg")
    with pytest.raises(FileNotFoundError, match="are not sorted into classes"):
        plain(tmp_path)
    write(tmp_path, ["a"], 1)
    with pytest.raises(ValueError, match=r"one class folder, 'a'; .* at least 2"):
        plain(tmp_path)
    (tmp_path / "b").mkdir()
    with pytest.raises(FileNotFoundError, match=f"no images of the class b .*{layout}"):
        plain(tmp_path).setup()


def test_a_validation_class_that_was_never_trained(tmp_path: Path) -> None:
    write(tmp_path / "train", ["a", "b"], 2)
    write(tmp_path / "val", ["a", "c"], 1)
    with pytest.raises(ValueError, match="no class of the training images: c"):
        plain(tmp_path).setup()


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"image_size": 0}, ValueError, "image_size must be at least 1"),
        ({"channels": 2}, ValueError, "channels must be 3"),
        ({"crop": 2.0}, ValueError, "crop must lie in"),
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1"),
    ],
)
def test_bad_arguments(
    kwargs: dict[str, Any], error: type[Exception], match: str, tmp_path: Path
) -> None:
    write(tmp_path, ["a", "b"], 1)
    with pytest.raises(error, match=match):
        plain(tmp_path, **kwargs)


def test_imagenet(tmp_path: Path) -> None:
    ids = ["n01440764", "n01443537", "n01484850"]
    write(tmp_path / "train", ids, 4)
    write(tmp_path / "val", ids, 2, 100)
    data = ImageNetDataModule(str(tmp_path), image_size=4, normalize=False, subset=6)
    data.prepare_data()
    data.setup()
    assert data.class_names == tuple(ids)
    assert levels(data.train_dataset) == [0, 1, 4, 5, 8, 9]
    assert levels(data.val_dataset) == [100, 101, 102, 103, 104, 105]
    assert data.val_dataset.targets.tolist() == [0, 0, 1, 1, 2, 2]
    assert data.test_dataset is None


def test_the_whole_imagenet_has_english_names(tmp_path: Path) -> None:
    for i in range(1000):
        (tmp_path / "train" / f"n{i:08d}").mkdir(parents=True)
    write(tmp_path / "val", ["n00000000", "n00000999"], 1)
    data = ImageNetDataModule(str(tmp_path))
    assert (data.num_classes, data.image_shape) == (1000, (3, 224, 224))
    assert data.class_names[0] == "tench"
    assert data.class_names[999] == "toilet tissue"


def test_imagenet_as_it_is_unpacked(tmp_path: Path) -> None:
    layout = r"Expected .*/train/<WordNet id>/<image>.JPEG and .*image-net.org"
    with pytest.raises(FileNotFoundError, match=layout):
        ImageNetDataModule(str(tmp_path))
    write(tmp_path / "train", ["n01440764", "n01443537"], 1)
    (tmp_path / "val").mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "val" / "ILSVRC2012_val_00000001.JPEG")
    with pytest.raises(FileNotFoundError, match=f"not sorted into classes. {layout}"):
        ImageNetDataModule(str(tmp_path))
