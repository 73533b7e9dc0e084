"""From a data set or tensors to the fields of a ProbeSet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from leakwatch.checks import check_integer
from leakwatch.derivatives.runtime.rng_and_precision import isolated_rng, seed_streams
from leakwatch.probes.checks import (
    check_finite,
    check_index,
    check_indices,
    check_inputs,
    check_labels,
    check_normalization,
)
from leakwatch.probes.items import as_input, dataset_size, read_item
from leakwatch.probes.pipeline import (
    DatasetStreams,
    find_class_names,
    find_normalization,
)
from leakwatch.probes.scale import measure_prior, resolve_range, uniform_prior
from leakwatch.probes.selection import draw_indices

__all__ = ["build_from_dataset", "build_from_tensors"]

Channels = Sequence[float] | float | None


def build_from_dataset(
    dataset: Any,
    *,
    n: int,
    per_class: int | None,
    seed: int,
    mean: Channels,
    std: Channels,
    class_names: Sequence[str] | None,
    indices: Sequence[int] | None,
    max_scan: int,
    data_range: float | None,
    prior_samples: int,
) -> dict[str, Any]:
    """Fields for `ProbeSet.from_dataset`, which has the documentation."""
    size = dataset_size(dataset)
    check_integer("n", n)
    check_integer("max_scan", max_scan)
    check_integer("prior_samples", prior_samples, smallest=0)
    check_integer("seed", seed, smallest=0)
    if per_class is not None:
        check_integer("per_class", per_class)
    streams = DatasetStreams(dataset)

    def read(index: int) -> tuple[Float[Tensor, " ..."], int]:
        # Seeded per item: an augmentation must not depend on what was read before.
        item_seed = (seed * 1_000_003 + index) % 2**32
        seed_streams(item_seed)
        streams.seed(item_seed)
        return read_item(dataset, index)

    generator = torch.Generator(device="cpu").manual_seed(seed)
    with isolated_rng(seed), streams.restored():
        if indices is None:
            chosen = draw_indices(dataset, size, n, per_class, max_scan, generator)
        else:
            chosen = check_indices(indices, size)
        items = [read(index) for index in chosen]
        x = _stack([x for x, _ in items], chosen)
        y = torch.tensor([label for _, label in items], device="cpu")
        if mean is None and std is None:
            outside = bool((x < 0).any() or (x > 1).any())
            found = find_normalization(dataset, trust_attributes=outside)
            if found is not None and _fits(found, x):
                mean, std = found
        if class_names is None:
            named = find_class_names(dataset)
            if named is not None and int(y.max()) < len(named):
                class_names = named
        order = torch.randperm(size, generator=generator, device="cpu")
        others = (read(int(index))[0] for index in order[:prior_samples])
        return _fields(x, y, chosen, mean, std, class_names, data_range, others)


def build_from_tensors(
    x: Tensor,
    y: Tensor | Sequence[int],
    *,
    index: Sequence[int] | None,
    mean: Channels,
    std: Channels,
    class_names: Sequence[str] | None,
    data_range: float | None,
) -> dict[str, Any]:
    """Fields for `ProbeSet.from_tensors`, which has the documentation."""
    x = as_input(x, "x")
    chosen = list(range(len(x))) if index is None else list(index)
    return _fields(x, y, chosen, mean, std, class_names, data_range, [])


def _fields(
    x: Tensor,
    y: Tensor | Sequence[int],
    index: list[int],
    mean: Channels,
    std: Channels,
    class_names: Sequence[str] | None,
    data_range: float | None,
    others: Iterable[Float[Tensor, " ..."]],
) -> dict[str, Any]:
    # The constructor checks everything again; the scale needs valid values before.
    x = check_inputs(x)
    check_index(tuple(index), len(x))
    check_finite(x, tuple(index))
    means, stds = check_normalization(mean, std, x)
    peak, units = resolve_range(x, means, stds, data_range)
    prior = (
        measure_prior(others, x.shape[1:], means, stds)
        or measure_prior(x, x.shape[1:], means, stds)
        or uniform_prior(x, peak, units)
    )
    return {
        "x": x,
        "y": check_labels(y, len(x)),
        "index": tuple(index),
        "data_range": float(peak),
        "prior_mean": prior[0].to(x.dtype),
        "prior_std": prior[1],
        "class_names": None if class_names is None else tuple(class_names),
        "mean": means,
        "std": stds,
        "units": units,
    }


def _stack(inputs: list[Tensor], index: list[int]) -> Float[Tensor, "n ..."]:
    for x, i in zip(inputs, index, strict=True):
        if x.shape != inputs[0].shape:
            raise ValueError(
                f"item {index[0]} has shape {tuple(inputs[0].shape)} and item {i} has "
                f"shape {tuple(x.shape)}; expected probes of one shape: resize or crop "
                "in the data set's transform"
            )
    double = any(x.dtype == torch.float64 for x in inputs)
    return torch.stack([x.double() if double else x for x in inputs])


def _fits(found: tuple[tuple[float, ...], ...], x: Tensor) -> bool:
    return x.ndim > 1 and all(len(values) in (1, x.shape[1]) for values in found)
