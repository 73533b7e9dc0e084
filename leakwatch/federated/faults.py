"""Which client and sample is at fault where a local step can't be taken."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from leakwatch.derivatives.runtime import Weights
from leakwatch.derivatives.runtime.rng_and_precision import isolated_rng
from leakwatch.federated.objective import Objective

__all__ = ["check_losses", "single_samples"]


def check_losses(
    objective: Objective,
    weights: Weights,
    initial: Tensor,
    losses: Sequence[Tensor],
    batches: Sequence[Tensor],
    x: Tensor,
    y: Tensor,
    client: int,
) -> None:
    """Tell a sample that no weights can fit from training that diverges.

    Args:
        objective: of the client, in the middle of its evaluation.
        weights: of the evaluation, after the first epoch.
        initial: w_0.
        losses: of the first epoch's steps.
        batches: positions of the samples of each of them.
        x: the client's samples.
        y: their labels.
        client: its number.

    Raises:
        ValueError: for a sample whose loss is not finite at w_0.
    """
    finite = torch.isfinite(torch.stack(list(losses)))
    if bool(finite.all()) or not bool(torch.isfinite(initial).all()):
        return
    batch = batches[int((~finite).nonzero()[0])]
    start = objective.at(weights, initial)
    # Training may have spoiled the buffers as well; the module's own are as sent.
    sent = {
        name: own.detach().to(start.fixed[name].dtype, copy=True)
        for name, own in objective.loss.named_buffers()
    }
    tensors = {**start.fixed, **sent, **start.shared}
    with torch.no_grad(), isolated_rng():
        each = objective.loss.batch(tensors, x[batch], y[batch])
    bad = (~torch.isfinite(each)).nonzero().flatten()
    if len(bad):
        sample = int(batch[bad[0]])
        raise ValueError(
            f"sample {sample} of client {client}, with label {y[sample].tolist()}, has "
            f"loss {float(each[bad[0]])} at the weights that the server sent, before "
            f"any step; labels must lie in [0, classes)."
        )


@contextmanager
def single_samples(client: int, size: int) -> Iterator[None]:
    """Say whose batch of one sample BatchNorm can't normalise.

    Args:
        client: its number.
        size: samples in the batch.

    Raises:
        ValueError: in the place of Torch's, which doesn't know the client.
    """
    try:
        yield
    except ValueError as error:
        if size > 1 or "more than 1 value per channel" not in str(error):
            raise
        raise ValueError(
            f"client {client} has a batch of 1 sample, which BatchNorm can't normalise "
            f"by itself; choose a batch_size that leaves more for the last batch, or "
            f"freeze_batchnorm=True where it has running statistics."
        ) from error
