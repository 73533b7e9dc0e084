"""The layers of a network for which there are rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from torch import nn

from leakwatch.derivatives.layers.convolutions import fits_registers
from leakwatch.derivatives.layers.products import (
    RULES,
    LayerInNetwork,
    Layout,
    Rule,
)
from leakwatch.derivatives.runtime import SampleLoss, Weights
from leakwatch.derivatives.runtime.modules import NotLayerwiseError, readable

__all__ = [
    "KnownLayer",
    "check_every_layer_known",
    "known_layers",
    "layouts",
]


@final
@dataclass(frozen=True, eq=False)
class KnownLayer:
    """One layer of a network.

    Attributes:
        module: the layer.
        weight: full name of its weight, whether that is shared or not.
        bias: full name of its bias, ``None`` without one.
        shared: which of the two are shared, in this order.
        rule: how it takes part.
    """

    module: nn.Module
    weight: str
    bias: str | None
    shared: tuple[str, ...]
    rule: Rule


def layouts(loss: SampleLoss) -> tuple[Layout, ...]:
    """Memory formats for this network's images, the one that is likely faster first.

    Args:
        loss: module and criterion.
    """
    convolutions = [m for m in loss.modules() if isinstance(m, nn.Conv2d)]
    if any(map(fits_registers, convolutions)):
        return "contiguous", "channels_last"
    return "channels_last", "contiguous"


def known_layers(
    loss: SampleLoss, at: Weights, layout: Layout | None
) -> list[KnownLayer]:
    """The layers of a network for which there are rules.

    Args:
        loss: module and criterion, inside an evaluation.
        at: its weights.
        layout: memory format of the images; ``None`` where each row has weights of its
            own.

    Returns:
        Layers of a type in :data:`leakwatch.derivatives.layers.products.RULES` with
        shared parameters that nobody else owns.
    """
    owners: Counter[int] = Counter()
    for module in loss.modules():
        owners.update(id(p) for p in module._parameters.values() if p is not None)
    every = at.shared | at.fixed
    layers = []
    for prefix, module in loss.named_modules():
        # A forward replaced on the instance, or a weight computed from others (the
        # hooks of weight_norm and pruning) may do anything.
        if {"forward", "weight", "bias", "_conv_forward"} & vars(module).keys():
            continue
        own = {k: p for k, p in module._parameters.items() if p is not None}
        names = {k: f"{prefix}.{k}" for k in own}
        shared = tuple(
            names[k] for k in ("weight", "bias") if names.get(k) in at.shared
        )
        usual = "weight" in own and own.keys() <= {"weight", "bias"}
        make = RULES.get(type(module))
        if not shared or not usual or make is None:
            continue
        if any(owners[id(p)] > 1 for p in own.values()):
            continue
        tensors = {
            k: every[f"{prefix}.{k}"].detach()
            for k in (*own, *module._buffers)
            if f"{prefix}.{k}" in every
        }
        rule = make(LayerInNetwork(module, tensors, layout))
        if rule is not None:
            layers.append(
                KnownLayer(module, names["weight"], names.get("bias"), shared, rule)
            )
    return layers


def check_every_layer_known(layers: Sequence[KnownLayer], at: Weights) -> None:
    """Refuses a network of whose layers not all are known.

    Args:
        layers: those known.
        at: the network's weights.

    Raises:
        NotLayerwiseError: names the shared parameters of other layers.
    """
    missing = at.shared.keys() - {name for layer in layers for name in layer.shared}
    if missing:
        raise NotLayerwiseError(
            f"{readable(missing)} belong to no linear, convolution or normalisation "
            f"layer of their own"
        )
