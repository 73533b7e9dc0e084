"""What makes a probe set valid; each error says what to do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from leakwatch.normalization import check_channels
from leakwatch.probes.items import as_input, as_target, as_tensor, is_class

__all__ = [
    "check_finite",
    "check_index",
    "check_indices",
    "check_inputs",
    "check_range",
    "check_targets",
    "checked_fields",
]


def checked_fields(probes: Any) -> dict[str, Any]:
    """The fields of a ProbeSet, validated and converted; tensors are copies."""
    x = check_inputs(probes.x)
    index = tuple(int(i) for i in probes.index)
    check_index(index, len(x))
    check_finite(x, index)
    y = check_targets(probes.y, len(x))
    class_names = probes.class_names if is_class(y[0]) else None
    if class_names is not None:
        class_names = tuple(map(str, class_names))
        check_range(y, index, len(class_names))
    mean, std = check_channels(probes.mean, probes.std, x.shape)
    if probes.units not in ("pixel", "input"):
        raise ValueError(f"units={probes.units!r}; expected 'pixel' or 'input'")
    if mean is not None and probes.units == "input":
        raise ValueError(
            "units='input' with a known mean and std; expected units='pixel'"
        )
    for name in ("data_range", "prior_std"):
        if not 0 < getattr(probes, name) < math.inf:
            raise ValueError(
                f"{name}={getattr(probes, name)}; expected a positive number in pixel "
                "units, such as data_range=1.0 for images in [0, 1]"
            )
    prior_mean = as_input(probes.prior_mean, "prior_mean")
    if prior_mean.shape != x.shape[1:]:
        raise ValueError(
            f"prior_mean has shape {tuple(prior_mean.shape)}; expected that of one "
            f"sample, {tuple(x.shape[1:])}"
        )
    if probes.prior is not None:
        probes.prior.check(tuple(x.shape[1:]))
    return {
        "x": _own(x),
        "y": _own(y),
        "index": index,
        "data_range": float(probes.data_range),
        "prior_std": float(probes.prior_std),
        "prior_mean": _own(prior_mean),
        "class_names": class_names,
        "mean": mean,
        "std": std,
    }


def _own(tensor: Tensor) -> Tensor:
    # A tensor made in inference mode could never be part of a derivative.
    with torch.inference_mode(False):
        return tensor.clone()


def check_range(y: Int[Tensor, " n"], index: tuple[int, ...], num_classes: int) -> None:
    """Raise at the first label that is not below `num_classes`."""
    for i, label in enumerate(y.tolist()):
        if label >= num_classes:
            raise ValueError(
                f"probe {i} (data-set index {index[i]}) has label {label}; expected 0 "
                f"to {num_classes - 1} for {num_classes} classes: check the number of "
                "outputs or class names, or shift labels that start at 1 with "
                "target_transform"
            )


def check_indices(indices: Sequence[int], size: int) -> list[int]:
    """Data-set indices as integers, or an error where one does not exist."""
    chosen = [int(index) for index in indices]
    if not chosen:
        raise ValueError(
            "indices is empty; expected at least one data-set index, or leave it out "
            "to have probes drawn"
        )
    for index in chosen:
        if not 0 <= index < size:
            raise ValueError(
                f"indices contains {index}; expected 0 to {size - 1} for a data set of "
                f"{size} items"
            )
    return chosen


def check_inputs(x: Any) -> Float[Tensor, "n ..."]:
    """Network inputs as a float CPU tensor with a probe dimension."""
    inputs = as_input(x, "x")
    if inputs.ndim < 2 or inputs.numel() == 0:
        raise ValueError(
            f"x has shape {tuple(inputs.shape)}; expected (n, ...) with at "
            "least one probe and one value per probe, such as (32, 3, 32, 32)"
        )
    return inputs


def check_index(index: tuple[int, ...], n: int) -> None:
    """Raise unless there is one distinct index per probe."""
    if len(index) != n:
        raise ValueError(
            f"got {len(index)} indices for {n} probes; expected one data-set index per "
            "probe"
        )
    seen: dict[int, int] = {}
    for position, value in enumerate(index):
        if value in seen:
            raise ValueError(
                f"data-set index {value} occurs twice (probes {seen[value]} and "
                f"{position}); expected distinct indices, since they identify a probe "
                "over epochs"
            )
        seen[value] = position


def check_finite(x: Float[Tensor, "n ..."], index: tuple[int, ...]) -> None:
    """Raise if a probe contains a value that is not finite."""
    bad = (~x.isfinite()).flatten(1).sum(1)
    if bad.any():
        i = int(bad.nonzero()[0])
        raise ValueError(
            f"probe {i} (data-set index {index[i]}) contains {int(x[i].isnan().sum())} "
            f"NaN and {int(x[i].isinf().sum())} infinite values; expected finite "
            "inputs: check this item and its transform, or leave it out"
        )


def check_targets(y: Any, n: int) -> Shaped[Tensor, "n ..."]:
    """One class index for each of n probes, int64, or other targets for a criterion."""
    given = as_tensor(y, "y").detach()
    if given.ndim == 0 or len(given) != n:
        raise ValueError(
            f"y has shape {tuple(given.shape)} for {n} probes; expected ({n},), one "
            f"class index per probe, or ({n}, ...), one target for a criterion"
        )
    targets = torch.stack([as_target(target, "y") for target in given])
    if targets.ndim == 1 and targets.dtype == torch.long and bool((targets < 0).any()):
        i = int((targets < 0).nonzero()[0])
        raise ValueError(
            f"probe {i} has label {int(targets[i])}; expected class indices from 0. "
            "Leave unlabelled items out, or map labels with target_transform"
        )
    if not bool(targets.isfinite().all()):
        i = int((~targets.isfinite()).reshape(n, -1).any(1).nonzero()[0])
        raise ValueError(f"the target of probe {i} holds NaN or infinity")
    return targets
