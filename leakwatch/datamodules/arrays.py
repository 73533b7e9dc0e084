"""A user's own images from one .npz file."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from leakwatch.datamodules.base import ImageDataModule, Splits
from leakwatch.datamodules.channels import per_channel
from leakwatch.datamodules.dataset import ImageArrays
from leakwatch.normalization import Channels

_EXAMPLE = (
    "numpy.savez(path, train_images=..., train_labels=...) with images uint8 "
    "(N, H, W) or (N, H, W, C), labels integers (N,)"
)


@final
class ArrayDataModule(ImageDataModule):
    """Images and labels from a .npz file, all of which are held in memory.

    | key | content |
    |---|---|
    | `train_images` | uint8 in 0 … 255 or float in [0, 1]; (N, H, W) or (N, H, W, C) |
    | `train_labels` | integers 0 … classes − 1; (N,) or (N, 1) |
    | `val_images`, `val_labels` | optional; without them `val_fraction` is split off |
    | `test_images`, `test_labels` | optional |
    | `classes` | optional class names, (classes,) |

    The file is read here, in the constructor, so that `num_classes`, `image_shape`,
    `mean` and `std` are known and a faulty file is reported before training starts.

    Args:
        path: The .npz file.
        batch_size: Samples per batch.
        num_workers: Loader processes.
        seed: Of the validation split.
        val_fraction: Share of the training data that becomes validation data.
        subset: At most this many samples of each split, evenly by class.
        normalize: Give out (pixel − mean) / std; False: pixels in [0, 1].
        augment: Random crop with 4 pixels of border, and flip, of training images.
        mean: Per channel, in pixel units; None: of the training images.
        std: Per channel, in pixel units; None: of the training images.

    Raises:
        FileNotFoundError: There is no such file.
        TypeError: An argument of the wrong kind.
        ValueError: An argument out of range, or a file that is not as described.
    """

    def __init__(
        self,
        path: str,
        batch_size: int = 64,
        num_workers: int = 0,
        seed: int = 0,
        val_fraction: float = 0.1,
        subset: int | None = None,
        normalize: bool = True,
        augment: bool = False,
        mean: Channels | None = None,
        std: Channels | None = None,
    ) -> None:
        content = _read(Path(path).expanduser())
        train = _split(content, "train", path)
        if train is None:
            raise ValueError(
                f"{path} has no 'train_images'; it has {', '.join(sorted(content))}. "
                f"Expected: {_EXAMPLE}."
            )
        val, test = _split(content, "val", path), _split(content, "test", path)
        _, channels, height, width = train.images.shape
        for name, other in (("val", val), ("test", test)):
            if other is not None and other.images.shape[1:] != train.images.shape[1:]:
                raise ValueError(
                    f"{path}: {name}_images are {_hwc(other)}, train_images are "
                    f"{_hwc(train)} (H, W, C); they must agree."
                )
        own_mean, own_std = _moments(train)
        super().__init__(
            class_names=_class_names(content, (train, val, test), path),
            image_shape=(channels, height, width),
            mean=per_channel("mean", mean, own_mean),
            std=per_channel("std", std, own_std),
            batch_size=batch_size,
            num_workers=num_workers,
            seed=seed,
            val_fraction=val_fraction,
            subset=subset,
            normalize=normalize,
            augment=augment,
        )
        self.path = path
        self._splits = Splits(train, val, test)

    def load(self) -> Splits:
        """Return what the constructor has read."""
        return self._splits


def _read(path: Path) -> dict[str, NDArray[Any]]:
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}. Make one: {_EXAMPLE}.")
    try:
        # opened here because NumPy leaves a truncated archive open
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            return {key: archive[key] for key in archive.files}
    except (ValueError, AttributeError, TypeError, EOFError, zipfile.BadZipFile) as err:
        raise ValueError(
            f"{path} is not a .npz archive of plain arrays ({err}). "
            f"Expected: {_EXAMPLE}; class names as strings, not objects."
        ) from err


def _split(
    content: dict[str, NDArray[Any]], name: str, path: str
) -> ImageArrays | None:
    keys = f"{name}_images", f"{name}_labels"
    present = [key for key in keys if key in content]
    if not present:
        return None
    if len(present) == 1:
        (missing,) = set(keys) - set(present)
        raise ValueError(f"{path} has {present[0]!r} but no {missing!r}.")
    images, labels = _images(content[keys[0]], f"{path}: {keys[0]}"), content[keys[1]]
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(
            f"{path}: {keys[1]} must be integers of shape (N,), got {labels.dtype} "
            f"{labels.shape}; one-hot labels: numpy.argmax(labels, axis=1)."
        )
    if len(labels) != len(images):
        raise ValueError(f"{path}: {len(images)} {keys[0]}, {len(labels)} {keys[1]}.")
    return ImageArrays(images, torch.from_numpy(labels.astype(np.int64)))


def _images(array: NDArray[Any], where: str) -> torch.Tensor:
    if array.ndim not in (3, 4) or 0 in array.shape:
        raise ValueError(
            f"{where} must have the shape (N, H, W) or (N, H, W, C) with no side 0, "
            f"got {array.shape}."
        )
    if array.ndim == 4 and array.shape[1] <= 4 < array.shape[3]:
        raise ValueError(
            f"{where} has the shape {array.shape}, which looks like channels first; "
            "channels come last: images.transpose(0, 2, 3, 1)."
        )
    if np.issubdtype(array.dtype, np.floating):
        low, high = float(array.min()), float(array.max())
        if not (low >= 0 and high <= 1):
            raise ValueError(
                f"{where}: floats must lie in [0, 1], found {low:g} to {high:g}. "
                "Store pixels as uint8 0 … 255, or undo the normalisation."
            )
        array = array.astype(np.float32)
    elif array.dtype != np.uint8:
        raise ValueError(
            f"{where} must be uint8 or float, got {array.dtype}; for values 0 … 255: "
            "images.astype('uint8')."
        )
    tensor = torch.from_numpy(array)
    tensor = tensor.unsqueeze(1) if tensor.ndim == 3 else tensor.permute(0, 3, 1, 2)
    return tensor.contiguous()


def _class_names(
    content: dict[str, NDArray[Any]],
    splits: tuple[ImageArrays | None, ...],
    path: str,
) -> tuple[str, ...]:
    labels = torch.cat([split.labels for split in splits if split is not None])
    low, high = int(labels.min()), int(labels.max())
    names = content.get("classes", np.arange(high + 1))
    if names.ndim != 1:
        raise ValueError(f"{path}: classes must be (classes,), got {names.shape}.")
    if low < 0 or high >= len(names):
        raise ValueError(
            f"{path}: labels run from {low} to {high}, expected 0 to {len(names) - 1} "
            f"({len(names)} classes)."
        )
    if len(names) < 2:
        raise ValueError(f"{path}: there must be at least 2 classes, found 1.")
    return tuple(str(name) for name in names.tolist())


def _moments(arrays: ImageArrays) -> tuple[tuple[float, ...], tuple[float, ...]]:
    scale = 255.0 if arrays.images.dtype == torch.uint8 else 1.0
    means, stds = [], []
    for channel in arrays.images.unbind(1):
        pixels = channel.to(torch.float64) / scale
        means.append(float(pixels.mean()))
        # a constant channel carries nothing to scale, and 0 can't be divided by
        constant = bool((channel == channel.flatten()[0]).all())
        stds.append(1.0 if constant else float(pixels.std(correction=0)))
    return tuple(means), tuple(stds)


def _hwc(arrays: ImageArrays) -> tuple[int, int, int]:
    _, channels, height, width = arrays.images.shape
    return height, width, channels
