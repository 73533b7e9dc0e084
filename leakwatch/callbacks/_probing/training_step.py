"""The training step itself as a criterion: the loss of one sample in a batch of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

__all__ = ["training_step_losses", "whole_training_step"]


def training_step_losses(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """What ``training_step`` returns for each sample, alone in a batch ``[x, y]``.

    Args:
        module: a ``LightningModule`` in automatic optimisation. What its step logs is
            dropped, and what it keeps is undone by who calls this.
        x: inputs, ``(batch, ...)``.
        y: labels, ``(batch,)``.

    Returns:
        ``(batch,)``.

    Raises:
        TypeError: for a module without such a step, or a step that returns no loss.
    """
    step = getattr(module, "training_step", None)
    if step is None or not getattr(module, "automatic_optimization", False):
        raise TypeError(
            "criterion='training_step' needs a LightningModule in automatic "
            "optimisation, whose step has no effect but its loss; pass a function "
            "(module, x, y) that returns the loss of each sample."
        )
    each = range(len(x))
    return torch.stack([_loss(step([x[i : i + 1], y[i : i + 1]], 0)) for i in each])


def whole_training_step(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """What ``training_step`` returns for the batch, as the loss of each sample.

    Arguments and result are those of :func:`training_step_losses`.
    """
    step: Callable[[list[Tensor], int], object] = module.training_step  # type: ignore[assignment]
    return _loss(step([x, y], 0)).expand(len(y))


def _loss(out: object) -> Tensor:
    loss = out.get("loss") if isinstance(out, Mapping) else out
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise TypeError(
            f"training_step returned a {type(out).__name__}, expected its loss, a "
            f"tensor with one number."
        )
    return loss.reshape(())
