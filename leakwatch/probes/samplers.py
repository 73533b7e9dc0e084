"""Which items of a data set a loader trains on, without a trace in its sampler."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from leakwatch.derivatives.runtime.rng_and_precision import isolated_rng
from leakwatch.probes.dataset_state import DatasetState

__all__ = ["sampled_items"]


def sampled_items(loader: Any, seed: int = 0) -> list[int] | None:
    """Data-set indices that a loader's sampler yields, in order; None: all of them.

    A sampler that torch doesn't have is asked for its `indices`, or else for as many
    items of its first epoch as the data set has; it is left as it was.

    Args:
        loader: a `DataLoader`; never iterated.
        seed: of the global random streams that a sampler may draw from meanwhile.
    """
    if isinstance(loader.dataset, IterableDataset):
        return None
    batches = loader.batch_sampler
    own = batches is not None and type(batches) is not BatchSampler
    sampler = batches if own else loader.sampler
    size = len(loader.dataset)
    try:
        with isolated_rng(seed), DatasetState(sampler).restored():
            found = _yielded(sampler, size)
            kept = None if found is None else sorted({int(i) for i in found})
    except Exception:  # no sampler of indices: what it leaves out is not known
        return None
    whole = kept is None or len(kept) == size or not all(0 <= i < size for i in kept)
    return None if whole else kept


def _yielded(sampler: Any, size: int) -> Iterable[Any] | None:
    # Lightning's, for several processes, has that of the user inside.
    inner = getattr(getattr(sampler, "dataset", None), "_sampler", None)
    if inner is not None:
        return _yielded(inner, size)
    if isinstance(sampler, WeightedRandomSampler):
        weights: Tensor = sampler.weights
        return weights.nonzero().flatten().tolist()
    if type(sampler) in (RandomSampler, SequentialSampler, DistributedSampler):
        return None
    listed: Iterable[Any] | None = getattr(sampler, "indices", None)
    if listed is not None:
        return listed
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(0)
    return islice(_flat(sampler), size)


def _flat(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        if isinstance(item, list | tuple):
            yield from item
        else:
            yield item
