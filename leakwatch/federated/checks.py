"""What is wrong with a simulation's arguments, said before a client trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from leakwatch.inputs import check_samples
from leakwatch.weight_update import LocalTraining

__all__ = [
    "check_alpha",
    "check_choice",
    "check_client",
    "check_clients",
    "check_finite",
    "check_share",
    "check_training",
    "real",
    "whole",
]


def check_choice(name: str, value: str, known: tuple[str, ...]) -> None:
    """Raise ValueError unless ``value`` is one of ``known``."""
    if value not in known:
        raise ValueError(
            f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}."
        )


def whole(name: str, value: object, least: int = 1) -> int:
    """An integer, NumPy's included, of at least ``least``.

    Raises:
        TypeError: for anything but an integer; ``True`` is none.
        ValueError: for a smaller one.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an integer, got {value!r}.")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}.")
    return int(value)


def real(name: str, value: object, example: str) -> float:
    """A number, as a float.

    Raises:
        TypeError: for anything but a real number; ``True`` is none.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, such as {example}, got {value!r}.")
    return float(value)


def check_share(share: object) -> float:
    """A share of the clients, in (0, 1].

    Raises:
        TypeError: for anything but a number.
        ValueError: for one out of range.
    """
    number = real("share", share, "share=0.1")
    if not 0 < number <= 1:
        raise ValueError(
            f"share must lie in (0, 1], such as share=0.1 for a tenth of the clients, "
            f"got {share!r}."
        )
    return number


def check_alpha(alpha: object) -> float:
    """A concentration of the Dirichlet distribution, positive and finite.

    Raises:
        TypeError: for anything but a number.
        ValueError: for one out of range.
    """
    number = real("alpha", alpha, "alpha=0.5")
    if not 0 < number < float("inf"):
        raise ValueError(
            f"alpha must be positive and finite, such as alpha=0.5, got {alpha!r}."
        )
    return number


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
    finite = torch.isfinite(x).reshape(len(x), -1).all(1)
    if not bool(finite.all()):
        raise ValueError(
            f"sample {int((~finite).nonzero()[0])} of client {client} holds NaN or "
            f"infinity, and so would every weight after it; clean the data."
        )
