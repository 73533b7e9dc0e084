"""What a federated client shares after many local steps: its weights, not a gradient.

Everything about weight updates (client simulation, attacks, scores, callbacks) meets
in these two records.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from leakwatch.checks import check_integer, check_number, first_not_finite

__all__ = ["LocalTraining", "Segment", "WeightUpdate", "search_segment"]


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
            check_integer(name, getattr(self, name), example=10)
        check_number("lr", self.lr, example=0.01)
        check_number("momentum", self.momentum, "[0, 1)", example=0.9)
        check_number("weight_decay", self.weight_decay, "[0, inf)", example=0.0)

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
        return self.epochs * -(-check_integer("samples", samples) // self.batch_size)


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
        sample_shape: of one sample, as the network or its ``prepare`` takes it.
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
        check_integer("samples", self.samples)
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
        diverged = first_not_finite(self.final)
        if diverged is not None:
            raise ValueError(
                f"the final weights of client {diverged} hold NaN or infinity: its "
                f"training diverged, and nothing can be read from them."
            )
        still = (self.final == self.initial).all(1)
        if bool(still.any()):
            raise ValueError(
                f"client {int(still.nonzero()[0])} did not move: its final weights are "
                f"the initial ones, so they carry nothing about its samples; leave it "
                f"out."
            )

    @property
    def clients(self) -> int:
        """Number of clients."""
        return len(self.final)

    @property
    def difference(self) -> Float[Tensor, "clients d_theta"]:
        """w_0 − w_T of each client: a step of gradient descent undone."""
        return self.initial - self.final


@final
@dataclass(frozen=True, eq=False)
class Segment:
    """cos(w_0 − w_T, ∇ℓ(αw_0 + (1−α)w_T)) over α.

    The gradient is that of all N samples. An attack that takes the update for a
    gradient at w_0 has 1 − ``at_start`` as the least loss that the true samples reach;
    one with a learned α has 1 − ``best``.

    Attributes:
        alphas: ascending, from 0 (w_T) to 1 (w_0).
        similarity: the cosine at each of them, in [−1, 1]; NaN where the gradient is
            zero.
        best_alpha: of the largest cosine; NaN where all are NaN.
        best: that cosine.
    """

    alphas: Float[Tensor, " points"]
    similarity: Float[Tensor, " points"]
    best_alpha: float
    best: float

    @property
    def at_start(self) -> float:
        """The cosine at w_0."""
        return float(self.similarity[-1])

    @property
    def at_end(self) -> float:
        """The cosine at w_T."""
        return float(self.similarity[0])


def search_segment(
    similarity: Callable[[float], float], *, points: int, tolerance: float
) -> Segment:
    """The α in [0, 1] with the largest similarity.

    From a grid, then by bounded minimisation between the neighbours of its best point:
    along the segment, similarity has one maximum in all settings of Zhu, Yao &
    Blaschko (ICML 2023, Fig. 4). Costs ``points`` evaluations and about ten more.

    Args:
        similarity: a cosine, of α; NaN where there is no direction.
        points: of the grid, both ends included, at least 2.
        tolerance: of the best α.

    Returns:
        The similarity on the grid, and the best.

    Example:
        >>> segment = search_segment(
        ...     lambda a: 1 - (a - 0.3) ** 2, points=5, tolerance=1e-4
        ... )
        >>> round(segment.best_alpha, 3), segment.at_start
        (0.3, 0.51)
    """
    from scipy.optimize import minimize_scalar

    alphas = [i / (points - 1) for i in range(points)]
    cosines = [similarity(alpha) for alpha in alphas]
    top = max(range(points), key=lambda i: -_loss(cosines[i]))
    best_alpha, best = alphas[top], cosines[top]
    if math.isnan(best):
        best_alpha = math.nan
    else:
        refined = minimize_scalar(
            lambda alpha: _loss(similarity(float(alpha))),
            bounds=(alphas[max(top - 1, 0)], alphas[min(top + 1, points - 1)]),
            method="bounded",
            options={"xatol": tolerance},
        )
        # Bounded minimisation never looks at its ends, which may be the best points.
        if -float(refined.fun) > best:
            best_alpha, best = float(refined.x), -float(refined.fun)
    return Segment(
        torch.tensor(alphas, dtype=torch.float64),
        torch.tensor(cosines, dtype=torch.float64),
        best_alpha,
        best,
    )


def _loss(cosine: float) -> float:
    # The search knows no NaN or infinity: where there is no direction is worse than any
    # cosine.
    return 2.0 if math.isnan(cosine) else -cosine
