"""ImageNette and ImageWoof: ten easy, and ten similar, classes of ImageNet."""

from __future__ import annotations

import hashlib
import tarfile
import tempfile
import zlib
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Literal, final

from torch.hub import download_url_to_file

from leakwatch.checks import check_choice
from leakwatch.datamodules.base import ImageDataModule, Splits
from leakwatch.datamodules.channels import imagenet_moments
from leakwatch.datamodules.files import ImageFiles, check_cut
from leakwatch.datamodules.folders import list_images

_FAILURES = (OSError, RuntimeError, EOFError, HTTPException, tarfile.TarError)

_Resolution = Literal["160px", "320px", "full"]
_SUFFIX = {"160px": "-160", "320px": "-320", "full": ""}
_SERVER = "https://s3.amazonaws.com/fast-ai-imageclas/"

# as torchvision has them; none is published for ImageWoof
_SUMS = {
    "imagenette2-160": "e793b78cc4c9e9a4ccc0c1155377a412",
    "imagenette2-320": "3df6f0d01a2c9592104656642f5e78a3",
    "imagenette2": "fe2fc210e6bb7c5664d602c3cd71e612",
}
_NETTE = {
    "n01440764": "tench",
    "n02102040": "English springer",
    "n02979186": "cassette player",
    "n03000684": "chain saw",
    "n03028079": "church",
    "n03394916": "French horn",
    "n03417042": "garbage truck",
    "n03425413": "gas pump",
    "n03445777": "golf ball",
    "n03888257": "parachute",
}
_WOOF = {
    "n02086240": "Shih-Tzu",
    "n02087394": "Rhodesian ridgeback",
    "n02088364": "beagle",
    "n02089973": "English foxhound",
    "n02093754": "Border terrier",
    "n02096294": "Australian terrier",
    "n02099601": "golden retriever",
    "n02105641": "Old English sheepdog",
    "n02111889": "Samoyed",
    "n02115641": "dingo",
}


@final
@dataclass(frozen=True)
class Archive:
    """A .tgz that unpacks to one folder.

    Args:
        name: Of the data set, for error texts.
        url: Where it is.
        folder: What it unpacks to, relative to `data_dir`.
        layout: What is inside that folder, for error texts.
        md5: Of the archive; None: only that it is complete is checked.
    """

    name: str
    url: str
    folder: str
    layout: str
    md5: str | None = None

    def hint(self, data_dir: str | Path) -> str:
        """Say where the files are expected and how they get there."""
        root = Path(data_dir).expanduser()
        return (
            f"Expected {root / self.folder}/{self.layout}: get {self.url}, unpack it "
            f"in {root}, and pass data_dir={str(data_dir)!r} and download=False; or "
            "pass download=True where there is a network."
        )

    def fetch(self, data_dir: str | Path, *, download: bool) -> Path:
        """Return the folder, after downloading it when allowed and missing.

        What fails halfway leaves nothing behind.

        Raises:
            FileNotFoundError: It is not there; the message gives the expected layout.
        """
        root = Path(data_dir).expanduser()
        folder = root / self.folder
        if folder.is_dir():
            return folder
        if not download:
            raise FileNotFoundError(
                f"{self.name} is not in {folder}. {self.hint(data_dir)}"
            )
        try:
            root.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=root) as place:
                file = Path(place, "archive.tgz")
                download_url_to_file(self.url, str(file))
                self._check(file)
                with tarfile.open(file) as archive:
                    archive.extractall(place, filter="data")
                Path(place, self.folder).rename(folder)
        except (*_FAILURES, zlib.error) as error:
            why = " ".join(str(error).split())
            raise FileNotFoundError(
                f"{self.name} could not be downloaded ({why}). {self.hint(data_dir)}"
            ) from error
        return folder

    def _check(self, file: Path) -> None:
        if self.md5 is None:
            return
        with file.open("rb") as content:
            md5 = hashlib.file_digest(
                content, lambda: hashlib.md5(usedforsecurity=False)
            ).hexdigest()
        if md5 != self.md5:
            raise OSError(f"its MD5 sum is {md5}, expected {self.md5}")


class _TenClasses(ImageDataModule):
    """What the two have in common: an archive with `train` and `val`."""

    def __init__(
        self,
        name: str,
        stem: str,
        classes: dict[str, str],
        *,
        data_dir: str,
        resolution: str,
        download: bool,
        image_size: int,
        crop: float,
        batch_size: int,
        num_workers: int,
        subset: int | None,
        normalize: bool,
        augment: bool,
    ) -> None:
        check_cut(image_size, 3, crop)
        check_choice("resolution", resolution, _SUFFIX)
        mean, std = imagenet_moments(3)
        super().__init__(
            class_names=tuple(classes.values()),
            image_shape=(3, image_size, image_size),
            mean=mean,
            std=std,
            batch_size=batch_size,
            num_workers=num_workers,
            subset=subset,
            normalize=normalize,
            augment=augment,
        )
        self.data_dir = data_dir
        self.download = download
        self.crop = crop
        folder = stem + _SUFFIX[resolution]
        self._folders = tuple(classes)
        self._archive = Archive(
            name=name,
            url=f"{_SERVER}{folder}.tgz",
            folder=folder,
            layout="{train,val}/<WordNet id>/<image>.JPEG",
            md5=_SUMS.get(folder),
        )

    def prepare_data(self) -> None:
        """Find the files, or download them."""
        self._archive.fetch(self.data_dir, download=self.download)

    def load(self) -> Splits:
        """List the files of both splits."""
        return Splits(train=self._files("train"), val=self._files("val"), test=None)

    def _files(self, split: str) -> ImageFiles:
        folder = self._archive.fetch(self.data_dir, download=False)
        paths, labels = list_images(
            folder / split, self._folders, self._archive.hint(self.data_dir)
        )
        return ImageFiles(paths, labels, self.image_shape[1], 3, self.crop)


@final
class ImageNetteDataModule(_TenClasses):
    """9,469 + 3,925 photographs of ten easily told classes (Howard 2019).

    Args:
        data_dir: Folder that holds, or will hold, `imagenette2-160` or its like.
        resolution: Which archive: "160px" (99 MB) or "320px" (341 MB) on the shorter
            side, or "full" (1.6 GB).
        download: Fetch the archive when its folder is missing.
        image_size: Side of the square that each image is cut and resized to. LAVP
            counts the data set among those of low resolution.
        crop: Share of the shorter side that the central square keeps, in (0, 1].
        batch_size: Samples per batch.
        num_workers: Loader processes; files decode faster with a few.
        subset: At most this many samples of each split, evenly by class.
        normalize: Give out (pixel − mean) / std, those of ImageNet; False: pixels in
            [0, 1].
        augment: Random crop, resized, and flip of training images.

    Raises:
        TypeError: An argument of the wrong kind.
        ValueError: An argument out of range.
        FileNotFoundError: From `prepare_data` and `setup`: files missing.
    """

    def __init__(
        self,
        data_dir: str = "data",
        resolution: _Resolution = "160px",
        download: bool = True,
        image_size: int = 32,
        crop: float = 1.0,
        batch_size: int = 64,
        num_workers: int = 0,
        subset: int | None = None,
        normalize: bool = True,
        augment: bool = False,
    ) -> None:
        super().__init__(
            "ImageNette",
            "imagenette2",
            _NETTE,
            data_dir=data_dir,
            resolution=resolution,
            download=download,
            image_size=image_size,
            crop=crop,
            batch_size=batch_size,
            num_workers=num_workers,
            subset=subset,
            normalize=normalize,
            augment=augment,
        )


@final
class ImageWoofDataModule(_TenClasses):
    """9,025 + 3,929 photographs of ten breeds of dogs (Howard 2019).

    Args:
        data_dir: Folder that holds, or will hold, `imagewoof2-160` or its like.
        resolution: Which archive: "160px" (92 MB) or "320px" (328 MB) on the shorter
            side, or "full" (1.3 GB).
        download: Fetch the archive when its folder is missing.
        image_size: Side of the square that each image is cut and resized to. LAVP
            counts the data set among those of low resolution.
        crop: Share of the shorter side that the central square keeps, in (0, 1].
        batch_size: Samples per batch.
        num_workers: Loader processes; files decode faster with a few.
        subset: At most this many samples of each split, evenly by class.
        normalize: Give out (pixel − mean) / std, those of ImageNet; False: pixels in
            [0, 1].
        augment: Random crop, resized, and flip of training images.

    Raises:
        TypeError: An argument of the wrong kind.
        ValueError: An argument out of range.
        FileNotFoundError: From `prepare_data` and `setup`: files missing.
    """

    def __init__(
        self,
        data_dir: str = "data",
        resolution: _Resolution = "160px",
        download: bool = True,
        image_size: int = 32,
        crop: float = 1.0,
        batch_size: int = 64,
        num_workers: int = 0,
        subset: int | None = None,
        normalize: bool = True,
        augment: bool = False,
    ) -> None:
        super().__init__(
            "ImageWoof",
            "imagewoof2",
            _WOOF,
            data_dir=data_dir,
            resolution=resolution,
            download=download,
            image_size=image_size,
            crop=crop,
            batch_size=batch_size,
            num_workers=num_workers,
            subset=subset,
            normalize=normalize,
            augment=augment,
        )
