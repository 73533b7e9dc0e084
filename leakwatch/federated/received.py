"""What a server gets back from the clients of one round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from leakwatch.federated.local import ClientUpdate
from leakwatch.weight_update import LocalTraining, WeightUpdate

__all__ = ["check_start", "client_updates", "differing"]


def client_updates(
    updates: Sequence[ClientUpdate], *, labels: bool = True, training: bool = True
) -> list[WeightUpdate]:
    """What a server sees of clients, those with equally many samples together.

    Args:
        updates: of one round, all from the same weights.
        labels: whether the server knows the labels; given sorted, since it does not
            know their order.
        training: whether the server knows the local training.

    Returns:
        One :class:`WeightUpdate` for each number of samples, in the order in which it
        comes up; ``index`` holds the numbers of the clients.

    Raises:
        ValueError: for no updates, clients that started from different weights or
            buffers, or a client that diverged or did not move.

    Example:
        >>> from torch import nn
        >>> from leakwatch.federated import train_client
        >>> net, how = nn.Linear(3, 2), LocalTraining(epochs=1, batch_size=2, lr=0.1)
        >>> x, y = torch.rand(5, 3), torch.tensor([0, 1, 1, 0, 1])
        >>> sent = [train_client(net, x[i:], y[i:], how, client=i) for i in (0, 2, 0)]
        >>> [(u.samples, u.index) for u in client_updates(sent)]
        [(5, (0, 0)), (3, (2,))]
    """
    if not updates:
        raise ValueError("client_updates needs at least one update, got none.")
    check_start(updates)
    groups: dict[tuple[int, LocalTraining], list[ClientUpdate]] = {}
    for update in updates:
        groups.setdefault((update.samples, update.training), []).append(update)
    return [
        WeightUpdate(
            initial=updates[0].initial,
            final=torch.stack([u.final for u in group]),
            labels=torch.stack([u.y.sort().values for u in group]) if labels else None,
            sample_shape=tuple(group[0].x.shape[1:]),
            samples=samples,
            training=how if training else None,
            index=tuple(u.client for u in group),
        )
        for (samples, how), group in groups.items()
    ]


def check_start(updates: Sequence[ClientUpdate]) -> None:
    """Refuse updates of clients that did not start from the same network.

    Args:
        updates: at least one.

    Raises:
        ValueError: for initial weights or buffers that are not those of the first
            client, to the last bit; names the clients and the largest difference.
    """
    first = updates[0]
    begun = _start(first)
    apart = {
        other.client: difference
        for other in updates[1:]
        if (difference := _apart(begun, _start(other)))
    }
    if apart:
        clients = ", ".join(map(str, apart))
        raise ValueError(
            f"client{'s' * (len(apart) > 1)} {clients} started from another network "
            f"than client {first.client}, client {next(iter(apart))} "
            f"{next(iter(apart.values()))}; pass the updates of one round, from one "
            f"server."
        )


def differing(first: Tensor, other: Tensor) -> Tensor:
    """Which entries are not the same; NaN is the same as NaN."""
    return (first != other) & ~((first != first) & (other != other))


def _start(update: ClientUpdate) -> dict[str, Tensor]:
    buffers = {f"buffer {n!r}": b for n, b in update.initial_buffers.items()}
    return {"the weights": update.initial, **buffers}


def _apart(first: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> str:
    """The first difference in words; nothing where there is none."""
    for name in [*first, *other]:
        if name not in first or name not in other:
            return f"in having {name}" if name in other else f"in lacking {name}"
        a, b = first[name], other[name].to(first[name].device)
        if a.shape != b.shape:
            return f"in the shape of {name}, {tuple(b.shape)} and {tuple(a.shape)}"
        entries = differing(a, b)
        if bool(entries.any()):
            wide = torch.complex128 if a.is_complex() else torch.float64
            most = float((a[entries].to(wide) - b[entries].to(wide)).abs().max())
            return (
                f"in {int(entries.sum()):,} of {a.numel():,} entries of {name}, by up "
                f"to {most:.3g}"
            )
    return ""
