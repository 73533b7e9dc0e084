"""Deterministic selections that keep the classes balanced."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor


def stratified_split(
    labels: Int[Tensor, " n"], fraction: float, seed: int
) -> tuple[Int[Tensor, " rest"], Int[Tensor, " part"]]:
    """Split indices so that each class gives the same share.

    Args:
        labels: One label per sample.
        fraction: Share of each class that goes to the second part, in (0, 1); its
            count is rounded.
        seed: Of the split's own generator; the global one isn't touched.

    Returns:
        The indices of the rest and of the part, each ascending.

    Raises:
        ValueError: A side would be empty.

    Example:
        >>> rest, part = stratified_split(torch.arange(20) % 2, 0.2, seed=0)
        >>> len(rest), (part % 2).tolist().count(0), (part % 2).tolist().count(1)
        (16, 2, 2)
    """
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    for label in sorted(set(labels.tolist())):
        members = (labels == label).nonzero().flatten()
        order = torch.randperm(len(members), generator=generator)
        chosen[members[order[: round(fraction * len(members))]]] = True
    part, rest = chosen.nonzero().flatten(), (~chosen).nonzero().flatten()
    if len(part) == 0 or len(rest) == 0:
        raise ValueError(
            f"Can't split {len(labels)} samples in shares of {1 - fraction:g} and "
            f"{fraction:g} per class: one side would be empty. Change val_fraction, "
            "or give validation images of their own."
        )
    return rest, part


def stratified_first(labels: Int[Tensor, " n"], count: int) -> Int[Tensor, " m"]:
    """Choose the first samples of each class, as evenly as the classes allow.

    Takes the first sample of every class, then the second of every class, and so on
    until there are `count`; a class that runs out is passed over.

    Args:
        labels: One label per sample.
        count: Samples wanted; all are returned when there are fewer.

    Returns:
        Ascending indices.

    Example:
        >>> stratified_first(torch.tensor([0, 0, 0, 1, 1, 2]), 4).tolist()
        [0, 1, 3, 5]
    """
    order = torch.argsort(labels, stable=True)
    ordered = labels[order]
    starts = torch.searchsorted(ordered, ordered)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(labels)) - starts
    classes = int(labels.max()) + 1 if len(labels) else 1
    chosen = torch.argsort(rank * classes + labels, stable=True)[:count]
    return chosen.sort().values
