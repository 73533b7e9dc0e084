"""Which client and sample is at fault, before training and in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from leakwatch.checks import check_samples, first_not_finite
from leakwatch.derivatives.runtime import Weights
from leakwatch.derivatives.runtime.rng_and_precision import isolated_rng
from leakwatch.federated.objective import Objective
from leakwatch.weight_update import LocalTraining

__all__ = [
    "check_client",
    "check_clients",
    "check_finite",
    "check_losses",
    "check_training",
    "single_samples",
]


def check_training(training: object) -> None:
    """Raise TypeError unless ``training`` is a :class:`LocalTraining`."""
    if not isinstance(training, LocalTraining):
        raise TypeError(
            f"training must be a LocalTraining, such as LocalTraining(epochs=1, "
            f"batch_size=10, lr=0.01), got a {type(training).__name__}."
        )


def check_clients(clients: Any) -> None:
    """Raise unless there is a sequence of clients; lists and tuples are looked through.

    Other sequences may load each client when it is asked for, and are left alone.
    """
    if isinstance(clients, Mapping | Tensor) or not (
        hasattr(clients, "__len__") and hasattr(clients, "__getitem__")
    ):
        raise TypeError(
            f"clients must be a sequence of (samples, labels), got a "
            f"{type(clients).__name__}; of a dictionary, take list(clients.values())."
        )
    if isinstance(clients, list | tuple):
        for number, client in enumerate(clients):
            check_client(client, number)


def check_client(client: Any, number: int) -> tuple[Tensor, Tensor]:
    """Samples and labels of a client.

    Raises:
        TypeError: if they are no pair of tensors.
        ValueError: if there are none, or they don't go together.
    """
    if not isinstance(client, Sequence) or len(client) != 2:
        raise TypeError(
            f"client {number} must be a pair (samples, labels) of tensors, got a "
            f"{type(client).__name__}."
        )
    x, y = client
    try:
        check_samples(x, y)
    except (TypeError, ValueError) as error:
        raise type(error)(f"client {number}: {error}") from error
    return x, y


def check_finite(x: Tensor, client: int) -> None:
    """Raise ValueError for a sample that holds NaN or infinity, and name it."""
    sample = first_not_finite(x)
    if sample is not None:
        raise ValueError(
            f"sample {sample} of client {client} holds NaN or infinity, and so would "
            f"every weight after it; clean the data."
        )


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
