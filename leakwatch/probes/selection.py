"""Which items of a data set become probes: class-stratified, from a seed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from leakwatch.probes.items import is_class, read_item

__all__ = ["draw_items", "find_labels", "stratified"]

Item = tuple[Float[Tensor, " ..."], Tensor]
Read = Callable[[int], Item]

# Draws in which items that can't be read are replaced.
_ROUNDS = 10

_LABEL_ATTRIBUTES = ("targets", "labels", "_labels", "_targets")
_SAMPLE_ATTRIBUTES = ("samples", "imgs")


def draw_items(
    dataset: Any,
    within: Sequence[int],
    n: int,
    per_class: int | None,
    max_scan: int,
    seed: int,
    read: Read,
) -> tuple[list[int], list[Item]]:
    """Draw items, balanced over classes: their data-set indices, and what was read.

    Labels are taken from where data sets usually keep them; if there are none, up to
    `max_scan` items are read in a random order and only those can be drawn. Where an
    item can't be read, another one of its class takes its place. Items whose targets
    are no class indices are drawn at random.

    Args:
        dataset: map-style.
        within: indices of those that may be drawn.
        n: number of items; ignored when `per_class` is given.
        per_class: items per class.
        max_scan: items read to learn labels.
        seed: of the drawing.
        read: reads the item of an index.

    Raises:
        TypeError: none of the items drawn can be read: the error of the first.
        ValueError: the same; or `per_class` without class indices.

    Warns:
        UserWarning: fewer items than asked for, in total or in a class; items that
            can't be read.
    """
    generator = torch.Generator(device="cpu").manual_seed(seed)
    candidates = torch.tensor(within, device="cpu")
    found = find_labels(dataset)
    if found is not None and len(found) == len(dataset):
        labels = found[candidates]
    else:
        order = torch.randperm(len(candidates), generator=generator, device="cpu")
        candidates = candidates[order]
        labels = torch.zeros(len(candidates), dtype=torch.long, device="cpu")
        seen = _scanned(dataset, candidates[:max_scan].tolist())
        if seen is not None:
            candidates = torch.tensor(list(seen), device="cpu")
            labels = torch.tensor(list(seen.values()), device="cpu")
        elif per_class is not None:
            raise ValueError(
                f"per_class={per_class} needs class indices, and the targets of "
                f"{type(dataset).__name__} are none; say how many to draw at random: n="
            )
    _warn_if_short(labels, n, per_class, f"data set size {len(dataset)}, {max_scan=}")
    items: dict[int, Item] = {}
    failed: dict[int, Exception] = {}
    for _ in range(_ROUNDS):
        left = ~torch.isin(candidates, torch.tensor(list(failed), device="cpu"))
        kept, kinds = candidates[left], labels[left]
        chosen = kept[stratified(kinds, n, per_class, generator)].tolist()
        read_now, errors = _attempts([i for i in chosen if i not in items], read)
        items |= read_now
        failed |= errors
        if not errors:
            break
    chosen = [i for i in chosen if i in items]
    if failed:
        index, error = next(iter(failed.items()))
        if not chosen:
            raise error
        warnings.warn(
            f"{len(failed)} items that were drawn as probes can't be read, and others "
            f"took their place; the first is item {index}: {error}",
            stacklevel=3,
        )
    return chosen, [items[i] for i in chosen]


def _scanned(dataset: Any, candidates: Sequence[int]) -> dict[int, int] | None:
    """Index → class of the items that can be read, None if an item has no class."""
    seen: dict[int, int] = {}
    errors: list[Exception] = []
    for index in candidates:
        try:
            _, target = read_item(dataset, index)
        except Exception as error:
            errors.append(error)
            continue
        if not is_class(target):
            return None
        seen[index] = int(target)
    if not seen:
        raise errors[0]
    return seen


def _attempts(
    indices: Sequence[int], read: Read
) -> tuple[dict[int, Item], dict[int, Exception]]:
    """(what could be read, the errors of the others), by index."""
    items, errors = {}, {}
    for index in indices:
        try:
            items[index] = read(index)
        except Exception as error:
            errors[index] = error
    return items, errors


def _warn_if_short(
    labels: Int[Tensor, " m"], n: int, per_class: int | None, limits: str
) -> None:
    if per_class is None and n > len(labels):
        warnings.warn(
            f"asked for n={n} probes; {len(labels)} items are available "
            f"({limits}): using all of them",
            stacklevel=4,
        )
    if per_class is not None:
        classes, _, counts = _classes(labels)
        short = [
            f"{label} has {count}"
            for label, count in zip(classes.tolist(), counts.tolist(), strict=True)
            if count < per_class
        ]
        if short:
            warnings.warn(
                f"asked for per_class={per_class} probes; {len(short)} of "
                f"{len(classes)} classes hold fewer (class {', '.join(short[:5])}"
                f"{', ...' if len(short) > 5 else ''}): using all of theirs",
                stacklevel=4,
            )


def stratified(
    labels: Int[Tensor, " m"],
    n: int,
    per_class: int | None,
    generator: torch.Generator,
) -> Int[Tensor, " k"]:
    """Positions into `labels`, drawn in rounds of one item per class.

    Classes come in a random order, the same in every round, so that a remainder, or
    an `n` below the number of classes, favours no class.

    Args:
        labels: class of each candidate.
        n: number of positions (k = n, or m where that is smaller); ignored when
            `per_class` is given.
        per_class: positions per class, or all of a class that has fewer.
        generator: the source of randomness.

    Example:
        >>> labels = torch.tensor([0] * 90 + [1] * 9 + [2])
        >>> chosen = stratified(labels, 9, None, torch.Generator().manual_seed(0))
        >>> labels[chosen].bincount()
        tensor([4, 4, 1])
    """
    m = len(labels)
    _, dense, counts = _classes(labels)
    shuffled = torch.randperm(m, generator=generator, device="cpu")
    grouped = shuffled[dense[shuffled].argsort(stable=True)]
    starts = counts.cumsum(0) - counts
    rounds = torch.arange(m, device="cpu") - starts.repeat_interleave(counts)
    class_order = torch.randperm(len(counts), generator=generator, device="cpu")
    turn = rounds * len(counts) + class_order[dense[grouped]]
    in_turn = turn.argsort()
    if per_class is None:
        return grouped[in_turn[:n]]
    return grouped[in_turn[rounds[in_turn] < per_class]]


def find_labels(dataset: Any) -> Int[Tensor, " size"] | None:
    """Labels of all items without reading the items, or None.

    Looks through `Subset`, `ConcatDataset` and `TensorDataset`, then for the
    attributes `targets`, `labels` and `samples` that torchvision's data sets have.
    These may differ from an item's own label (a target transform); they serve to
    stratify only.
    """
    if isinstance(dataset, Subset):
        labels = find_labels(dataset.dataset)
        return None if labels is None else labels[list(dataset.indices)]
    if isinstance(dataset, ConcatDataset):
        parts = [find_labels(part) for part in dataset.datasets]
        listed = [part for part in parts if part is not None]
        return torch.cat(listed) if len(listed) == len(parts) else None
    if isinstance(dataset, TensorDataset) and len(dataset.tensors) > 1:
        return _as_labels(dataset.tensors[1], len(dataset))
    for name in _LABEL_ATTRIBUTES:
        labels = _as_labels(getattr(dataset, name, None), len(dataset))
        if labels is not None:
            return labels
    for name in _SAMPLE_ATTRIBUTES:
        samples = getattr(dataset, name, None)
        if isinstance(samples, list) and all(
            isinstance(sample, tuple) and len(sample) == 2 for sample in samples
        ):
            return _as_labels([label for _, label in samples], len(dataset))
    return None


def _classes(
    labels: Int[Tensor, " m"],
) -> tuple[Int[Tensor, " c"], Int[Tensor, " m"], Int[Tensor, " c"]]:
    """(the classes that occur, position of each label among them, their counts)."""
    classes, dense, counts = torch.unique(
        labels, return_inverse=True, return_counts=True
    )
    return classes, dense, counts


def _as_labels(values: Any, size: int) -> Int[Tensor, " size"] | None:
    if isinstance(values, Tensor):
        labels = values.detach().cpu()
    elif isinstance(values, list | tuple | np.ndarray):
        try:
            array = np.asarray(values)
        except ValueError:  # ragged
            return None
        if array.dtype.kind not in "iub":
            return None
        labels = torch.from_numpy(array.astype(np.int64))
    else:
        return None
    if labels.is_floating_point() or labels.is_complex():
        return None
    if labels.numel() != size or labels.shape[:1] != (size,):
        return None
    return labels.reshape(size).long()
