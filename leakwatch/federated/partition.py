"""Which samples of a data set belong to which client."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

__all__ = [
    "Partition",
    "dirichlet_split",
    "fixed_split",
    "group_split",
    "iid_split",
]

Partition: TypeAlias = tuple[Tensor, ...]
"""Ascending int64 indices of each client's samples; no index is in two clients."""


def iid_split(samples: int, clients: int, *, seed: int = 0) -> Partition:
    """All samples at random, in parts whose sizes differ by one at most.

    Args:
        samples: how many there are.
        clients: how many parts.
        seed: of the split's own generator.

    Returns:
        The indices of each client.

    Raises:
        TypeError: if a number is no integer.
        ValueError: if there are fewer samples than clients, or none.

    Example:
        >>> [len(part) for part in iid_split(10, 3)]
        [4, 3, 3]
    """
    _check_counts(samples, clients, least=1)
    order = torch.randperm(samples, generator=_generator(seed))
    return _ascending(order.tensor_split(clients))


def fixed_split(
    samples: int, clients: int, per_client: int, *, seed: int = 0
) -> Partition:
    """Equally many samples for each client, at random; the others belong to nobody.

    Args:
        samples: how many there are.
        clients: how many parts.
        per_client: N, samples of each client.
        seed: of the split's own generator.

    Returns:
        The indices of each client.

    Raises:
        TypeError: if a number is no integer.
        ValueError: if there are fewer than clients · per_client samples.

    Example:
        >>> [len(part) for part in fixed_split(100, 3, per_client=10)]
        [10, 10, 10]
    """
    _check_counts(samples, clients, least=_whole("per_client", per_client))
    order = torch.randperm(samples, generator=_generator(seed))
    return _ascending(torch.split(order[: clients * per_client], per_client))


def dirichlet_split(
    labels: Int[Tensor, " n"],
    clients: int,
    *,
    alpha: float = 0.5,
    least: int = 1,
    seed: int = 0,
) -> Partition:
    """All samples, with another mixture of classes for each client.

    The shares of the clients in each class are drawn from a symmetric Dirichlet
    distribution (Yurochkin et al., ICML 2019): of ``clients`` shares with mean
    1/clients and variance (1 − 1/clients)/(clients · (clients·alpha + 1)). A small
    alpha gives a class to few clients, a large one splits it evenly. Afterwards, while
    a client has fewer than ``least`` samples, the largest gives one of its own, chosen
    at random, to the smallest.

    Args:
        labels: one class per sample.
        clients: how many parts.
        alpha: concentration, above 0.
        least: samples that each client gets at least.
        seed: of the split's own generators.

    Returns:
        The indices of each client.

    Raises:
        TypeError: if labels are no integer tensor, or a number is no integer.
        ValueError: for alpha out of range, or fewer than clients · least samples.

    Example:
        >>> labels = torch.arange(100) % 10
        >>> parts = dirichlet_split(labels, 4, alpha=0.5, least=5)
        >>> sum(map(len, parts)), min(map(len, parts)) >= 5
        (100, True)
    """
    _check_labels("labels", labels)
    _check_counts(len(labels), clients, least=_whole("least", least))
    if isinstance(alpha, bool) or not 0 < float(alpha) < float("inf"):
        raise ValueError(
            f"alpha must be positive and finite, such as alpha=0.5, got {alpha!r}."
        )
    generator = _generator(seed)
    shares = np.random.default_rng(seed)
    owner = torch.empty(len(labels), dtype=torch.int64)
    for label in torch.unique(labels).tolist():
        members = (labels == label).nonzero().flatten()
        members = members[torch.randperm(len(members), generator=generator)]
        edges = shares.dirichlet([float(alpha)] * clients).cumsum()[:-1]
        cuts = torch.from_numpy(np.rint(edges * len(members)).astype(np.int64))
        for client, part in enumerate(members.tensor_split(cuts)):
            owner[part] = client
    _top_up(owner, clients, least, generator)
    return tuple((owner == client).nonzero().flatten() for client in range(clients))


def group_split(
    groups: Int[Tensor, " n"], *, clients: int | None = None, least: int = 1
) -> Partition:
    """One client per group, such as a writer of FEMNIST.

    Args:
        groups: whose each sample is; negative: nobody's.
        clients: only so many groups, the first in ascending order. Default: all.
        least: groups with fewer samples are left out.

    Returns:
        The indices of each client, in ascending order of the groups.

    Raises:
        TypeError: if groups are no integer tensor, or a number is no integer.
        ValueError: if fewer groups than ``clients``, or none, have ``least`` samples.

    Example:
        >>> group_split(torch.tensor([7, 3, 7, 7, -1]), least=2)
        (tensor([0, 2, 3]),)
    """
    _check_labels("groups", groups)
    _whole("least", least)
    found, counts = torch.unique(groups[groups >= 0], return_counts=True)
    large = found[counts >= least]
    wanted = len(large) if clients is None else _whole("clients", clients)
    if wanted > len(large) or wanted == 0:
        raise ValueError(
            f"{len(large)} of {len(found)} groups have at least {least} samples, "
            f"expected at least {max(1, wanted)}; lower least or clients, or load more "
            f"of the data."
        )
    return tuple((groups == g).nonzero().flatten() for g in large[:wanted])


def _top_up(
    owner: Tensor, clients: int, least: int, generator: torch.Generator
) -> None:
    counts = owner.bincount(minlength=clients)
    while int(counts.min()) < least:
        giver, taker = int(counts.argmax()), int(counts.argmin())
        members = (owner == giver).nonzero().flatten()
        chosen = int(torch.randint(len(members), (), generator=generator))
        owner[members[chosen]] = taker
        counts[giver] -= 1
        counts[taker] += 1


def _ascending(parts: tuple[Tensor, ...]) -> Partition:
    return tuple(part.sort().values for part in parts)


def _generator(seed: object) -> torch.Generator:
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed must be an integer of at least 0, got {seed!r}.")
    return torch.Generator().manual_seed(seed)


def _check_counts(samples: int, clients: int, least: int) -> None:
    _whole("samples", samples)
    _whole("clients", clients)
    if samples < clients * least:
        raise ValueError(
            f"{clients} clients of at least {least} samples need {clients * least} "
            f"samples, got {samples}; take fewer clients, fewer samples for each, or "
            f"more data."
        )


def _check_labels(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{name} must be a tensor of integers, got {type(value).__name__}; use "
            f"torch.tensor({name})."
        )
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        raise TypeError(f"{name} must be a tensor of integers, got {value.dtype}.")
    if value.ndim != 1 or len(value) == 0:
        raise ValueError(
            f"{name} must have shape (n,) with n at least 1, got {tuple(value.shape)}."
        )


def _whole(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {value!r}.")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}.")
    return value
