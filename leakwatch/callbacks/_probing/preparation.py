"""What training does to samples between its data set and its training step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

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

__all__ = [
    "HOOKS",
    "Preparation",
    "found_preparation",
    "normalizing",
    "samples_of",
    "transfer_hooks",
]

HOOKS = (
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
)
# Share of the largest value by which rounding moves a normalised one.
_SAME = 1e-5
# Flips, crops, turns and jitter, filled with zeros, stay within these: standard
# deviations by which the mean of an image moves, the logarithm of their ratio, and
# ranges of pixels by which one is left (where none was negative, to below), or the
# share of it that is kept.
_MOVED, _STRETCHED, _LEFT, _BELOW, _SHRUNK = 0.5, 0.4, 0.25, 0.1, 0.6
# Images and draws that tell, and how many of their spreads are no chance.
_IMAGES, _DRAWS, _CHANCE = 8, 16, 3.0
_Pack = Callable[[Any, Any], Any]


class Preparation(NamedTuple):
    """What becomes of samples before the network gets them.

    Attributes:
        prepare: a function of a batch of inputs; ``None`` for nothing.
        why: why it does not do all that training does, for a sentence; or empty.
        moved: what training makes of some samples, ``(n, ...)``, where that moves or
            stretches their values as no flip, crop or jitter does.
    """

    prepare: Prepare | None = None
    why: str = ""
    moved: Tensor | None = None


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
    """What a Trainer calls with each batch before, to, and after moving it, by name.

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
                if hook == "transfer_batch_to_device":
                    found[hook] = _transferring(found[hook], module)
                break
    return found


def _transferring(
    hook: Callable[[Any, torch.device, int], Any], module: LightningModule
) -> Callable[[Any, int], Any]:
    return lambda batch, index: hook(batch, next(module.parameters()).device, index)


def found_preparation(
    module: LightningModule, datamodule: Any, loader: Any, x: Tensor, y: Tensor
) -> Preparation:
    """What collate function and transfer hooks do to inputs, as a function.

    Args:
        module: what is trained.
        datamodule: its data module; ``None`` or something else without hooks.
        loader: of the training data.
        x: inputs as the data set has them, on the module's device.
        y: their labels.

    Returns:
        The function, or ``None`` where nothing is done to inputs, or nothing that can
        be done to probes. It takes a batch, may be differentiated, and is the same for
        each sample whatever else is in its batch.
    """
    collate = getattr(loader, "collate_fn", None)
    hooks = transfer_hooks(module, datamodule)
    steps = list(hooks.values())
    named = [] if collate in (None, default_collate) else ["collate_fn"]
    named += hooks
    if not named:
        return Preparation()
    why, name = "", " and ".join(named)
    for pack in _packs():
        prepare = _prepare(collate if "collate_fn" in named else None, steps, pack)
        with observing(module, datamodule, collate), torch.no_grad():
            try:
                why, there = _objection(prepare, module, x, y)
            except Exception as error:
                why = why or f"can't be applied to probes ({describe_error(error)})"
                continue
            moved = _moved(prepare, x, y, there)
        if why in ("", _NOTHING):
            more = "" if moved is None else f"{name} does more to batches in training"
            return Preparation(None if why else _first(prepare), more, moved)
        return Preparation(None, f"{name} {why}", moved)
    return Preparation(None, f"{name} {why}")


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
) -> tuple[str, Tensor]:
    """Why inputs of probes can't be prepared like that, empty if they can; inputs."""
    with as_evaluated(module):
        seen = []
        for seed in (0, 1):
            with isolated_rng(seed):
                seen.append(prepare(x.clone(), y.clone()))
        (there, labels), (again, _) = seen
        if there.shape == x.shape and torch.equal(there, x):
            return _NOTHING, x
        if len(there) != len(x) or not torch.equal(labels.cpu(), y.cpu()):
            return "changes labels, or which samples are in a batch", x
        with isolated_rng(0):
            alone, _ = prepare(x[:1].clone(), y[:1].clone())
        with isolated_rng(0):
            unlabelled, _ = prepare(x.clone())
    if there.shape != again.shape or not torch.equal(there, again):
        return "draws at random", x
    if alone.shape != there[:1].shape or not torch.allclose(alone, there[:1], 1e-4):
        return "does to a sample what depends on the others in its batch", x
    if not torch.equal(unlabelled, there):
        return "does to a sample what depends on its label", x
    return "", there


def _moved(
    prepare: Callable[..., tuple[Tensor, Tensor]], x: Tensor, y: Tensor, there: Tensor
) -> Tensor | None:
    """What training makes of inputs, where their values are others; else ``None``.

    Args:
        prepare: what training does, in the mode of training.
        x: inputs.
        y: their labels.
        there: the inputs as probes reach the network.
    """
    few = torch.linspace(0, len(x) - 1, min(_IMAGES, len(x))).round().long()
    few = few.to(x.device)
    x, y, before = x[few], y[few.to(y.device)], there[few].double().flatten(1)
    draws: list[Tensor] = []
    for seed in range(_DRAWS):
        try:
            with isolated_rng(seed):
                drawn, _ = prepare(x.clone(), y.clone())
        except Exception:  # what stands in the way in training is not ours to say
            return None
        if len(drawn) != len(x):
            return None
        draws.append(drawn.detach())
        if len(draws) == 2 and torch.equal(draws[0], draws[1]):
            break  # nothing is drawn
    after = torch.stack([drawn.double().flatten(1) for drawn in draws])
    low, high = before.min().clamp(max=0), before.max().clamp(min=0)
    below = (_LEFT if bool(low < 0) else _BELOW) * (high - low)
    stays = after.min() >= low - below and after.max() <= high + _LEFT * (high - low)
    kept = after.max() - after.min() >= _SHRUNK * (before.max() - before.min())
    if bool(stays & kept):
        return None
    spread, spreads = before.std(1), after.std(2)
    shift = (after.mean(2) - before.mean(1)) / spread.mean()
    stretch = (spreads / spread).log()[:, spread > 0]
    for change, least in ((shift, _MOVED), (stretch, _STRETCHED)):
        chance = change.std(0, correction=0).square().mean().sqrt()
        far = change.mean(0).square().mean().sqrt()
        if bool(far > least + _CHANCE * chance / len(draws) ** 0.5):
            return torch.cat(draws[:2])
    return None
