"""What every kind of experiment has in common, and how to add one.

A kind is a frozen dataclass whose fields are the keys of an experiment's YAML file. It
says which networks and cells there are, and what becomes of what they measured;
:mod:`leakwatch.reproduction.run` does the rest. A new one is one file, and one line in
``kinds/__init__.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, Protocol, Self, cast, final

import torch
from torch import Tensor, nn

from leakwatch.attacks import Reconstruction, attack
from leakwatch.attacks.presets import get as preset
from leakwatch.attacks.start import StartKind
from leakwatch.checks import check_choice, check_integer
from leakwatch.names import unknown
from leakwatch.quality import quality
from leakwatch.reproduction.cells import Cell, Lab, Need, Outcome
from leakwatch.reproduction.data import SOURCES, Samples
from leakwatch.reproduction.networks import Network
from leakwatch.reproduction.result import Compare, Summary

__all__ = [
    "AttackSettings",
    "Kind",
    "OfRows",
    "OneDataSet",
    "check_data",
    "chunks",
    "joined",
    "kinds",
    "matched",
    "measured",
    "needs",
    "register",
    "shortened",
]

_KINDS: Final[dict[str, type[Kind]]] = {}


class Kind(ABC):
    """The settings of one kind of experiment, and what it does with them.

    Attributes:
        compare: how numbers are compared with the paper's.
    """

    compare: ClassVar[Compare] = "sign"

    @property
    @abstractmethod
    def data_names(self) -> tuple[str, ...]:
        """The data sets that it needs."""

    @abstractmethod
    def on(self, data: str) -> Self:
        """The same on another data set, for whoever has not got the paper's."""

    @abstractmethod
    def needed(self) -> Sequence[Need]:
        """The networks that it needs, each once."""

    @abstractmethod
    def cells(self, lab: Lab) -> Sequence[Cell]:
        """What is to be computed.

        Args:
            lab: data sets and trained networks.
        """

    @abstractmethod
    def summarise(self, outcomes: Sequence[Outcome]) -> Summary:
        """What the cells came to.

        Args:
            outcomes: of all cells, in their order.
        """

    @abstractmethod
    def piece(self) -> tuple[Self, Mapping[str, float]]:
        """The same with cells of a few seconds, to estimate how long it takes.

        Returns:
            Settings with fewer images and steps, and by what to multiply the seconds
            of such a cell, by :attr:`Cell.part`.
        """

    def beside(self) -> Mapping[str, str]:
        """Row of ours → row of the paper to set beside it, where they differ."""
        return {}


def shortened(
    attacks: Mapping[str, AttackSettings], steps: int
) -> tuple[dict[str, AttackSettings], float]:
    """Attacks that end early, for :meth:`Kind.piece`.

    Args:
        attacks: by name.
        steps: that are left of each, at most.

    Returns:
        The attacks, and how many times longer the one is that lost most; 1 for none.
    """
    short = {n: replace(a, steps=min(steps, a.length)) for n, a in attacks.items()}
    factors = (a.length / short[name].length for name, a in attacks.items())
    return short, max(factors, default=1.0)


class OneDataSet(Kind):
    """A kind whose settings name one data set."""

    data: str

    @property
    def data_names(self) -> tuple[str, ...]:
        """Its one."""
        return (self.data,)

    def on(self, data: str) -> Self:
        """On another one."""
        changed: Self = replace(cast(Any, self), data=data)
        return changed


class RowOfNetwork(Protocol):
    """A row of a table: a network on a data set, both by name."""

    @property
    def data(self) -> str: ...

    @property
    def network(self) -> str: ...


class OfRows(Kind):
    """A kind whose settings have a row for each network on a data set."""

    rows: Mapping[str, RowOfNetwork]
    networks: dict[str, Network]
    seeds: int

    def check_rows(self) -> None:
        """Raises a ValueError where a row names what there is not."""
        check_data(*self.data_names)
        for row in self.rows.values():
            check_choice("a row's network", row.network, self.networks)

    @property
    def data_names(self) -> tuple[str, ...]:
        """Those of the rows."""
        return tuple(dict.fromkeys(row.data for row in self.rows.values()))

    def on(self, data: str) -> Self:
        """All rows on one data set."""
        rows = {
            name: replace(cast(Any, row), data=data) for name, row in self.rows.items()
        }
        changed: Self = replace(cast(Any, self), rows=rows)
        return changed

    def needed(self) -> Sequence[Need]:
        """Every network of a row under every seed."""
        pairs = dict.fromkeys((r.data, r.network) for r in self.rows.values())
        return [
            Need(data, name, self.networks[name], seed)
            for data, name in pairs
            for seed in range(self.seeds)
        ]


@final
@dataclass(frozen=True)
class AttackSettings:
    """One attack, as :func:`leakwatch.attack` takes it.

    Args:
        preset: its name.
        steps: gradient evaluations; None: the preset's.
        restarts: tries; None: the preset's.
        start: where it begins; None: the preset's.
        radius: of a near start, network-input units.
        settings: others of the preset, such as ``lr``.
        noise_std: of Gaussian noise on the gradient.
        seed: of starts and noise.
    """

    preset: str
    steps: int | None = None
    restarts: int | None = None
    start: StartKind | None = None
    radius: float = 0.1
    settings: dict[str, Any] = field(default_factory=dict)
    noise_std: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        preset(self.preset)
        if self.steps is not None:
            check_integer("steps", self.steps, example=400)

    @property
    def tries(self) -> int:
        """Of each image."""
        return preset(self.preset).restarts if self.restarts is None else self.restarts

    @property
    def length(self) -> int:
        """Gradient evaluations of each try."""
        own = getattr(preset(self.preset).attack, "steps", 1)
        return int(own if self.steps is None else self.steps)

    def run(self, net: nn.Module, samples: Samples, **more: Any) -> Reconstruction:
        """Attack all samples, each alone.

        Args:
            net: the network.
            samples: the images.
            more: further arguments of :func:`leakwatch.attack`, such as ``perturb``.
        """
        return attack(
            net,
            samples.x,
            samples.y,
            self.preset,
            start=self.start,
            radius=self.radius,
            steps=self.steps,
            restarts=self.restarts,
            mean=samples.mean,
            std=samples.std,
            noise_std=self.noise_std,
            seed=self.seed,
            **self.settings,
            **more,
        )


def register(name: str, kind: type[Kind]) -> None:
    """Let YAML files find a kind.

    Args:
        name: what they call it.
        kind: a frozen dataclass.

    Raises:
        ValueError: the name is taken.
    """
    if name in _KINDS:
        raise ValueError(f"a kind {name!r} is registered already.")
    _KINDS[name] = kind


def kinds() -> Mapping[str, type[Kind]]:
    """All kinds by name."""
    return dict(_KINDS)


def check_data(*names: str) -> None:
    """Raise ValueError for an unknown data set."""
    for name in names:
        if name not in SOURCES:
            raise ValueError(unknown("data set", name, SOURCES))


def needs(
    data: Sequence[str], networks: Mapping[str, Network], seeds: int
) -> list[Need]:
    """Every network under every seed on every data set.

    Args:
        data: names of data sets; each counts once.
        networks: by name.
        seeds: how many of each.
    """
    return [
        Need(d, name, network, seed)
        for d in dict.fromkeys(data)
        for name, network in networks.items()
        for seed in range(seeds)
    ]


def measured(
    images: Tensor, samples: Samples, metrics: Sequence[str]
) -> dict[str, list[float]]:
    """Quality of reconstructions; a metric that can't be had here is NaN.

    Args:
        images: network-input units, shaped as the samples.
        samples: the originals.
        metrics: names of :data:`leakwatch.quality.METRICS`.
    """
    found = quality(
        images, samples.x, mean=samples.mean, std=samples.std, metrics=metrics
    )
    nothing = torch.full((len(images),), torch.nan)
    return {m: found.numbers.get(m, nothing).tolist() for m in metrics}


def chunks(n: int, size: int) -> list[tuple[int, int]]:
    """First and last sample, exclusive, of each cell.

    Args:
        n: samples.
        size: of them in a cell, at most.

    Example:
        >>> chunks(5, 2)
        [(0, 2), (2, 4), (4, 5)]
    """
    return [(i, min(i + size, n)) for i in range(0, n, size)]


def joined(outcomes: Sequence[Outcome]) -> Outcome:
    """The cells of one network and one attack, images in their order, as one.

    Args:
        outcomes: at least one, with the same columns.
    """
    first = outcomes[0]
    return Outcome(
        first.place,
        {k: [v for o in outcomes for v in o.columns[k]] for k in first.columns},
        {k: [v for o in outcomes for v in o.status[k]] for k in first.status},
        sum(o.seconds for o in outcomes),
    )


def matched(outcomes: Sequence[Outcome]) -> str:
    """``"12 of 100"`` attacks that matched their gradient."""
    good = sum(o.matched[0] for o in outcomes)
    return f"{good} of {sum(o.matched[1] for o in outcomes)}"
