"""Random streams that belong to one client in one round, whoever else takes part."""

from __future__ import annotations

from numbers import Integral

import numpy as np
import torch

__all__ = ["client_seed", "client_stream"]


def client_stream(seed: int, *place: int) -> torch.Generator:
    """A random stream of its own for one place, such as (round, client).

    Args:
        seed: of the whole simulation, at least 0.
        place: integers of at least 0 that name the place.

    Returns:
        A CPU generator. Streams of different places or seeds are unrelated, and the
        global streams are not touched.

    Raises:
        ValueError: for anything but integers of at least 0.

    Example:
        >>> first = torch.randperm(5, generator=client_stream(0, 3, 7))
        >>> again = torch.randperm(5, generator=client_stream(0, 3, 7))
        >>> torch.equal(first, again)
        True
    """
    for number in (seed, *place):
        if not isinstance(number, Integral) or number < 0:
            raise ValueError(
                f"seed, round and client name a random stream and must be integers of "
                f"at least 0, got {number!r}."
            )
    # The length goes in as well: NumPy takes trailing zeros for absent.
    words = np.random.SeedSequence((len(place), seed, *place)).generate_state(2)
    return torch.Generator().manual_seed((int(words[0]) << 31) ^ int(words[1]))


def client_seed(seed: int, *place: int) -> int:
    """What seeds the global streams where code that draws from them runs at a place.

    Args:
        seed: of the whole simulation, at least 0.
        place: integers of at least 0 that name the place.

    Returns:
        A seed below 2**63, as ``rng_and_precision.seed_streams`` takes it.

    Raises:
        ValueError: for anything but integers of at least 0.

    Example:
        >>> client_seed(0, 3, 7) == client_seed(0, 3, 7) != client_seed(0, 3, 8)
        True
    """
    return client_stream(seed, *place).initial_seed() % 2**63
