"""The activation functions that an architecture may be asked for by name."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "gelu": nn.GELU,
}


def make_activation(name: str) -> nn.Module:
    """Return a fresh activation module.

    Args:
        name: One of `ACTIVATIONS`. Sigmoid, tanh and GELU are smooth, so that the
            gradient has a derivative everywhere; ReLU has kinks, where it has none.

    Raises:
        ValueError: `name` is not known; the message lists those that are.

    Example:
        >>> make_activation("sigmoid")
        Sigmoid()
    """
    if name not in ACTIVATIONS:
        raise ValueError(
            f"Unknown activation {name!r}; known: {', '.join(sorted(ACTIVATIONS))}."
        )
    return ACTIVATIONS[name]()
