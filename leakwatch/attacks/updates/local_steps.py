"""A client's local SGD as a differentiable function of its samples.

The derivative of w_T in the samples goes back through the steps one by one. Of each it
needs the weights before it and, for one vector c, the derivatives of ⟨c, ∇ℓ(w, x)⟩:
never a graph of all steps. Weights are kept at the start of each segment; a segment's
steps are taken again when the way back reaches it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from leakwatch.attacks.matching.engines import Graph, UpdatePath
from leakwatch.weight_update import LocalTraining

__all__ = ["Batch", "LocalSteps", "Simulated", "batches", "segment_for"]


class Batch(NamedTuple):
    """One local step's samples.

    Attributes:
        images: which of the guessed images.
        labels: which of the N labels.
    """

    images: slice
    labels: slice


def batches(training: LocalTraining, samples: int, sets: int) -> Iterator[Batch]:
    """The batches of all epochs, in order.

    Args:
        training: of the client.
        samples: N.
        sets: guesses for each sample: one for each epoch, or 1 for all epochs.

    Yields:
        One batch for each step; the last of an epoch may be smaller.

    Example:
        >>> how = LocalTraining(epochs=2, batch_size=2, lr=0.1)
        >>> [(b.images.start, b.images.stop) for b in batches(how, 3, sets=2)]
        [(0, 2), (2, 3), (3, 5), (5, 6)]
    """
    for epoch in range(training.epochs):
        first = epoch * samples if sets > 1 else 0
        for start in range(0, samples, training.batch_size):
            stop = min(start + training.batch_size, samples)
            yield Batch(slice(first + start, first + stop), slice(start, stop))


def segment_for(steps: int, weights: float, graph: float, limit: float) -> int:
    """How many steps to keep the graphs of at once.

    All where memory allows, since nothing is taken twice then; otherwise the number
    that takes least memory, √(T·W/G), which leaves 2·√(T·W·G).

    Args:
        steps: T.
        weights: W, bytes that are kept at the start of a segment.
        graph: G, bytes of the graph of one step.
        limit: bytes that may be used.

    Returns:
        The length of a segment, in [1, T].

    Example:
        >>> segment_for(100, weights=1, graph=4, limit=1000)
        100
        >>> segment_for(100, weights=1, graph=4, limit=50)
        5
    """
    if steps * graph <= limit:
        return steps
    return max(1, min(steps, round(math.sqrt(steps * weights / graph))))


class _Point(NamedTuple):
    """Weights and velocity of each attack."""

    w: Tensor
    b: Tensor | None


@final
class LocalSteps:
    """T steps of SGD for many attacks at once.

    w ← w − lr·b with b ← μ b + ∇ℓ(w, x) + λ w, as ``torch.optim.SGD`` has it.

    Args:
        path: evaluates the network.
        training: of the clients.
        samples: N.
        sets: see :func:`batches`.
        segment: steps whose graphs are kept at once; T keeps all and takes no step
            twice.

    Raises:
        ValueError: if ``segment`` is not at least 1.
    """

    def __init__(
        self,
        path: UpdatePath,
        training: LocalTraining,
        samples: int,
        sets: int = 1,
        segment: int = 1,
    ) -> None:
        if segment < 1:
            raise ValueError(f"segment must be at least 1, got {segment}.")
        self._path = path
        self._training = training
        steps = list(batches(training, samples, sets))
        starts = range(0, len(steps), segment)
        self.segments = [steps[i : i + segment] for i in starts]

    def __call__(
        self,
        w: Float[Tensor, "attacks d_theta"],
        x: Float[Tensor, "attacks images ..."],
        y: Int[Tensor, "attacks N"],
    ) -> Simulated:
        """Trains from these weights.

        Args:
            w: w_0 of each attack.
            x: its images, set after set.
            y: its labels, the same for each set.

        Returns:
            w_T and the way back from it.
        """
        b = torch.zeros_like(w) if self._training.momentum else None
        point, starts = _Point(w, b), []
        graphs: list[Graph] = []
        for segment in self.segments:
            starts.append(point)
            graphs.clear()
            last = segment is self.segments[-1]
            point = self.along(segment, point, x, y, graphs if last else None)
        return Simulated(self, point.w, x, y, starts, graphs)

    def along(
        self,
        segment: list[Batch],
        point: _Point,
        x: Tensor,
        y: Tensor,
        graphs: list[Graph] | None,
    ) -> _Point:
        """The steps of a segment; their graphs are added to a list if there is one."""
        how, (w, b) = self._training, point
        for batch in segment:
            graph = self._path.graph_at(w, x[:, batch.images], y[:, batch.labels])
            step = graph.flat
            if how.weight_decay:
                step = step.add(w, alpha=how.weight_decay)
            if b is not None:
                b = step = step.add(b, alpha=how.momentum)
            w = w.sub(step, alpha=how.lr)
            if graphs is not None:
                graphs.append(graph)
        return _Point(w, b)

    def back(
        self,
        segment: list[Batch],
        graphs: list[Graph],
        received: _Point,
        images: Tensor,
        first: bool,
    ) -> _Point:
        """What weights and velocity before a segment receive; adds to the images."""
        how, (w, b) = self._training, received
        for i in reversed(range(len(segment))):
            c = w.mul(-how.lr) if b is None else b.sub(w, alpha=how.lr)
            # Nothing comes before the very first step.
            onwards = not (first and i == 0)
            pulled = graphs.pop().pull(c, weights=onwards)
            images[:, segment[i].images] += pulled.images
            if pulled.weights is not None:
                w = w + pulled.weights
            if how.weight_decay:
                w = w.add(c, alpha=how.weight_decay)
            b = None if b is None else c * how.momentum
        return _Point(w, b)


@final
class Simulated:
    """Where the steps lead, and the way back.

    Attributes:
        final: w_T, ``(attacks, d_θ)``.
    """

    def __init__(
        self,
        steps: LocalSteps,
        final: Tensor,
        x: Tensor,
        y: Tensor,
        starts: list[_Point],
        graphs: list[Graph],
    ) -> None:
        self.final = final
        self._steps = steps
        self._x, self._y = x, y
        self._starts, self._graphs = starts, graphs

    def pull(
        self, cotangent: Float[Tensor, "attacks d_theta"]
    ) -> Float[Tensor, "attacks images ..."]:
        """The derivative of ⟨c, w_T⟩ in the images. Ends the graph.

        Args:
            cotangent: c.

        Returns:
            Shaped like the images.
        """
        images = torch.zeros_like(self._x)
        b = self._starts[-1].b
        received = _Point(cotangent, None if b is None else torch.zeros_like(b))
        for i in reversed(range(len(self._starts))):
            segment = self._steps.segments[i]
            start = self._starts.pop()
            if not self._graphs:
                self._steps.along(segment, start, self._x, self._y, self._graphs)
            received = self._steps.back(segment, self._graphs, received, images, i == 0)
        return images
