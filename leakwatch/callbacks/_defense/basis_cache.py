"""Directions of samples that come back, kept from step to step instead of formed."""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from typing import Any, final

import torch
from torch import Tensor

from leakwatch.callbacks._defense.step import BasisCost
from leakwatch.checks import check_integer, check_number
from leakwatch.defenses import Basis, Defense
from leakwatch.defenses.eigen.basis import Directions
from leakwatch.derivatives.jacobian import GradientJacobian
from leakwatch.derivatives.runtime.clock import finished

__all__ = ["BasisMemory", "memory_for"]

_MIB = 2**20


@final
class BasisMemory:
    """Forms the basis of each sample, and remembers it for some steps.

    A sample is found again by what it is, a hash of the bytes of its input and label,
    wherever in a shuffled epoch it comes. The products are always those of the present
    network; only u_i, σ_i and which of them are resolved are of an earlier step, see
    ``aged`` of :class:`leakwatch.defenses.Basis`.

    Args:
        refresh_every: a basis of step s is used in steps s to s + refresh_every − 1.
            1: every basis is formed, and none is kept.
        max_memory: MiB of what is kept. The least recently used goes first.

    Attributes:
        cost: of the present step.

    Raises:
        TypeError: for arguments of the wrong kind.
        ValueError: for values out of range.
    """

    def __init__(self, refresh_every: int = 1, max_memory: float = 1024.0) -> None:
        self._every = check_integer(
            "refresh_every", refresh_every, example=20, smallest=1
        )
        self._mib = check_number("basis_memory", max_memory, example=1024)
        self.cost = BasisCost()
        self._step = 0
        self._epoch_began = 0
        self._epochs = 0
        self._reused = 0
        self._evicted = 0
        self._size = 0
        # By last use; and by when they were formed, as they expire.
        self._kept: OrderedDict[str, tuple[int, Directions]] = OrderedDict()
        self._formed: deque[tuple[int, str]] = deque()

    def __len__(self) -> int:
        """How many bases are kept."""
        return len(self._kept)

    @property
    def size(self) -> int:
        """Bytes that they take."""
        return self._size

    def advance(self) -> None:
        """The next step begins; what is too old for it is forgotten."""
        self._step += 1
        self.cost = BasisCost()
        while self._formed and self._step - self._formed[0][0] >= self._every:
            step, key = self._formed.popleft()
            if key in self._kept and self._kept[key][0] == step:
                self._forget(key)

    def basis(self, jacobian: GradientJacobian) -> Basis:
        """The basis of each sample: remembered ones, and new ones of all others.

        Args:
            jacobian: of the samples, at the weights of now.

        Raises:
            ValueError: if the memory is too small for a single one.
        """
        if self._every == 1:
            return self._timed(jacobian, {})
        self._check_room(jacobian.shape[2])
        keys = _keys(jacobian.x, jacobian.y)
        earlier = {}
        for i, key in enumerate(keys):
            if key in self._kept:
                self._kept.move_to_end(key)
                earlier[i] = self._kept[key][1]
        made = self._timed(jacobian, earlier)
        self._reused += len(earlier)
        for i, key in enumerate(keys):
            if i not in earlier:
                self._keep(key, self._step, made.of_sample(i))
        return made

    def epoch_ended(self) -> str | None:
        """Why no basis was used twice in all epochs; ``None`` if some were.

        Also ``None`` before the second epoch ends, where nothing has had its chance.
        """
        steps, self._epoch_began = self._step - self._epoch_began, self._step
        self._epochs += 1
        if self._every == 1 or self._reused or self._epochs < 2:
            return None
        if self._every <= steps:
            return (
                f"refresh_every={self._every} is over before an epoch of {steps} steps "
                f"is, and samples come once an epoch; raise it to several epochs"
            )
        if self._evicted:
            return (
                f"basis_memory={self._mib:g} MiB holds {len(self)} bases, fewer than "
                f"there are samples in an epoch; raise it"
            )
        return (
            "no sample came back with the same content (random augmentation?), and "
            "refresh_every only costs memory; remove it or the augmentation"
        )

    def state(self) -> dict[str, Any]:
        """For a checkpoint: counters, and all bases that may be used again."""
        return {
            "step": self._step,
            "epochs": self._epochs,
            "epoch_began": self._epoch_began,
            "reused": self._reused,
            "evicted": self._evicted,
            "kept": [
                (key, step, one.eigenvalues, one.directions, one.resolved)
                for key, (step, one) in self._kept.items()
            ],
        }

    def restore(self, state: dict[str, Any], device: torch.device) -> None:
        """Goes on from a checkpoint, under the bounds of now.

        Args:
            state: of :meth:`state`.
            device: where the samples will be.
        """
        self._step = state["step"]
        self._epochs, self._epoch_began = state["epochs"], state["epoch_began"]
        self._reused, self._evicted = state["reused"], state["evicted"]
        self._kept.clear()
        self._size = 0
        for key, step, *parts in state["kept"]:
            self._keep(key, step, Directions(*(part.to(device) for part in parts)))
        formed = sorted((step, key) for key, (step, _) in self._kept.items())
        self._formed = deque(formed)

    def _timed(
        self, jacobian: GradientJacobian, earlier: dict[int, Directions]
    ) -> Basis:
        started = finished(jacobian.device)
        made = Basis.of(jacobian, earlier=earlier)
        formed = len(made) - len(earlier)
        seconds = finished(jacobian.device) - started if formed else 0.0
        self.cost = BasisCost(formed, len(earlier), seconds)
        return made

    def _keep(self, key: str, step: int, one: Directions) -> None:
        if key in self._kept:  # twice in one batch
            self._forget(key)
        self._kept[key] = step, one
        self._formed.append((step, key))
        self._size += one.size
        while self._size > self._mib * _MIB:
            self._forget(next(iter(self._kept)))
            self._evicted += 1

    def _forget(self, key: str) -> None:
        self._size -= self._kept.pop(key)[1].size

    def _check_room(self, d_x: int) -> None:
        needed = Directions.size_of(d_x) / _MIB
        if needed > self._mib:
            raise ValueError(
                f"basis_memory={self._mib:g} MiB holds no basis: one of {d_x} inputs "
                f"takes {needed:.3g} MiB; raise it to that times the number of "
                f"training samples, or set refresh_every=1."
            )


def memory_for(
    defense: Defense, refresh_every: int, basis_memory: float
) -> BasisMemory | None:
    """What remembers the bases of a defense; ``None`` if it needs none.

    Args:
        defense: the defense.
        refresh_every: see :class:`BasisMemory`.
        basis_memory: its ``max_memory``.

    Raises:
        TypeError: for arguments of the wrong kind.
        ValueError: for values out of range, or bases to keep of a defense without.
    """
    memory = BasisMemory(refresh_every, basis_memory)
    if defense.needs_basis:
        return memory
    if refresh_every > 1:
        raise ValueError(
            f"{defense.name} forms no basis that could be kept; remove "
            f"refresh_every={refresh_every}, or use EigenNoise with an allocation "
            f"along singular directions, such as 'waterfill'."
        )
    return None


def _keys(x: Tensor, y: Tensor) -> list[str]:
    kind = f"{x.dtype} {tuple(x.shape[1:])} {y.dtype} {tuple(y.shape[1:])}".encode()
    parts = zip(_bytes(x), _bytes(y), strict=True)
    return [
        hashlib.blake2b(kind + one + label, digest_size=16).hexdigest()
        for one, label in parts
    ]


def _bytes(rows: Tensor) -> list[bytes]:
    raw = rows.detach().cpu().reshape(len(rows), -1).contiguous().view(torch.uint8)
    return [row.numpy().tobytes() for row in raw]
