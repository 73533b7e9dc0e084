"""Which samples of a data set belong to which client."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from leakwatch.checks import check_integer, check_number

__all__ = [
    "Partition",
    "dirichlet_split",
    "fixed_split",
    "group_split",
    "iid_split",
]

Float64: TypeAlias = NDArray[np.float64]
Int64: TypeAlias = NDArray[np.int64]
Partition: TypeAlias = tuple[Tensor, ...]
"""Ascending int64 indices of each client's samples; no index is in two clients."""

# Above this concentration no share differs from 1/clients in float64; far above it,
# NumPy's draws overflow.
_EVEN = 1e32


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
    samples, clients = _check_counts(samples, clients, least=1)
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
    per_client = check_integer("per_client", per_client)
    samples, clients = _check_counts(samples, clients, least=per_client)
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
    alpha gives a class to few clients, a large one splits it evenly. Shares of samples
    are rounded down, and those left over go to the clients that rounding owes most, in
    this class and those before it: so all clients get equally many, up to one, as
    alpha grows, however few samples a class has. Afterwards, while
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
        TypeError: if labels are no integer tensor, alpha is no number, or another
            number is no integer.
        ValueError: for alpha out of range, or fewer than clients · least samples.

    Example:
        >>> labels = torch.arange(100) % 10
        >>> parts = dirichlet_split(labels, 4, alpha=0.5, least=5)
        >>> sum(map(len, parts)), min(map(len, parts)) >= 5
        (100, True)
    """
    _check_labels("labels", labels)
    least = check_integer("least", least)
    _, clients = _check_counts(len(labels), clients, least)
    alpha = check_number("alpha", alpha, example=0.5)
    generator = _generator(seed)
    rng = np.random.default_rng(int(seed))
    owner = torch.empty(len(labels), dtype=torch.int64)
    owed = np.zeros(clients)
    for label in torch.unique(labels).tolist():
        members = (labels == label).nonzero().flatten()
        members = members[torch.randperm(len(members), generator=generator)]
        shares = rng.dirichlet([min(alpha, _EVEN)] * clients)
        counts = _rounded(shares * len(members), len(members), owed, rng)
        owned = np.repeat(np.arange(clients), counts)
        owner[members] = torch.from_numpy(owned).to(owner)
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
    check_integer("least", least)
    owners, counts = torch.unique(groups[groups >= 0], return_counts=True)
    large = owners[counts >= least]
    wanted = len(large) if clients is None else check_integer("clients", clients)
    if wanted > len(large) or wanted == 0:
        raise ValueError(
            f"{len(large)} of {len(owners)} groups have at least {least} samples, "
            f"expected at least {max(1, wanted)}; lower least or clients, or load more "
            f"of the data."
        )
    return tuple((groups == g).nonzero().flatten() for g in large[:wanted])


def _rounded(
    wanted: Float64, total: int, owed: Float64, rng: np.random.Generator
) -> Int64:
    """Whole numbers that add up to ``total``, each below ``wanted`` or up to 1 above.

    ``owed`` keeps what rounding took from each client so far, and is updated.
    """
    counts = np.floor(wanted).astype(np.int64)
    owed += wanted - counts
    # Nobody gets a sample of a class in which it has no share.
    due = np.where(wanted > counts, owed, -np.inf)
    # Equals in random order; differences of rounding are none.
    ties = rng.permutation(len(wanted))
    ranked = ties[np.argsort(-due[ties].round(9), kind="stable")]
    chosen = ranked[: total - int(counts.sum())]
    counts[chosen] += 1
    owed[chosen] -= 1
    return counts


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
    number = check_integer("seed", seed, smallest=0)
    if number >= 2**64:
        raise ValueError(f"seed must be below 2**64, got {number}.")
    return torch.Generator().manual_seed(number)


def _check_counts(samples: int, clients: int, least: int) -> tuple[int, int]:
    samples, clients = (
        check_integer("samples", samples),
        check_integer("clients", clients),
    )
    if samples < clients * least:
        raise ValueError(
            f"{clients} clients of at least {least} samples need {clients * least} "
            f"samples, got {samples}; take fewer clients, fewer samples for each, or "
            f"more data."
        )
    return samples, clients


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
