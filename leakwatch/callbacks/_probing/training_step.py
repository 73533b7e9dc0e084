"""The training step itself as a criterion: the loss of one sample in a batch of one."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

__all__ = ["training_step_losses"]


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
    losses = []
    for i in range(len(x)):
        out: object = step([x[i : i + 1], y[i : i + 1]], 0)
        loss = out.get("loss") if isinstance(out, Mapping) else out
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise TypeError(
                f"training_step returned a {type(out).__name__} for one sample, "
                f"expected its loss, a tensor with one number."
            )
        losses.append(loss.reshape(()))
    return torch.stack(losses)
