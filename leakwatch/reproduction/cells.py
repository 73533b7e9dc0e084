"""The pieces that an experiment is computed in, and what each comes to."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, final

from torch import nn

from leakwatch.reproduction.data import Pictures, Samples
from leakwatch.reproduction.networks import Network, Trained
from leakwatch.studies.cells import Work

__all__ = ["Cell", "Lab", "Need", "Outcome", "Values", "decode", "encode"]


@final
@dataclass(frozen=True, eq=False)
class Values:
    """What the call of a cell returns.

    Attributes:
        columns: quantity → one value for each sample, NaN where there is none.
        status: quantity, or ``"attack"`` → one word for each sample.
    """

    columns: Mapping[str, Sequence[float]]
    status: Mapping[str, Sequence[str]] = field(default_factory=dict)


@final
@dataclass(frozen=True, eq=False)
class Outcome:
    """A finished cell.

    Attributes:
        place: what it is about, such as ``{"data": "C-10", "network": "lenet"}``.
        columns: as of :class:`Values`.
        status: the same.
        seconds: CPU time.
    """

    place: Mapping[str, str]
    columns: Mapping[str, Sequence[float]]
    status: Mapping[str, Sequence[str]]
    seconds: float

    @property
    def name(self) -> str:
        """In words."""
        return ", ".join(self.place.values())

    @property
    def matched(self) -> tuple[int, int]:
        """How many attacks matched their gradient, and of how many."""
        words = self.status.get("attack", ())
        return sum(word in ("ok", "estimated") for word in words), len(words)


@final
@dataclass(frozen=True, eq=False)
class Cell:
    """A piece that needs no other.

    Attributes:
        place: what it is about; names it.
        part: what it spends its time on, such as ``"scores"`` or ``"attack"``:
            estimates of a whole experiment extrapolate each by its own factor.
        call: computes it, here or elsewhere.
        arguments: of the call, all that it depends on.
    """

    place: Mapping[str, str]
    part: str
    call: Callable[..., Values]
    arguments: tuple[Any, ...]

    def work(self, device: str = "cpu") -> Work[Outcome]:
        """As :func:`leakwatch.studies.cells.run_cells` takes it.

        Args:
            device: where networks and images are moved to, there where it runs.
        """
        place = dict(self.place)
        return Work(
            name=", ".join(place.values()),
            call=_timed,
            arguments=(place, self.call, self.arguments, device),
            # Not the place: tables and figures of the same measurement share cells.
            key=(self.call, self.arguments),
        )


@final
@dataclass(frozen=True)
class Need:
    """A network that an experiment needs.

    Attributes:
        data: name of the data set.
        name: of the network in this experiment.
        network: what it is.
        seed: of weights and training.
    """

    data: str
    name: str
    network: Network
    seed: int

    @property
    def place(self) -> str:
        """In words."""
        return f"{self.name} on {self.data}, seed {self.seed}"


@final
@dataclass(frozen=True, eq=False)
class Lab:
    """What the cells of an experiment are made from.

    Attributes:
        data: the data sets by name.
        trained: the networks by :attr:`Need.place`.
    """

    data: Mapping[str, Pictures]
    trained: Mapping[str, Trained]

    def net(self, need: Need, epoch: int | None = None) -> nn.Module:
        """A network in evaluation mode.

        Args:
            need: which one.
            epoch: after how many epochs; None: the last that was kept.
        """
        found = self.trained[need.place]
        state = found.states[found.last if epoch is None else epoch]
        return need.network.build(self.data[need.data].module, state)


#: Digits that are kept of a value.
_DIGITS: Final = 9


def encode(outcome: Outcome) -> dict[str, Any]:
    """As JSON holds it: null for what is no number."""
    columns = {
        name: [_plain(float(v)) for v in values]
        for name, values in outcome.columns.items()
    }
    status = {name: list(words) for name, words in outcome.status.items()}
    return {
        "place": dict(outcome.place),
        "columns": columns,
        "status": status,
        "seconds": outcome.seconds,
    }


def decode(content: Mapping[str, Any]) -> Outcome:
    """The same backwards."""
    columns = {
        name: [math.nan if v is None else float(v) for v in values]
        for name, values in content["columns"].items()
    }
    return Outcome(content["place"], columns, content["status"], content["seconds"])


def _plain(value: float) -> float | None:
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None


def _timed(
    place: Mapping[str, str],
    call: Callable[..., Values],
    arguments: tuple[Any, ...],
    device: str,
) -> Outcome:
    started = time.process_time()
    movable = nn.Module | Samples
    found = call(*(a.to(device) if isinstance(a, movable) else a for a in arguments))
    seconds = time.process_time() - started
    return Outcome(place, found.columns, found.status, seconds)
