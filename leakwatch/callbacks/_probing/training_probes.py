"""Probes from whatever a Trainer trains on; its loader is only asked for its data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self, final

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from leakwatch.callbacks._probing.distributed import gather
from leakwatch.callbacks._probing.observing import observing
from leakwatch.callbacks._probing.preparation import Preparation, found_preparation
from leakwatch.callbacks._recording.loggers import warn
from leakwatch.normalization import Channels, to_pixels, within_unit_range
from leakwatch.probes import ProbeSet
from leakwatch.probes.samplers import sampled_items

__all__ = ["SampleSource", "only_loader", "training_probes"]

_HOW = (
    "pass probes=ProbeSet.from_dataset(dataset, ...) or "
    "probes=ProbeSet.from_tensors(x, y, ...)"
)


@final
@dataclass(frozen=True)
class SampleSource:
    """Where samples come from: a loader, and what is known about its data.

    Attributes:
        loaders: one DataLoader, in whatever Lightning wraps it.
        datamodule: whose ``mean``, ``std``, ``class_names`` and ``probe_dataset``
            count, or an object like it.
        training: whether these are the training samples, which ``probe_dataset`` holds.
        gathered: what every process gives, in order of rank.
        module: what is trained, whose hooks prepare batches; ``None`` for none.
    """

    loaders: Any
    datamodule: Any
    training: bool = True
    gathered: Callable[[Any], list[Any]] = field(default=lambda mine: [mine])
    module: LightningModule | None = None

    @classmethod
    def of(cls, trainer: Trainer) -> Self:
        """What a trainer trains on.

        Args:
            trainer: with its training loader set up.
        """
        return cls(
            trainer.train_dataloader,
            getattr(trainer, "datamodule", None),
            gathered=partial(gather, trainer),
            module=trainer.lightning_module,
        )

    def preparation(self, probes: ProbeSet) -> Preparation:
        """What becomes of probes before the training step gets them.

        Args:
            probes: as the data set has them.

        Returns:
            As :func:`found_preparation`.
        """
        if self.module is None:
            return Preparation()
        place = next(self.module.parameters()).device
        loaders = list(_loaders(self.loaders))
        return found_preparation(
            self.module,
            self.datamodule,
            loaders[0] if len(loaders) == 1 else None,
            probes.x.to(place),
            probes.y.to(place),
        )


def training_probes(
    source: SampleSource,
    *,
    caller: str,
    n: int,
    seed: int,
    mean: Channels | None,
    std: Channels | None,
    data_range: float | None = None,
    indices: Sequence[int] | None = None,
) -> ProbeSet:
    """A class-stratified probe set from training data.

    The loader is only asked for its ``dataset``, and for the items that its sampler
    yields, in any process: others are neither drawn nor read. A
    datamodule's ``probe_dataset``, the same samples without augmentation, goes first.
    Normalisation and class names come from the arguments, else from attributes
    ``mean``, ``std`` and ``class_names`` of the datamodule, else from the data set and
    its transforms.

    Args:
        source: the data.
        caller: which callback draws, for error texts.
        n: number of probes.
        seed: of the drawing.
        mean: per channel, of the normalisation.
        std: per channel, of the normalisation.
        data_range: peak of the PSNR, pixel units.
        indices: take exactly these items; those of the run that is resumed.

    Returns:
        The probes.

    Raises:
        TypeError: if there is no map-style data set to draw from.
        ValueError: if its samples can't be probed; see :class:`ProbeSet`.
    """
    loader = only_loader(source, caller)
    datamodule = source.datamodule
    names = getattr(datamodule, "class_names", None)
    stated = mean is None and std is None
    if stated:
        mean, std = _stated(datamodule)

    def draw(dataset: Any, chosen: Sequence[int] | None) -> ProbeSet:
        return ProbeSet.from_dataset(
            dataset,
            n=n,
            seed=seed,
            mean=mean,
            std=std,
            class_names=names,
            data_range=data_range,
            indices=chosen,
            among=among,
        )

    dataset = loader.dataset
    if source.training:
        dataset = _unaugmented(datamodule, dataset)
    parts = source.gathered(sampled_items(loader, seed))
    among = None if None in parts else sorted(set().union(*parts))
    try:
        probes = draw(dataset, indices)
        if mean is not None:
            later = _normalised_later(source, probes)
            # Normalised images of a whole data set leave [0, 1]: these are not.
            untouched = within_unit_range(probes.x) and (stated or _above_zero(mean))
            if untouched and not (stated or later):
                warn(
                    f"mean={mean} and std={std} say that the inputs of {caller} are "
                    f"normalised, but they lie between 0 and 1, as pixels do, so both "
                    f"are left out: normalisation in a hook, in forward or in the "
                    f"step needs neither. If these pixels are something else, pass "
                    f"probes=ProbeSet.from_dataset(dataset, mean=..., std=...)"
                )
            if untouched or later:
                mean = std = None
                probes = draw(dataset, probes.index)
        return probes
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        why = str(error).rstrip(".")
        raise kind(
            f"{caller} can't draw probes from the training data: {why}. "
            f"Correct that, or {_HOW}."
        ) from error


def only_loader(source: SampleSource, caller: str) -> DataLoader[Any]:
    """The training loader.

    Args:
        source: the data.
        caller: which callback asks, for error texts.

    Raises:
        TypeError: if there is none, more than one, or one of another kind.
    """
    loaders = list(_loaders(source.loaders))
    if len(loaders) != 1:
        kinds = ", ".join(type(x).__name__ for x in loaders) or "none"
        raise TypeError(
            f"{caller} draws its probes from one training DataLoader, but found "
            f"{len(loaders)} ({kinds}); {_HOW}."
        )
    if not isinstance(loaders[0], DataLoader):
        raise TypeError(
            f"{caller} draws its probes from the data set of a DataLoader, but "
            f"the training data is a {type(loaders[0]).__name__}; {_HOW}."
        )
    return loaders[0]


def _loaders(source: Any) -> Iterator[Any]:
    if source is None:
        return
    if isinstance(source, DataLoader):
        yield source
    elif isinstance(source, dict):
        for value in source.values():
            yield from _loaders(value)
    elif isinstance(source, list | tuple):
        for value in source:
            yield from _loaders(value)
    elif hasattr(source, "flattened"):  # Lightning's CombinedLoader
        yield from source.flattened
    else:
        yield source


def _above_zero(mean: Channels) -> bool:
    return bool((torch.as_tensor(mean, dtype=torch.float64) > 0).all())


def _normalised_later(source: SampleSource, probes: ProbeSet) -> bool:
    """Whether ``mean`` and ``std`` are those of a hook that normalises batches."""
    prepare = source.preparation(probes).prepare
    if prepare is None or source.module is None:
        return False
    raw = probes.x.to(next(source.module.parameters()).device)
    with observing(source.module), torch.no_grad():
        undone = to_pixels(prepare(raw.clone()).double(), probes.mean, probes.std)
    return undone.shape == raw.shape and torch.allclose(undone, raw.double(), atol=1e-3)


def _unaugmented(datamodule: Any, dataset: Any) -> Any:
    """The datamodule's ``probe_dataset`` if it holds the same samples."""
    plain = getattr(datamodule, "probe_dataset", None)
    try:
        return plain if plain is not None and len(plain) == len(dataset) else dataset
    except TypeError:
        return dataset


def _stated(datamodule: Any) -> tuple[Any, Any]:
    """``mean`` and ``std`` of a datamodule, if they are numbers."""
    pair = getattr(datamodule, "mean", None), getattr(datamodule, "std", None)
    numbers = (int, float, list, tuple, np.ndarray, Tensor)
    return pair if all(isinstance(v, numbers) for v in pair) else (None, None)
