"""ImageNette and ImageWoof: ten easy, and ten similar, classes of ImageNet."""

from __future__ import annotations

from typing import Literal, final

from leakwatch.checks import check_choice
from leakwatch.datamodules.archives import Archive
from leakwatch.datamodules.base import ImageDataModule, Splits
from leakwatch.datamodules.channels import imagenet_moments
from leakwatch.datamodules.files import ImageFiles, check_cut
from leakwatch.datamodules.folders import list_images

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
