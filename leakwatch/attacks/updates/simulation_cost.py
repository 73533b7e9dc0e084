"""What a simulation of local steps will take, before it starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from leakwatch.attacks.matching.selection import UpdatePathName, opened
from leakwatch.attacks.updates.local_steps import segment_for
from leakwatch.derivatives import GradientMap
from leakwatch.derivatives.runtime.clock import finished
from leakwatch.weight_update import LocalTraining, WeightUpdate

__all__ = ["SimulationCost", "simulation_cost"]

# Samples of one piece of attacks, as for gradients.
_CHUNK_SAMPLES = 80


@final
@dataclass(frozen=True)
class SimulationCost:
    """An estimate.

    Attributes:
        steps: T, local steps that are simulated.
        chunk: attacks at once.
        segment: steps whose graphs are kept at once.
        bytes: weights and graphs of one piece of attacks.
        seconds: of the whole attack.
    """

    steps: int
    chunk: int
    segment: int
    bytes: float
    seconds: float

    def check(self, memory_limit: float, most_seconds: float | None) -> None:
        """Raises where it is over a limit.

        Args:
            memory_limit: bytes.
            most_seconds: ``None`` for any.

        Raises:
            ValueError: says what it would take and what to do.
        """
        if self.bytes > memory_limit:
            raise ValueError(
                f"simulating T={self.steps} local steps takes about "
                f"{self.bytes / 2**20:.3g} MiB for {self.chunk} attacks at once, even "
                f"with graphs of {self.segment} steps only, but memory_limit is "
                f"{memory_limit / 2**20:.3g} MiB; raise it, set a smaller chunk_size, "
                f"or use 'sme', whose memory does not grow with T."
            )
        if most_seconds is not None and self.seconds > most_seconds:
            raise ValueError(
                f"simulating T={self.steps} local steps would take about "
                f"{self.seconds:.3g} seconds, but most_seconds is {most_seconds:g}; "
                f"raise it, take fewer steps or clients, or use 'sme', whose time does "
                f"not grow with T."
            )


def simulation_cost(
    gradients: GradientMap,
    update: WeightUpdate,
    training: LocalTraining,
    *,
    path: UpdatePathName,
    attacks: int,
    evaluations: int,
    chunk_size: int | None,
    memory_limit: float,
) -> SimulationCost:
    """Makes one local step on noise, and multiplies.

    Args:
        gradients: the network.
        update: gives weights and shapes.
        training: of the clients.
        path: see :class:`leakwatch.attacks.updates.simulation.SimulationAttack`.
        attacks: clients times restarts.
        evaluations: of the objective.
        chunk_size: attacks at once, ``None`` for a number from B.
        memory_limit: bytes, which decide how many graphs are kept.

    Returns:
        The estimate.
    """
    rows = min(training.batch_size, update.samples)
    chunk = max(1, _CHUNK_SAMPLES // rows) if chunk_size is None else chunk_size
    chunk = min(chunk, attacks)
    device = next(gradients.module.parameters()).device
    w = update.initial.to(device, gradients.dtype).expand(chunk, -1)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(chunk, rows, *update.sample_shape, generator=generator)
    x, y = (
        drawn.to(device, gradients.dtype),
        torch.zeros(chunk, rows, dtype=torch.long, device=device),
    )
    with opened(gradients, path) as path_for:
        engine = path_for(w, x, y)
        engine.graph_at(w, x, y).pull(w, weights=True)  # warms up
        began = finished(device)
        with _Counted() as counted:
            graph = engine.graph_at(w, x, y)
        between = finished(device)
        graph.pull(w, weights=True)
        forward, back = between - began, finished(device) - between
    steps = training.steps(update.samples)
    velocity = 2 if training.momentum else 1
    weights = float(velocity * w.numel() * w.element_size())
    kept = float(counted.bytes)
    segment = segment_for(steps, weights, kept, memory_limit)
    again = forward if segment < steps else 0.0
    pieces = -(-attacks // chunk)
    return SimulationCost(
        steps=steps,
        chunk=chunk,
        segment=segment,
        bytes=segment * kept + -(-steps // segment) * weights,
        seconds=evaluations * pieces * steps * (forward + back + again),
    )


@final
class _Counted(torch.overrides.TorchFunctionMode):
    """Adds up the memory of all results of operations that a graph may hold."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, int] = {}

    @property
    def bytes(self) -> int:
        """Of different storages."""
        return sum(self._seen.values())

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else (out,):
            if isinstance(t, Tensor) and t.layout == torch.strided:
                storage = t.untyped_storage()
                self._seen[storage.data_ptr()] = storage.nbytes()
        return out
