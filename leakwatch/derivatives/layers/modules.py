"""The layers whose weight gradients are known, and how each is computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leakwatch.derivatives.layers.convolutions import Convolution, GroupedConvolution
from leakwatch.derivatives.layers.kernels import Affine, Kernel, Linear
from leakwatch.derivatives.runtime import SampleLoss, Weights
from leakwatch.derivatives.runtime.modules import NotLayerwiseError, readable
from leakwatch.derivatives.safe_ops.convolution import ConstantConvolution

__all__ = [
    "Layer",
    "Layout",
    "Made",
    "NotLayerwiseError",
    "check_every_layer_known",
    "known_layers",
    "layouts",
]

Layout: TypeAlias = Literal["channels_last", "contiguous"]

_BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass(frozen=True)
class Made:
    """How a layer is computed with constant weights."""

    kernel: Kernel
    forward: Callable[[Tensor], Tensor]
    constant: ConstantConvolution | None = None
    prepare: Callable[[Tensor], Tensor] | None = None  # what comes before the kernel


@dataclass(frozen=True)
class Layer:
    """One layer of a network.

    Attributes:
        module: the layer.
        names: of its shared weight and bias.
        made: how it is computed.
    """

    module: nn.Module
    names: tuple[str, ...]
    made: Made


def layouts(loss: SampleLoss) -> tuple[Layout, ...]:
    """Memory formats for this network's images, the one that is likely faster first.

    Args:
        loss: module and criterion.
    """
    convolutions = [m for m in loss.modules() if isinstance(m, nn.Conv2d)]
    if any(_fits_registers(m) for m in convolutions):
        return "contiguous", "channels_last"
    return "channels_last", "contiguous"


def _fits_registers(module: nn.Conv2d) -> bool:
    # They hold 8 numbers; with other channel counts, or strides, the library's grouped
    # kernels are several times slower than patches.
    # With many channels the products of patches outweigh copying them.
    fits = module.in_channels % 8 == module.out_channels % 8 == 0
    return fits and module.stride == (1, 1) and module.out_channels < 64


def known_layers(loss: SampleLoss, at: Weights, layout: Layout) -> list[Layer]:
    """The layers of a network whose weight gradients are known.

    Args:
        loss: module and criterion, inside an evaluation.
        at: its weights.
        layout: memory format of the images.

    Returns:
        Linear, convolution and normalisation layers with shared parameters that nobody
        else owns.
    """
    owners: Counter[int] = Counter()
    for module in loss.modules():
        owners.update(id(p) for p in module._parameters.values() if p is not None)
    found = []
    for name, module in loss.named_modules():
        # A forward replaced on the instance, or a weight computed from others (the
        # hooks of weight_norm and pruning) may do anything.
        if {"forward", "weight", "bias", "_conv_forward"} & vars(module).keys():
            continue
        own = {k: p for k, p in module._parameters.items() if p is not None}
        shared = {k: f"{name}.{k}" for k in own if f"{name}.{k}" in at.shared}
        known = own.keys() <= {"weight", "bias"}
        if not shared or not known or any(owners[id(p)] > 1 for p in own.values()):
            continue
        tensors = {
            k: (at.shared | at.fixed)[f"{name}.{k}"].detach()
            for k in (*own, *module._buffers)
            if f"{name}.{k}" in at.shared or f"{name}.{k}" in at.fixed
        }
        made = _made(module, tensors, ("weight" in shared, "bias" in shared), layout)
        if made is not None:
            names = tuple(shared[k] for k in ("weight", "bias") if k in shared)
            found.append(Layer(module, names, made))
    return found


def check_every_layer_known(layers: Sequence[Layer], at: Weights) -> None:
    """Refuses a network of whose layers not all are known.

    Args:
        layers: those known.
        at: the network's weights.

    Raises:
        NotLayerwiseError: names the shared parameters of other layers.
    """
    missing = at.shared.keys() - {name for layer in layers for name in layer.names}
    if missing:
        raise NotLayerwiseError(
            f"{readable(missing)} belong to no linear, convolution or normalisation "
            f"layer of their own"
        )


def _made(
    module: nn.Module, t: dict[str, Tensor], has: tuple[bool, bool], layout: Layout
) -> Made | None:
    """How a known layer is computed, ``None`` for others."""
    kind = type(module)  # exact types: a subclass may do anything
    weight, bias = t.get("weight"), t.get("bias")
    if isinstance(module, nn.modules.batchnorm._BatchNorm) and kind in _BATCH_NORM:
        return _batch_norm(module, t, has) if "running_var" in t else None
    if weight is None:
        return None
    if isinstance(module, nn.Linear) and kind is nn.Linear:
        return Made(Linear(*has), lambda a: F.linear(a, weight, bias))
    if isinstance(module, nn.Conv2d) and kind is nn.Conv2d:
        sized = module.padding_mode == "zeros" and not isinstance(module.padding, str)
        return _convolution(module, weight, bias, has, layout) if sized else None
    if isinstance(module, nn.LayerNorm) and kind is nn.LayerNorm:
        shape, eps = module.normalized_shape, module.eps
        return Made(
            Affine(*has, None, len(shape), None, None),
            lambda a: a * weight if bias is None else torch.addcmul(bias, a, weight),
            prepare=lambda a: F.layer_norm(a, shape, eps=eps),
        )
    if isinstance(module, nn.GroupNorm) and kind is nn.GroupNorm:
        groups, small = module.num_groups, module.eps
        return Made(
            Affine(*has, 1, 1, None, None),
            lambda a: _scaled(a, weight, bias),
            prepare=lambda a: F.group_norm(a, groups, eps=small),
        )
    return None


def _convolution(
    module: nn.Conv2d,
    weight: Tensor,
    bias: Tensor | None,
    has: tuple[bool, bool],
    layout: Layout,
) -> Made:
    large = layout == "contiguous" and _fits_registers(module)
    grouped = module.groups > 1 or large
    kernel = (GroupedConvolution if grouped else Convolution)(*has, module)
    if layout == "channels_last":
        weight = weight.contiguous(memory_format=torch.channels_last)
    convolution = ConstantConvolution(
        weight,
        bias,
        cast(tuple[int, int], module.stride),
        cast(tuple[int, int], module.padding),
        cast(tuple[int, int], module.dilation),
        module.groups,
    )

    def forward(a: Tensor) -> Tensor:
        if a.ndim != 4:
            raise NotLayerwiseError("a convolution met an input without a batch")
        return convolution(a)

    return Made(kernel, forward, convolution)


def _batch_norm(
    module: nn.modules.batchnorm._BatchNorm,
    t: dict[str, Tensor],
    has: tuple[bool, bool],
) -> Made:
    mean, inverse = t["running_mean"], (t["running_var"] + module.eps).rsqrt()
    scale = inverse * t["weight"] if "weight" in t else inverse
    shift = t["bias"] - mean * scale if "bias" in t else -mean * scale
    kernel = Affine(*has, 1, 1, mean, inverse)
    return Made(kernel, lambda a: _scaled(a, scale, shift))


def _scaled(a: Tensor, scale: Tensor, shift: Tensor | None) -> Tensor:
    shape = (-1, *[1] * (a.ndim - 2))
    if shift is None:
        return a * scale.view(shape)
    return torch.addcmul(shift.view(shape), a, scale.view(shape))
