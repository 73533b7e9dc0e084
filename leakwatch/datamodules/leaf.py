"""Image files in the JSON format of the federated benchmark LEAF."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int, Shaped
from numpy.typing import NDArray
from torch import Tensor

_FORM = (
    'a LEAF file is {"users": [...], "num_samples": [...], "user_data": '
    '{user: {"x": [[784 pixels in 0 ... 1], ...], "y": [labels]}}}'
)


class LeafSamples(NamedTuple):
    """All samples of one folder.

    Args:
        images: uint8, or float32 where a pixel is no multiple of 1/255.
        labels: int64.
        owners: int64, the position of each sample's writer in `writers`.
        writers: Names in the order of the files.
    """

    images: Shaped[Tensor, "n 1 side side"]
    labels: Int[Tensor, " n"]
    owners: Int[Tensor, " n"]
    writers: tuple[str, ...]


def read_leaf(folder: Path, side: int, classes: int, most: int | None) -> LeafSamples:
    """Read every .json file of a folder, in the order of their names.

    Args:
        folder: Holds the files; there must be one.
        side: Of the square images, in pixels.
        classes: Number of classes.
        most: Stop after so many writers; None: read all.

    Raises:
        FileNotFoundError: There is no file.
        ValueError: A file is not as LEAF writes it, or holds no sample.
    """
    files = sorted(p for p in folder.glob("*.json") if p.name[0] != ".")
    if not files:
        raise FileNotFoundError(f"{folder} holds no .json file.")
    images: list[NDArray[Any]] = []
    labels: list[NDArray[np.int64]] = []
    owners: list[int] = []
    writers: dict[str, int] = {}
    for path in files:
        for user, data in _users(path):
            if user not in writers and most is not None and len(writers) == most:
                return _join(folder, images, labels, owners, writers)
            where = f"{path}, user {user!r}"
            y = _labels(data["y"], classes, where)
            images.append(_images(data["x"], len(y), side, where))
            labels.append(y)
            owners += [writers.setdefault(user, len(writers))] * len(y)
    return _join(folder, images, labels, owners, writers)


def _join(
    folder: Path,
    images: list[NDArray[Any]],
    labels: list[NDArray[np.int64]],
    owners: list[int],
    writers: dict[str, int],
) -> LeafSamples:
    if not owners:
        raise ValueError(f"The files in {folder} hold no sample.")
    if any(part.dtype != np.uint8 for part in images):
        images = [
            part.astype(np.float32) / 255 if part.dtype == np.uint8 else part
            for part in images
        ]
    return LeafSamples(
        torch.from_numpy(np.concatenate(images)).unsqueeze(1),
        torch.from_numpy(np.concatenate(labels)),
        torch.tensor(owners, dtype=torch.int64),
        tuple(writers),
    )


def _users(path: Path) -> list[tuple[str, dict[str, Any]]]:
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); {_FORM}.") from error
    keys = ("users", "num_samples", "user_data")
    if not isinstance(content, dict) or any(key not in content for key in keys):
        held = ", ".join(content) if isinstance(content, dict) else "no object"
        raise ValueError(f"{path} holds {held}; {_FORM}.")
    users, counts, data = (content[key] for key in keys)
    if len(users) != len(counts):
        raise ValueError(f"{path}: {len(users)} users, {len(counts)} num_samples.")
    for user, count in zip(users, counts, strict=True):
        if not isinstance(data.get(user), dict) or not {"x", "y"} <= set(data[user]):
            raise ValueError(f"{path}: user {user!r} has no x and y; {_FORM}.")
        x, y = data[user]["x"], data[user]["y"]
        if not len(x) == len(y) == count:
            raise ValueError(
                f"{path}: user {user!r} has num_samples {count}, but {len(x)} images "
                f"and {len(y)} labels; the file is damaged."
            )
    return [(user, data[user]) for user in users]


def _labels(values: Any, classes: int, where: str) -> NDArray[np.int64]:
    y = np.asarray(values)
    if y.size == 0:
        return np.zeros(0, np.int64)
    good = y.ndim == 1 and np.issubdtype(y.dtype, np.integer)
    if not good or y.min() < 0 or y.max() >= classes:
        raise ValueError(
            f"{where}: labels must be integers from 0 to {classes - 1}, got "
            f"{values[:5]}"
        )
    return y.astype(np.int64)


def _images(values: Any, count: int, side: int, where: str) -> NDArray[Any]:
    """Pixels as uint8 if they are whole numbers of 255ths, as LEAF writes them."""
    if count == 0:
        return np.zeros((0, side, side), np.uint8)
    try:
        x = np.asarray(values, np.float64)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: images of unequal length; {_FORM}.") from error
    if x.shape != (count, side**2):
        raise ValueError(
            f"{where}: images have the shape {x.shape}, expected {(count, side**2)}; "
            f"{_FORM}."
        )
    if not (x.min() >= 0 and x.max() <= 1):
        raise ValueError(
            f"{where}: pixels must lie in 0 ... 1, found {x.min():g} to {x.max():g}."
        )
    square = x.reshape(count, side, side)
    whole = np.rint(255 * square)
    if np.abs(255 * square - whole).max() < 1e-3:
        return whole.astype(np.uint8)
    return square.astype(np.float32)
