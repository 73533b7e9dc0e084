"""Whether data suit a network, found out by a forward pass without any derivative."""

from __future__ import annotations

import torch
from torch import Tensor

from leakwatch.checks import check_samples
from leakwatch.derivatives.losses import classification_criterion
from leakwatch.derivatives.network import DifferentiableNetwork

__all__ = ["check_data", "checked_samples"]


def checked_samples(
    network: DifferentiableNetwork, x: Tensor, y: Tensor
) -> tuple[Tensor, Tensor]:
    """Moves samples to the network's device, and validates them there.

    Args:
        network: the network.
        x: network inputs, on any device.
        y: labels, on any device.

    Returns:
        Both, detached, on the network's device.

    Raises:
        TypeError: as :meth:`leakwatch.gradients.GradientMap.check`.
        ValueError: the same.
    """
    check_samples(x, y)  # says so of what is no tensor, before it is moved
    device = next(network.module.parameters()).device
    # First, because the check runs the network on them.
    x, y = x.detach().to(device), y.to(device)
    check_data(network, x, y)
    return x, y


def check_data(network: DifferentiableNetwork, x: Tensor, y: Tensor) -> None:
    """Raises what :meth:`leakwatch.derivatives.GradientMap.check` raises.

    Args:
        network: the network.
        x: network inputs.
        y: labels.

    Raises:
        UnsupportedModuleError: if a parameter is read where it is not registered.
    """
    check_samples(x, y)
    broken = ~torch.isfinite(x.detach()).reshape(len(x), -1).all(1)
    if bool(broken.any()):
        raise ValueError(
            f"the input of sample {int(broken.nonzero()[0])} holds NaN or infinity."
        )
    default = network.criterion is classification_criterion
    if default and (y.is_floating_point() or y.is_complex()):
        raise TypeError(
            f"the default criterion needs integer class labels, got {y.dtype}; "
            f"use y.long(), or pass a criterion for other targets."
        )
    logits, losses = _forward(network, x[:2], y[:2])
    if default:
        _check_classes(network, y, logits)
    for i, loss in enumerate(losses):
        if not bool(torch.isfinite(loss)):
            raise ValueError(
                f"the loss of sample {i} is {float(loss)}; the weights hold NaN "
                f"or infinity, or the input is far from what the network expects."
            )


def _forward(
    network: DifferentiableNetwork, x: Tensor, y: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """What looks like logits, and the loss of each sample."""
    logits: list[Tensor] = []

    def keep(_: object, __: object, out: object) -> None:
        if isinstance(out, Tensor) and out.ndim == 2:
            logits.append(out)

    with network.evaluation(x) as at, torch.no_grad():
        network.refuse_stray_reads(at, *network.prepared(x, y))
        handle = network.module.register_forward_hook(keep)
        try:
            samples = zip(*network.prepared(x, y), strict=True)
            losses = [
                network.sample_loss(at.shared, at.fixed, xi, yi) for xi, yi in samples
            ]
        finally:
            handle.remove()
    return logits, losses


def _check_classes(
    network: DifferentiableNetwork, y: Tensor, logits: list[Tensor]
) -> None:
    classes = logits[-1].shape[1]
    wrong = (y < 0) | (y >= classes)
    if bool(wrong.any()):
        i = int(wrong.nonzero()[0])
        raise ValueError(
            f"label {int(y[i])} of sample {i} is outside the network's "
            f"classes: its {classes} logits allow labels 0 to "
            f"{classes - 1}."
        )
    if classes > 1 and all(map(_probabilities, logits)):
        network.note(
            "its outputs add up to 1, as if softmax had been applied; "
            "cross-entropy applies it once more. If training does not, pass "
            "a criterion(module, x, y) that does what training does"
        )


def _probabilities(out: Tensor) -> bool:
    return bool((out >= 0).all() and ((out.sum(1) - 1).abs() < 1e-3).all())
