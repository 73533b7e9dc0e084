"""Reading one item of a data set as a network input and a class index, or target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.data import IterableDataset

__all__ = [
    "as_input",
    "as_target",
    "as_tensor",
    "dataset_of",
    "dataset_size",
    "is_class",
    "read_item",
]

INPUT_KEYS = ("image", "x", "img", "pixel_values")
LABEL_KEYS = ("label", "y", "labels", "target")


def dataset_of(dataloader: Any) -> Any:
    """The data set behind a loader.

    Raises:
        TypeError: `dataloader` has none.
    """
    if not hasattr(dataloader, "dataset"):
        raise TypeError(
            f"from_loader() got {type(dataloader).__name__}; expected a DataLoader "
            "with a .dataset. Use ProbeSet.from_dataset(dataset) or "
            "ProbeSet.from_tensors(x, y)"
        )
    return dataloader.dataset


def dataset_size(dataset: Any) -> int:
    """Length of a map-style data set.

    Raises:
        TypeError: `dataset` is iterable-style or can't be indexed.
        ValueError: `dataset` is empty.
    """
    name = type(dataset).__name__
    remedy = (
        "a probe has to be found again at every epoch by its index. Choose the probes "
        "yourself: ProbeSet.from_tensors(x, y, index=range(len(x)))"
    )
    if isinstance(dataset, IterableDataset):
        raise TypeError(
            f"{name} is an IterableDataset; expected a map-style data set, because "
            f"{remedy}"
        )
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise TypeError(
            f"{name} has no __getitem__ and __len__; expected a map-style data set, "
            f"because {remedy}"
        )
    size = len(dataset)
    if size == 0:
        raise ValueError(f"{name} is empty; expected at least one item to probe")
    return size


def read_item(dataset: Any, index: int) -> tuple[Float[Tensor, " ..."], Tensor]:
    """Fetch item `index` as (input, target); see `as_target`.

    An item is (input, label), (input, label, anything), or a mapping or named tuple
    with one of the keys `INPUT_KEYS` and one of `LABEL_KEYS`.

    Raises:
        TypeError: the item has another form, or its input is not floating point.
        ValueError: its label is empty, or the data set raises an error.
    """
    where = f"item {index} of {type(dataset).__name__}"
    try:
        item = dataset[index]
    except Exception as error:
        raise ValueError(
            f"{where} can't be read ({type(error).__name__}: {error}); leave it out of "
            "the indices, or of what the sampler yields"
        ) from error
    names = getattr(item, "_fields", None)
    if names is not None and (fields := _by_name(item._asdict(), where)):
        item = fields
    if isinstance(item, Mapping):
        x_key = next((key for key in INPUT_KEYS if key in item), None)
        y_key = next((key for key in LABEL_KEYS if key in item), None)
        if x_key is None or y_key is None:
            raise TypeError(
                f"{where} is a mapping with keys {sorted(map(str, item))}; expected "
                f"one of {INPUT_KEYS} and one of {LABEL_KEYS}"
            )
        x, y = item[x_key], item[y_key]
    elif isinstance(item, Sequence) and not isinstance(item, str | bytes):
        if len(item) not in (2, 3):
            raise TypeError(
                f"{where} has {len(item)} elements; expected (input, label) or "
                "(input, label, anything)"
            )
        x, y = item[0], item[1]
    else:
        raise TypeError(
            f"{where} is a {type(item).__name__}; expected (input, label) or a mapping "
            "like {'image': input, 'label': label}"
        )
    return as_input(x, where), as_target(y, where)


def _by_name(fields: dict[str, Any], where: str) -> dict[str, Any] | None:
    """The fields of a named tuple, or None where their names say nothing."""
    known = [any(k in fields for k in keys) for keys in (INPUT_KEYS, LABEL_KEYS)]
    if all(known):
        return fields
    if any(known) and len(fields) > 2:
        raise TypeError(
            f"{where} is a named tuple with the fields {tuple(fields)}; expected one "
            f"of {INPUT_KEYS} and one of {LABEL_KEYS}"
        )
    return None


def as_input(value: Any, where: str) -> Float[Tensor, " ..."]:
    """Convert one input, or a batch of them, to a float32 (or float64) CPU tensor.

    Half precisions become float32; float64 is kept.

    Raises:
        TypeError: `value` is an image object or holds integers.
    """
    if hasattr(value, "getbands"):  # what every PIL image has
        raise TypeError(
            f"probe images are PIL images ({where}); expected floating point network "
            "inputs: add ToTensor() to the data set's transform"
        )
    tensor = as_tensor(value, where)
    if not tensor.is_floating_point():
        raise TypeError(
            f"probe images are {tensor.dtype} ({where}); expected floating point "
            "network inputs: divide by 255 (`x.float() / 255`) or add ToTensor() to "
            "the data set's transform. Token indices have no derivative: probe their "
            "embeddings"
        )
    dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    return tensor.detach().to("cpu", dtype)


def as_tensor(value: Any, where: str) -> Tensor:
    """Numbers in any container as a tensor.

    Raises:
        TypeError: `value` does not consist of numbers.
    """
    if isinstance(value, Tensor):
        return value
    try:
        # A copy: Torch warns about read-only arrays, such as memory-mapped ones.
        tensor = torch.from_numpy(np.array(value))
    except (TypeError, ValueError):
        raise TypeError(
            f"got a {type(value).__name__} ({where}); expected a tensor, an array or a "
            "sequence of numbers"
        ) from None
    # Python's own numbers are float64 by necessity, not because it was asked for.
    asked = hasattr(value, "dtype") or tensor.dtype != torch.float64
    return tensor if asked else tensor.float()


def as_target(value: Any, where: str) -> Tensor:
    """Convert a label to a class index, or to what another criterion takes.

    Returns:
        One integer as a class index, int64 of shape ``()``. Anything else keeps its
        shape: numbers in float32 (float64 if given so), integers in int64, or bool.

    Raises:
        TypeError: `value` does not consist of real numbers.
        ValueError: `value` is empty.
    """
    target = as_tensor(value, where).detach().cpu()
    if target.is_complex():
        raise TypeError(f"the label is complex ({where}); expected real numbers")
    if target.numel() == 0:
        raise ValueError(f"the label is empty ({where})")
    if target.dtype == torch.bool and target.numel() > 1:
        return target
    if target.is_floating_point():
        return target if target.dtype == torch.float64 else target.float()
    return target.reshape(()).long() if target.numel() == 1 else target.long()


def is_class(target: Tensor) -> bool:
    """Whether a target is one class index."""
    return target.ndim == 0 and target.dtype == torch.long
