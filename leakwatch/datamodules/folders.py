"""Images sorted into one folder per class, and errors that draw the layout."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

_ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp")


def class_folders(folder: Path, hint: str, *, least: int = 2) -> tuple[str, ...]:
    """Return the names of the class folders in alphabetical order.

    Args:
        folder: Holds one folder per class; hidden ones don't count.
        hint: What to do when it doesn't, for the error text.
        least: Classes that there must be.

    Raises:
        FileNotFoundError: There is no such folder, or no folder in it.
        ValueError: There are too few classes.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no folder {folder}. {hint}")
    with os.scandir(folder) as entries:
        names = sorted(e.name for e in entries if e.is_dir() and e.name[0] != ".")
    if not names:
        flat = " The images in it are not sorted into classes." * _has_images(folder)
        raise FileNotFoundError(f"{folder} holds no class folders.{flat} {hint}")
    if len(names) < least:
        raise ValueError(
            f"{folder} holds one class folder, {names[0]!r}; there must be at least "
            f"{least} classes. {hint}"
        )
    return tuple(names)


def list_images(
    folder: Path, classes: Sequence[str], hint: str, *, complete: bool = True
) -> tuple[tuple[str, ...], Int[Tensor, " n"]]:
    """Return the paths of all images, class by class and in order, and their labels.

    Args:
        folder: Holds the class folders; images may lie deeper inside them.
        classes: Names of the class folders; label i is `classes[i]`.
        hint: What to do when an image or a folder is missing, for the error text.
        complete: Every class must be there and hold an image.

    Raises:
        FileNotFoundError: A folder or its images are missing.
        ValueError: There is a folder that is none of the classes.
    """
    present = class_folders(folder, hint, least=1)
    if unknown := sorted(set(present) - set(classes)):
        raise ValueError(
            f"{folder} holds folders that are no class of the training images: "
            f"{_some(unknown)}. {hint}"
        )
    paths: list[str] = []
    labels: list[int] = []
    empty: list[str] = []
    for label, name in enumerate(classes):
        images = _images(folder / name)
        if not images:
            empty.append(name)
        paths += images
        labels += [label] * len(images)
    if not paths or (complete and empty):
        raise FileNotFoundError(
            f"{folder} has no images of the class {_some(empty)} (endings looked for: "
            f"{', '.join(_ENDINGS)}). {hint}"
        )
    return tuple(paths), torch.tensor(labels, dtype=torch.int64)


def _images(folder: Path) -> list[str]:
    paths = []
    for place, _, files in os.walk(folder, followlinks=True):
        paths += [
            os.path.join(place, name)
            for name in files
            if name.lower().endswith(_ENDINGS) and name[0] != "."
        ]
    return sorted(paths)


def _has_images(folder: Path) -> bool:
    with os.scandir(folder) as entries:
        return any(entry.name.lower().endswith(_ENDINGS) for entry in entries)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
