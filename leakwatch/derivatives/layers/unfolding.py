"""Patches of a convolution, and the maps between its factors and its gradient."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from leakwatch.derivatives.layers.calls import Call


def vectors(call: Call, a: Tensor) -> Tensor:
    """What the weight meets at each position, by group, ``(groups, T, P)``.

    Args:
        call: a linear layer or a convolution.
        a: its input, one sample.
    """
    if call.kind == "linear":
        return a.reshape(1, -1, call.weight[1])
    unfolded = functional.unfold(
        a.reshape(call.input),
        call.weight[2:],
        dilation=call.dilation,
        padding=call.padding,
        stride=call.stride,
    )
    by_group = unfolded.reshape(call.groups, -1, unfolded.shape[-1])
    return by_group.transpose(1, 2)


def spread(call: Call, delta: Tensor) -> Tensor:
    """The map from one input channel to the gradient, ``(groups, filters, m, s)``.

    δᵀa is linear in a and treats all channels of a group alike: a convolution takes
    the s pixels of a channel to the m kernel positions of each filter.

    Args:
        call: a linear layer, where tokens are pixels and the kernel has size 1, or a
            convolution.
        delta: gradient at its output.
    """
    if call.kind == "linear":
        return delta.reshape(1, -1, call.weight[0], 1).permute(0, 2, 3, 1)
    size, pixels = call.weight[2:], call.input[2:]
    # The rows and columns at the end that no patch reaches.
    rest = [
        (pixels[i] + 2 * call.padding[i] - call.dilation[i] * (size[i] - 1) - 1)
        % call.stride[i]
        for i in range(2)
    ]
    ones = torch.eye(math.prod(size), dtype=delta.dtype, device=delta.device)
    pixels_to_kernel = functional.conv_transpose2d(
        delta.reshape(call.weight[0], 1, *call.made),
        ones.view(1, -1, *size),
        stride=call.stride,
        padding=call.padding,
        output_padding=rest,
        dilation=call.dilation,
    )
    return pixels_to_kernel.view(call.groups, -1, math.prod(size), math.prod(pixels))
