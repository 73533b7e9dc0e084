"""Which clients of a federation are watched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from leakwatch.checks import check_integer

__all__ = ["check_clients", "chosen_clients"]


def check_clients(clients: Any) -> tuple[int, ...] | int:
    """Numbers of clients, or how many.

    Raises:
        TypeError: for anything else.
        ValueError: for none, one named twice, or a number below 0.
    """
    if isinstance(clients, int) and not isinstance(clients, bool):
        return check_integer("clients", clients, example=2, smallest=1)
    if isinstance(clients, str | Mapping | bool) or not isinstance(clients, Sequence):
        raise TypeError(
            f"clients must be how many to draw, or their numbers, got {clients!r}; for "
            f"instance clients=2 or clients=[0, 3]."
        )
    numbers = [check_integer("clients", c, example=0) for c in clients]
    if not numbers or len(set(numbers)) < len(numbers):
        raise ValueError(
            f"clients must name at least one client, each once, got {list(clients)}."
        )
    return tuple(numbers)


def chosen_clients(
    dataset: Any, clients: tuple[int, ...] | int, seed: int
) -> dict[int, list[int]]:
    """The clients to watch, with the positions of their samples.

    Args:
        dataset: whose ``parts`` are the positions of each client's samples.
        clients: their numbers, or how many to draw of those that have samples.
        seed: of the drawing.

    Raises:
        TypeError: for data that know no clients.
        ValueError: for clients that there are not.
    """
    parts = getattr(dataset, "parts", None)
    if parts is None:
        raise TypeError(
            f"UpdateAudit needs training data that know whose each sample is, but "
            f"{type(dataset).__name__} has no parts; wrap it: "
            f"leakwatch.datamodules.ClientsDataModule(data, 'dirichlet')."
        )
    there = [i for i, part in enumerate(parts) if len(part)]
    if isinstance(clients, int):
        if clients > len(there):
            raise ValueError(
                f"clients={clients} are to be drawn, but there are only {len(there)} "
                f"with samples."
            )
        stream = torch.Generator().manual_seed(seed)
        drawn = torch.randperm(len(there), generator=stream)[:clients]
        numbers = sorted(there[i] for i in drawn.tolist())
    else:
        numbers = list(clients)
        missing = [c for c in numbers if c not in there]
        if missing:
            raise ValueError(
                f"clients={numbers} names clients {missing} that have no samples; "
                f"there are {len(parts)}, numbered from 0."
            )
    return {c: [int(i) for i in parts[c]] for c in numbers}
