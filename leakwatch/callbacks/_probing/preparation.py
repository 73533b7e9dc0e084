"""What training does to samples between its data set and its training step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.utils.data import default_collate

from leakwatch.callbacks._probing.observing import observing
from leakwatch.derivatives import Prepare
from leakwatch.derivatives.runtime import as_evaluated
from leakwatch.derivatives.runtime.rng_and_precision import isolated_rng
from leakwatch.probes.items import INPUT_KEYS, LABEL_KEYS
from leakwatch.status import describe_error

__all__ = ["HOOKS", "found_preparation", "normalizing", "samples_of", "transfer_hooks"]

HOOKS = ("on_before_batch_transfer", "on_after_batch_transfer")
# Share of the largest value by which rounding moves a normalised one.
_SAME = 1e-5
_Pack = Callable[[Any, Any], Any]


def samples_of(batch: Any) -> tuple[Tensor, Tensor]:
    """Inputs and labels of a batch, in the forms that a data set's items may have.

    Args:
        batch: ``(inputs, labels)``, ``(inputs, labels, anything)`` or a mapping.

    Raises:
        TypeError: if it has another form.
    """
    x = y = None
    if isinstance(batch, Mapping):
        x = next((batch[key] for key in INPUT_KEYS if key in batch), None)
        y = next((batch[key] for key in LABEL_KEYS if key in batch), None)
    elif isinstance(batch, Sequence) and len(batch) in (2, 3):
        x, y = batch[0], batch[1]
    if isinstance(x, Tensor) and isinstance(y, Tensor) and x.is_floating_point():
        return x, y
    raise TypeError(
        f"inputs and labels are not found in a batch, a {type(batch).__name__}; "
        f"expected (inputs, labels) or a mapping such as {{'image': …, 'label': …}}"
    )


def transfer_hooks(
    module: LightningModule, datamodule: Any
) -> dict[str, Callable[[Any, int], Any]]:
    """What a Trainer calls with each batch before and after it moves it, by name.

    Args:
        module: what is trained.
        datamodule: its data module, whose hooks go first; ``None`` or something else
            without hooks.
    """
    found = {}
    for hook in HOOKS:
        for owner in (datamodule, module):
            hooked = isinstance(owner, LightningDataModule | LightningModule)
            if hooked and is_overridden(hook, owner):
                found[hook] = getattr(owner, hook)
                break
    return found


def found_preparation(
    module: LightningModule, datamodule: Any, loader: Any, x: Tensor, y: Tensor
) -> tuple[Prepare | None, str]:
    """What collate function and transfer hooks do to inputs, as a function.

    Args:
        module: what is trained.
        datamodule: its data module; ``None`` or something else without hooks.
        loader: of the training data.
        x: inputs as the data set has them, on the module's device.
        y: their labels.

    Returns:
        The function, or ``None`` where nothing is done to inputs; and why there is
        none although something is done, for a sentence. It takes a batch, may be
        differentiated, and is the same for each sample whatever else is in its batch.
    """
    collate = getattr(loader, "collate_fn", None)
    hooks = transfer_hooks(module, datamodule)
    steps = list(hooks.values())
    named = [] if collate in (None, default_collate) else ["collate_fn"]
    named += hooks
    if not named:
        return None, ""
    why = ""
    for pack in _packs():
        prepare = _prepare(collate if "collate_fn" in named else None, steps, pack)
        try:
            why = _objection(prepare, module, x, y)
        except Exception as error:
            why = why or f"can't be applied to probes ({describe_error(error)})"
            continue
        if why == "":
            return _first(prepare), ""
        break
    return None, "" if why == _NOTHING else f"{' and '.join(named)} {why}"


_NOTHING = "leaves inputs alone"


def _packs() -> list[_Pack]:
    """Ways to put input and label together, of an item as of a batch."""

    def mapping(x_key: str, y_key: str) -> _Pack:
        return lambda x, y: {x_key: x, y_key: y}

    keys = product(INPUT_KEYS, LABEL_KEYS)
    return [lambda x, y: [x, y], *(mapping(*pair) for pair in keys)]


def _first(prepare: Callable[..., tuple[Tensor, Tensor]]) -> Prepare:
    return lambda x: prepare(x)[0]


def _prepare(
    collate: Callable[[list[Any]], Any] | None,
    steps: Sequence[Callable[..., Any]],
    pack: _Pack,
) -> Callable[..., tuple[Tensor, Tensor]]:
    def prepare(x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
        labels = torch.zeros(len(x), dtype=torch.long) if y is None else y.cpu()
        if collate is None:
            batch = pack(x, labels.to(x.device))
        else:
            pairs = zip(x, labels.tolist(), strict=True)
            batch = collate([pack(one, label) for one, label in pairs])
        for step in steps:
            batch = step(batch, 0)
        return samples_of(batch)

    return prepare


def normalizing(
    prepare: Prepare, x: Tensor
) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Mean and standard deviation per channel, if a preparation applies nothing else.

    Args:
        prepare: the preparation.
        x: inputs, ``(n, ...)``; channels are the second of more than two dimensions.

    Returns:
        Those of (x − mean)/std; ``None`` for any other preparation.

    Example:
        >>> x = torch.rand(3, 2, 4, 4, generator=torch.Generator().manual_seed(0))
        >>> normalizing(lambda x: (x - 0.5) / 0.25, x)
        ((0.5, 0.5), (0.25, 0.25))
        >>> normalizing(torch.sqrt, x)
    """
    with torch.no_grad():
        there = prepare(x.clone())
        offset, one = prepare(torch.zeros_like(x)), prepare(torch.ones_like(x))
    if not there.shape == offset.shape == one.shape == x.shape:
        return None
    slope = (one - offset).double()
    channels = [d for d in range(x.ndim) if d != 1 or x.ndim < 3]
    scale = slope.mean(channels, keepdim=True)
    shift = offset.double().mean(channels, keepdim=True)
    if not bool((scale > 0).all()):
        return None
    affine = scale * x.double() + shift
    near = float(_SAME * (affine.abs().max() + shift.abs().max()))
    if not bool((affine - there.double()).abs().max() <= near):
        return None
    mean, std = -shift / scale, 1 / scale
    return tuple(mean.flatten().tolist()), tuple(std.flatten().tolist())


def _objection(
    prepare: Callable[..., tuple[Tensor, Tensor]],
    module: LightningModule,
    x: Tensor,
    y: Tensor,
) -> str:
    """Why inputs of probes can't be prepared like that; empty if they can."""
    with observing(module), as_evaluated(module), torch.no_grad():
        seen = []
        for seed in (0, 1):
            with isolated_rng(seed):
                seen.append(prepare(x.clone(), y.clone()))
        (there, labels), (again, _) = seen
        if there.shape == x.shape and torch.equal(there, x):
            return _NOTHING
        if len(there) != len(x) or not torch.equal(labels.cpu(), y.cpu()):
            return "changes labels, or which samples are in a batch"
        with isolated_rng(0):
            alone, _ = prepare(x[:1].clone())
    if there.shape != again.shape or not torch.equal(there, again):
        return "draws at random"
    if alone.shape != there[:1].shape or not torch.allclose(alone, there[:1], 1e-4):
        return "does to a sample what depends on the others in its batch"
    return ""
