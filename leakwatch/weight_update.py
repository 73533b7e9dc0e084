"""What a federated client shares after many local steps: its weights, not a gradient.

Everything about weight updates (client simulation, attacks, scores, callbacks) meets
in these two records.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

__all__ = ["LocalTraining", "WeightUpdate"]


@final
@dataclass(frozen=True)
class LocalTraining:
    """A client's local SGD, with a last batch that may be smaller.

    Args:
        epochs: E, passes over the client's samples.
        batch_size: B, samples in each step, except the last of an epoch.
        lr: step size.
        momentum: of ``torch.optim.SGD``, undamped, without Nesterov's term.
        weight_decay: of ``torch.optim.SGD``, the factor of the weights that is added
            to their gradient.

    Raises:
        TypeError: if epochs or batch size are not integers, or others not numbers.
        ValueError: for values out of range; quotes them.

    Example:
        >>> LocalTraining(epochs=10, batch_size=10, lr=0.004).steps(samples=45)
        50
    """

    epochs: int
    batch_size: int
    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size"):
            _whole(name, getattr(self, name))
        for name in ("lr", "momentum", "weight_decay"):
            value: object = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, numbers.Real):
                raise TypeError(f"{name} must be a number, got {value!r}.")
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ValueError(f"lr must be positive and finite, got {self.lr}.")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum}.")
        if not (math.isfinite(self.weight_decay) and self.weight_decay >= 0):
            raise ValueError(
                f"weight_decay must be finite and at least 0, got {self.weight_decay}."
            )

    def steps(self, samples: int) -> int:
        """T = E·⌈N/B⌉, the local steps of a client.

        Args:
            samples: N, how many the client has.

        Returns:
            The number of steps.

        Raises:
            TypeError: if ``samples`` is not an integer.
            ValueError: if it is not at least 1.
        """
        return self.epochs * -(-_whole("samples", samples) // self.batch_size)


@final
@dataclass(frozen=True, eq=False)
class WeightUpdate:
    """What the clients of one round share, and what the server knows about them.

    All clients start from the same weights and have equally many samples; those with
    other N go in an update of their own. Flat vectors hold the shared parameters in
    the order of :class:`leakwatch.derivatives.GradientMap`.

    Args:
        initial: w_0, ``(d_θ,)``, which the server sent.
        final: w_T of each client, ``(clients, d_θ)``, which they sent back.
        labels: known labels ``(clients, N)``. How many there are of each class is what
            matters, not their order. ``None``: unknown.
        sample_shape: of one sample, as the network takes it.
        samples: N of each client.
        training: the local training, if the server knows it.
        index: names the random stream of each client, so that an attack on a part of
            the clients gives what it gave on all. Default: by position.

    Raises:
        TypeError: if something is no tensor, integer or :class:`LocalTraining`.
        ValueError: for shapes that don't go together, numbers that are not finite, or
            a client whose weights didn't move.

    Example:
        >>> import torch
        >>> update = WeightUpdate(torch.zeros(3), torch.ones(2, 3), None, (1, 4, 4), 5)
        >>> update.clients, update.difference[0]
        (2, tensor([-1., -1., -1.]))
    """

    initial: Float[Tensor, " d_theta"]
    final: Float[Tensor, "clients d_theta"]
    labels: Int[Tensor, "clients N"] | None
    sample_shape: tuple[int, ...]
    samples: int
    training: LocalTraining | None = None
    index: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        _whole("samples", self.samples)
        self._check_weights()
        labels, clients = self.labels, self.clients
        if labels is not None:
            if not isinstance(labels, Tensor):
                raise TypeError(
                    f"labels must be a tensor or None, got a {type(labels).__name__}."
                )
            if labels.is_floating_point() or labels.dtype == torch.bool:
                raise TypeError(
                    f"labels must be integer class indices, got {labels.dtype}."
                )
            if tuple(labels.shape) != (clients, self.samples):
                raise ValueError(
                    f"labels must have shape (clients, N) = {clients, self.samples}, "
                    f"got {tuple(labels.shape)}."
                )
            if int(labels.amin()) < 0:
                raise ValueError("labels must be class indices of at least 0.")
        if self.training is not None and not isinstance(self.training, LocalTraining):
            raise TypeError(
                f"training must be a LocalTraining or None, got a "
                f"{type(self.training).__name__}."
            )
        if self.index is not None and len(self.index) != clients:
            raise ValueError(
                f"index must name each of the {clients} clients, got "
                f"{len(self.index)} numbers."
            )

    def _check_weights(self) -> None:
        for name, t in (("initial", self.initial), ("final", self.final)):
            if not isinstance(t, Tensor):
                raise TypeError(f"{name} must be a tensor, got a {type(t).__name__}.")
            if not t.is_floating_point():
                raise ValueError(f"{name} must be floating point, got {t.dtype}.")
        shapes = tuple(self.initial.shape), tuple(self.final.shape)
        if (
            self.initial.ndim != 1
            or self.final.ndim != 2
            or shapes[1][1:] != shapes[0]
            or self.final.numel() == 0
        ):
            raise ValueError(
                f"initial must have shape (d_θ,) and final (clients, d_θ) with at "
                f"least one client, got {shapes[0]} and {shapes[1]}; use "
                f"final[None] for a single client."
            )
        if self.initial.device != self.final.device:
            raise ValueError(
                f"initial and final must be on one device, got {self.initial.device} "
                f"and {self.final.device}."
            )
        if not bool(torch.isfinite(self.initial).all()):
            raise ValueError("the initial weights hold NaN or infinity.")
        finite = torch.isfinite(self.final).all(1)
        if not bool(finite.all()):
            raise ValueError(
                f"the final weights of client {_first(~finite)} hold NaN or infinity: "
                f"its training diverged, and nothing can be read from them."
            )
        still = (self.final == self.initial).all(1)
        if bool(still.any()):
            raise ValueError(
                f"client {_first(still)} did not move: its final weights are the "
                f"initial ones, so they carry nothing about its samples; leave it out."
            )

    @property
    def clients(self) -> int:
        """Number of clients."""
        return len(self.final)

    @property
    def difference(self) -> Float[Tensor, "clients d_theta"]:
        """w_0 − w_T of each client: a step of gradient descent undone."""
        return self.initial - self.final


def _first(rows: Tensor) -> int:
    return int(rows.nonzero()[0])


def _whole(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an integer, got {value!r}.")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}.")
    return int(value)
