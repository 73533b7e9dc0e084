"""Attacks in pieces of equally many on each client."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["for_each", "pieces"]


def pieces(clients: Tensor, order: Tensor, size: int) -> Iterator[tuple[Tensor, slice]]:
    """Attacks that are evaluated at once, and the clients that they are after.

    Each client of a piece has equally many attacks in it.

    Args:
        clients: of all attacks, ascending.
        order: where they stand.
        size: most attacks of a piece.
    """
    found, counts = torch.unique_consecutive(clients, return_counts=True)
    first, runs = 0, list(zip(found.tolist(), counts.tolist(), strict=True))
    while runs:
        client, each = runs[0]
        many = 1
        while (
            many < len(runs)
            and runs[many] == (client + many, each)
            and (many + 1) * each <= size
        ):
            many += 1
        for rows in torch.split(order[first : first + many * each], size):
            yield rows, slice(client, client + many)
        first += many * each
        del runs[:many]


def for_each(t: Tensor, attacks: int) -> Tensor:
    """Rows of clients as rows of their attacks."""
    each = attacks // len(t)
    return t if each == 1 else t.repeat_interleave(each, 0)
