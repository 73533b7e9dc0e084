"""Layers whose weight gradient is a simple product of what goes in and comes back.

With input a and gradient δ at its output, a linear layer that sees one vector has the
weight gradient δ aᵀ, and a convolution with T output positions has δ aᵀ with a unfolded
to patches: δ is out × T and a is (in · kernel) × T. The tangent of either follows from
the tangents Δ, A of the two factors: Δ aᵀ + δ Aᵀ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from leakwatch.evaluation import Weights
from leakwatch.gradients import GradientMap

Hook: TypeAlias = Callable[..., Any]

# Beyond this many output positions the general way is as fast.
_MOST_POSITIONS = 256


@dataclass(frozen=True)
class Tap:
    """One layer that is taken apart.

    Attributes:
        module: a linear layer that sees one vector per sample, or a convolution.
        parameters: full names of its weight and bias.
        input: shape of its input for a batch of one sample.
        output: shape of its output.
    """

    module: nn.Linear | nn.Conv2d
    parameters: frozenset[str]
    input: torch.Size
    output: torch.Size

    @property
    def numbers(self) -> int:
        """How many numbers its gradient has."""
        return sum(p.numel() for p in self.module.parameters())


def tappable(
    gradients: GradientMap, at: Weights, x: Tensor, y: Tensor
) -> dict[str, Tap]:
    """The layers of a network that can be taken apart for this sample, by name.

    Args:
        gradients: the gradient map, inside its ``evaluation``.
        at: its weights.
        x: one sample, without a batch dimension.
        y: its label.

    Returns:
        Linear layers that see exactly one vector per sample and convolutions with few
        output positions, each called once, with parameters that nobody else owns.
    """
    owners: Counter[int] = Counter()
    found: dict[str, nn.Linear | nn.Conv2d] = {}
    for name, module in gradients.named_modules():
        owners.update(id(p) for p in module._parameters.values() if p is not None)
        # A subclass, a forward replaced on the instance, or a weight computed from
        # others (the hooks of weight_norm and pruning) may do anything.
        replaced = {"forward", "weight", "bias", "_conv_forward"} & vars(module).keys()
        if replaced or not _names(name, module) <= at.shared.keys():
            continue
        if type(module) is nn.Linear or (
            type(module) is nn.Conv2d
            and module.groups == 1
            and module.padding_mode == "zeros"
            and not isinstance(module.padding, str)
        ):
            found[name] = module
    calls: dict[str, list[tuple[torch.Size, torch.Size] | None]] = {
        name: [] for name in found
    }

    def note(name: str) -> Hook:
        def hook(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
            calls[name].append((args[0].shape, out.shape) if args else None)

        return hook

    with hooked({name: (m, note(name)) for name, m in found.items()}), torch.no_grad():
        gradients.sample_loss(at.shared, at.fixed, x, y)
    taps = {}
    for name, module in found.items():
        alone = all(owners[id(p)] == 1 for p in module.parameters(recurse=False))
        shapes = calls[name][0] if len(calls[name]) == 1 and alone else None
        if shapes is not None and _simple(module, *shapes):
            taps[name] = Tap(module, frozenset(_names(name, module)), *shapes)
    return taps


def conv_gradient(module: nn.Conv2d, a: Tensor, delta: Tensor) -> Tensor:
    """Gradient of weight and bias, flat.

    Args:
        module: the convolution.
        a: its input, ``(1, in, height, width)``.
        delta: gradient at its output, ``(1, out, height', width')``.

    Returns:
        ``(numbers,)``.
    """
    d = delta.reshape(module.out_channels, -1)
    parts = [(d @ patches(module, a).T).reshape(-1)]
    if module.bias is not None:
        parts.append(d.sum(1))
    return torch.cat(parts)


def conv_tangents(
    module: nn.Conv2d,
    a: Tensor,
    delta: Tensor,
    tangent_a: Tensor,
    tangent_delta: Tensor,
    out: Tensor,
) -> None:
    """Writes Δ aᵀ + δ Aᵀ, and the bias' ΣΔ, for many directions into ``out``.

    Args:
        module: the convolution.
        a: its input, ``(1, in, height, width)``.
        delta: gradient at its output, ``(1, out, height', width')``.
        tangent_a: tangents of a, ``(k, in, height, width)``.
        tangent_delta: tangents of δ, ``(k, out, height', width')``.
        out: ``(k, numbers)``, in any precision.
    """
    k, rows, channels = len(tangent_a), module.out_channels, module.in_channels
    moved = tangent_delta.reshape(k, rows, -1)
    first = moved.reshape(k * rows, -1) @ patches(module, a).T
    # Σ_t δ[o, t] A[i, patch t] over all patches is a convolution of A with δ, where
    # stride and dilation change roles.
    second = torch.nn.functional.conv2d(
        tangent_a.reshape(k * channels, 1, *a.shape[2:]),
        delta.reshape(rows, 1, *delta.shape[2:]),
        padding=module.padding,
        stride=module.dilation,
        dilation=module.stride,
    )[:, :, : module.kernel_size[0], : module.kernel_size[1]]
    size = module.weight.numel()
    by_channel = (k, channels, rows, *module.kernel_size)
    tangent = first.view(k, rows, channels, *module.kernel_size)
    tangent += second.reshape(by_channel).transpose(1, 2)
    out[:, :size] = first.view(k, size)
    if module.bias is not None:
        out[:, size:] = moved.sum(2)


def patches(module: nn.Conv2d, a: Tensor) -> Tensor:
    """The patches of an input ``(1, in, height, width)``, ``(in · kernel, T)``."""
    unfolded: Tensor = torch.nn.functional.unfold(
        a,
        module.kernel_size,
        dilation=module.dilation,
        padding=margins(module),
        stride=module.stride,
    )
    return unfolded[0]


def margins(module: nn.Conv2d) -> tuple[int, ...]:
    """Zeros added at each side, (rows, columns)."""
    if isinstance(module.padding, str):
        raise TypeError(f"padding={module.padding!r} has no fixed size.")
    return module.padding


@contextmanager
def hooked(hooks: Mapping[str, tuple[nn.Module, Hook]]) -> Iterator[None]:
    """Forward hooks that run before any other, removed afterwards."""
    handles: list[RemovableHandle] = []
    try:
        for module, hook in hooks.values():
            handles.append(module.register_forward_hook(hook, prepend=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _simple(module: nn.Linear | nn.Conv2d, given: torch.Size, made: torch.Size) -> bool:
    if isinstance(module, nn.Linear):
        one = made.numel() == module.out_features
        return one and min(module.in_features, module.out_features) > 1
    batch_of_one = len(made) == 4 == len(given) and given[0] == made[0] == 1
    return batch_of_one and made[2] * made[3] <= _MOST_POSITIONS


def _names(module_name: str, module: nn.Module) -> set[str]:
    own = (name for name, p in module._parameters.items() if p is not None)
    return {f"{module_name}.{name}" for name in own}
