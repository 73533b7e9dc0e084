"""What a server makes of the weights and buffers that its clients send back."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Literal, TypeAlias, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from leakwatch.checks import check_choice
from leakwatch.federated.local import ClientUpdate
from leakwatch.federated.received import check_start, differing

__all__ = ["Buffers", "average_updates"]

Buffers: TypeAlias = Literal["averaged", "kept"]


def average_updates(
    updates: Sequence[ClientUpdate], buffers: Buffers = "averaged"
) -> tuple[Float[Tensor, " d_theta"], dict[str, Tensor]]:
    """Σ n_k w_k / Σ n_k over clients k of n_k samples (McMahan et al. 2017).

    Summed in float64, in the order given. Entries that are equal at all clients, such
    as those of a single client or of a constant buffer, come out as they are, bit by
    bit.

    Args:
        updates: of one round.
        buffers: ``"averaged"``: with the same factors; complex ones in complex128,
            integers exactly and then rounded to the nearest, or to the even one of
            two; ``"kept"``: the server's stay.

    Returns:
        The average weights in the clients' precision, and the averaged buffers.

    Raises:
        ValueError: for no updates, clients that started from different weights or
            buffers or sent others than it had, or a client whose training diverged.

    Example:
        >>> from leakwatch.federated import LocalTraining, train_client
        >>> net, how = torch.nn.Linear(3, 2), LocalTraining(1, batch_size=4, lr=0.1)
        >>> x, y = torch.rand(4, 3), torch.tensor([0, 1, 1, 0])
        >>> sent = [train_client(net, x[:n], y[:n], how, client=n) for n in (1, 3)]
        >>> weights, buffers = average_updates(sent)
        >>> mean = (sent[0].final + 3 * sent[1].final) / 4
        >>> bool((weights - mean).abs().max() < 1e-6)
        True
    """
    check_choice("buffers", buffers, get_args(Buffers))
    if not updates:
        raise ValueError("there is nothing to average: no client answered.")
    check_start(updates)
    for update in updates:
        _check_whole(update)
        if update.diverged:
            raise ValueError(
                f"training of client {update.client} diverged in round "
                f"{update.round}: its weights hold NaN or infinity, and so would the "
                f"average; lower lr={update.training.lr:g} or momentum."
            )
    counts = [u.samples for u in updates]
    weights = _mean([u.final for u in updates], counts)
    if buffers == "kept":
        return weights, {}
    names = updates[0].buffers
    return weights, {n: _mean([u.buffers[n] for u in updates], counts) for n in names}


def _check_whole(update: ClientUpdate) -> None:
    if update.final.shape != update.initial.shape:
        raise ValueError(
            f"client {update.client} sent {update.final.numel():,} weights, but "
            f"started from {update.initial.numel():,}."
        )
    lost = update.initial_buffers.keys() - update.buffers.keys()
    if lost:
        raise ValueError(
            f"client {update.client} sent no buffer {min(lost)!r}, which it started "
            f"with."
        )


def _mean(values: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    first = values[0]
    differs = torch.zeros_like(first, dtype=torch.bool)
    for other in values[1:]:
        differs |= differing(first, other)
    mean = first.clone()
    if bool(differs.any()):
        inexact = first.is_floating_point() or first.is_complex()
        average = _wide if inexact else _exact
        mean[differs] = average([v[differs] for v in values], counts).to(first.dtype)
    return mean


def _wide(values: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    wide = torch.complex128 if values[0].is_complex() else torch.float64
    total = torch.zeros_like(values[0], dtype=wide)
    for value, count in zip(values, counts, strict=True):
        total += value.to(wide) * (count / sum(counts))
    return total


def _exact(values: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    # Above 2**53 a float64 no longer holds every integer.
    rows = zip(*(v.tolist() for v in values), strict=True)
    means = [
        round(Fraction(sum(n * v for n, v in zip(counts, row, strict=True)), total))
        for total in [sum(counts)]
        for row in rows
    ]
    return torch.tensor(means, dtype=torch.int64, device=values[0].device)
