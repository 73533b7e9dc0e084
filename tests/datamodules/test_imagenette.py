from __future__ import annotations

import hashlib
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import Imagenette

from leakwatch.datamodules import ImageNetteDataModule, ImageWoofDataModule
from leakwatch.datamodules import imagenette as module_under_test
from leakwatch.datamodules.imagenette import Archive

BOTH = pytest.mark.parametrize(
    ("module", "stem", "ids"),
    [
        (ImageNetteDataModule, "imagenette2", tuple(module_under_test._NETTE)),
        (ImageWoofDataModule, "imagewoof2", tuple(module_under_test._WOOF)),
    ],
    ids=["imagenette", "imagewoof"],
)


def write(root: Path, ids: tuple[str, ...]) -> None:
    """Three training images and one for validation of each class."""
    for split, n in (("train", 3), ("val", 1)):
        for c, name in enumerate(ids):
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(n):
                level = 20 * c + i + 10 * (split == "val")
                image = Image.fromarray(np.full((16, 20, 3), level, np.uint8))
                image.save(folder / f"{name}_{i}.JPEG", quality=100)
    (root / "noisy.csv").write_text("path,label\n")


def pack(root: Path, stem: str, ids: tuple[str, ...], server: Path) -> Path:
    write(root / stem, ids)
    server.mkdir(exist_ok=True)
    path = server / f"{stem}.tgz"
    with tarfile.open(path, "w:gz") as archive:
        archive.add(root / stem, stem)
    return path


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(
        module_under_test, "_SERVER", (tmp_path / "server").as_uri() + "/"
    )
    monkeypatch.setattr(module_under_test, "_SUMS", {})
    return tmp_path / "server"


@BOTH
def test_folder_that_is_there(
    module: Any, stem: str, ids: tuple[str, ...], tmp_path: Path
) -> None:
    write(tmp_path / f"{stem}-320", ids)
    data = module(
        str(tmp_path),
        resolution="320px",
        download=False,
        image_size=8,
        normalize=False,
        subset=20,
    )
    data.prepare_data()
    data.setup()
    assert (data.num_classes, data.image_shape) == (10, (3, 8, 8))
    assert data.train_dataset.targets.bincount().tolist() == [2] * 10
    assert data.val_dataset.targets.tolist() == list(range(10))
    assert data.test_dataset is None
    for dataset, offset in ((data.probe_dataset, 1), (data.val_dataset, 10)):
        x, y = dataset[len(dataset) - 1]
        expected = torch.full((3, 8, 8), (180 + offset) / 255)
        torch.testing.assert_close(x, expected, rtol=0.0, atol=1.01 / 255)
        assert y == 9


@BOTH
def test_download(
    module: Any,
    stem: str,
    ids: tuple[str, ...],
    tmp_path: Path,
    server: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    archive = pack(tmp_path / "origin", f"{stem}-160", ids, server)
    data = module(str(tmp_path / "data"))
    data.prepare_data()
    data.setup()
    assert len(data.train_dataset) == 30
    assert [p.name for p in (tmp_path / "data").iterdir()] == [f"{stem}-160"]
    archive.unlink()
    module(str(tmp_path / "data")).prepare_data()


@BOTH
def test_without_a_network(
    module: Any,
    stem: str,
    ids: tuple[str, ...],
    tmp_path: Path,
    server: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    root = tmp_path / "data"
    for step in (module(str(root)).prepare_data, module(str(root)).setup):
        with pytest.raises(FileNotFoundError) as caught:
            step()
        text = str(caught.value)
        assert f"{root}/{stem}-160/{{train,val}}/<WordNet id>/<image>.JPEG" in text
        assert f"{stem}-160.tgz" in text
        assert "download=False" in text
        assert "\n" not in text
    assert list(root.iterdir()) == []


def test_a_damaged_download_leaves_nothing(
    tmp_path: Path, server: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = tuple(module_under_test._WOOF)
    archive = pack(tmp_path / "origin", "imagewoof2-160", ids, server)
    archive.write_bytes(archive.read_bytes()[:-200])
    with pytest.raises(FileNotFoundError, match="could not be downloaded"):
        ImageWoofDataModule(str(tmp_path / "data")).prepare_data()
    assert list((tmp_path / "data").iterdir()) == []


@pytest.mark.parametrize("right", [True, False])
def test_the_sum_is_checked(
    right: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = pack(tmp_path / "origin", "toy", ("a", "b"), tmp_path / "server")
    md5 = hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
    archive = Archive(
        "Toy", path.as_uri(), "toy", "<class>", md5 if right else "0" * 32
    )
    if right:
        assert (archive.fetch(tmp_path, download=True) / "train" / "a").is_dir()
    else:
        with pytest.raises(FileNotFoundError, match="Toy could not be downloaded"):
            archive.fetch(tmp_path / "data", download=True)
        assert not (tmp_path / "data" / "toy").exists()


def test_a_class_is_missing(tmp_path: Path) -> None:
    write(tmp_path / "imagenette2-160", tuple(module_under_test._NETTE)[:9])
    data = ImageNetteDataModule(str(tmp_path), download=False)
    with pytest.raises(FileNotFoundError, match="no images of the class n03888257"):
        data.setup()


def test_names_and_sums_are_torchvisions() -> None:
    names = {key: value[0] for key, value in Imagenette._WNID_TO_CLASS.items()}
    assert names == module_under_test._NETTE
    stated = {Path(url).stem: md5 for url, md5 in Imagenette._ARCHIVES.values()}
    assert stated == module_under_test._SUMS
    for ids in (module_under_test._NETTE, module_under_test._WOOF):
        assert list(ids) == sorted(ids)
        assert len(ids) == 10


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"resolution": "64px"}, "'160px', '320px', 'full', got '64px'"),
        ({"crop": 0}, "crop must lie in"),
        ({"image_size": 0}, "image_size must be at least 1"),
    ],
)
def test_bad_arguments(kwargs: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        ImageNetteDataModule(**kwargs)
