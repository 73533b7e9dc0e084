"""Weight updates of federated clients: SME's tables and figures."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, Self, final

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from leakwatch.attacks import PixelScale, attack_update
from leakwatch.attacks.updates.presets import get as preset
from leakwatch.checks import check_choice, check_integer
from leakwatch.federated import (
    LocalTraining,
    WeightUpdate,
    client_updates,
    principal_subspace,
    segment_similarity,
    train_client,
)
from leakwatch.quality import align, quality
from leakwatch.reproduction.cells import Cell, Lab, Need, Outcome, Values
from leakwatch.reproduction.data import Samples
from leakwatch.reproduction.intervals import mean_interval
from leakwatch.reproduction.kinds.base import OfRows
from leakwatch.reproduction.networks import Network
from leakwatch.reproduction.result import Compare, Entry, Panel, Summary

__all__ = [
    "UpdateAttackSettings",
    "UpdateAttacks",
    "UpdateCosts",
    "UpdatePaths",
    "UpdateRow",
]

_SIMILARITY, _PSNR = "1 − cos", "PSNR"
# Of the grid over α.
_POINTS: Final = 11
# CPU seconds that evaluations must take to be timed.
_TIMED: Final = 2.0


@final
@dataclass(frozen=True)
class UpdateRow:
    """A local training.

    Args:
        network: name of the network.
        data: name of the data set.
        epochs: E.
        samples: N of each client.
        batch: B.
        rounds: of federated training that the network has seen.
        lr: step size.
        beside: row of the paper that stands beside it; empty: the one of its name.
    """

    network: str
    data: str
    epochs: int
    samples: int
    batch: int = 10
    rounds: int = 0
    lr: float = 0.004
    beside: str = ""

    @property
    def training(self) -> LocalTraining:
        """What clients do."""
        return LocalTraining(self.epochs, self.batch, self.lr)

    @property
    def plain(self) -> UpdateRow:
        """What cells depend on: tables share them."""
        return replace(self, beside="")

    @property
    def steps(self) -> int:
        """T."""
        return self.training.steps(self.samples)


@final
@dataclass(frozen=True)
class UpdateAttackSettings:
    """One attack, as :func:`leakwatch.attack_update` takes it.

    Args:
        preset: its name.
        steps: evaluations; None: as published.
        settings: others of the preset.
        most: local steps beyond which it is left out, since it takes too long.
        clients: how many it attacks in each cell; None: all.
    """

    preset: str
    steps: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    most: int | None = None
    clients: int | None = None

    def __post_init__(self) -> None:
        preset(self.preset)
        if self.steps is not None:
            check_integer("steps", self.steps, example=1000)

    @property
    def count(self) -> int:
        """Evaluations."""
        return self.steps or int(getattr(preset(self.preset).attack, "steps", 1000))


@dataclass(frozen=True)
class _Updates(OfRows):
    """Clients of test images train a network, and send their weights.

    Args:
        rows: of the table, by their names.
        networks: by name.
        clients: in each cell.
        seeds: of weights and clients, a cell each.
    """

    compare: ClassVar[Compare] = "level"

    rows: dict[str, UpdateRow]
    networks: dict[str, Network]
    clients: int = 10
    seeds: int = 3

    def __post_init__(self) -> None:
        check_integer("clients", self.clients)
        check_integer("seeds", self.seeds)
        self.check_rows()

    def beside(self) -> Mapping[str, str]:
        """As the rows say."""
        return {name: row.beside for name, row in self.rows.items() if row.beside}

    def _given(
        self, lab: Lab, row: UpdateRow, seed: int, clients: int | None = None
    ) -> tuple[nn.Module, Samples]:
        """The network as a round starts, and the samples of all clients in a row."""
        need = Need(row.data, row.network, self.networks[row.network], seed)
        pictures, clients = lab.data[row.data], clients or self.clients
        each = self.clients * row.samples
        all_seeds = pictures.samples(each * self.seeds)
        order = torch.randperm(
            len(all_seeds.x), generator=torch.Generator().manual_seed(1)
        )
        chosen = order[seed * each : seed * each + clients * row.samples]
        return lab.net(need, row.rounds), replace(
            all_seeds, x=all_seeds.x[chosen], y=all_seeds.y[chosen]
        )


@final
@dataclass(frozen=True)
class UpdateAttacks(_Updates):
    """What attacks recover from weight updates, mean and interval over clients.

    1 − cos of the update that the reconstruction explains, and the mean PSNR of a
    client's images in the order of the originals. ``difference`` has a column of its
    own, paired by client.

    Args:
        attacks: by name; columns of the table.
        difference: two of them: the first minus the second.
    """

    attacks: dict[str, UpdateAttackSettings] = field(default_factory=dict)
    difference: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.difference:
            check_choice("an attack of difference", name, self.attacks)

    def cells(self, lab: Lab) -> Sequence[Cell]:
        """Every attack on every row under every seed."""
        found = []
        for name, row in self.rows.items():
            for seed in range(self.seeds):
                for attack, settings in self.attacks.items():
                    if settings.most is not None and row.steps > settings.most:
                        continue
                    net, samples = self._given(lab, row, seed, settings.clients)
                    place = {"row": name, "what": attack, "seed": f"seed {seed}"}
                    inputs = (net, samples, row.plain, settings, seed)
                    found.append(Cell(place, "attack", _attacked, inputs))
        return found

    def summarise(self, outcomes: Sequence[Outcome]) -> Summary:
        """Means over clients."""
        found = {
            (o.place["row"], o.place["what"], o.place["seed"]): o for o in outcomes
        }
        entries = []
        notes = []
        curves: dict[str, tuple[list[float], list[float]]] = {}
        for name in self.rows:
            for attack in self.attacks:
                mine = [o for (r, w, _), o in found.items() if (r, w) == (name, attack)]
                if not mine:
                    notes.append(f"{name}: {attack} was not run.")
                    continue
                for part in (_SIMILARITY, _PSNR):
                    values = [v for o in mine for v in o.columns[part]]
                    decimals = 1 if part == _PSNR else 3
                    number = mean_interval(values)
                    entries.append(
                        Entry(
                            name,
                            attack,
                            part,
                            *number,
                            n=len(values),
                            decimals=decimals,
                        )
                    )
                    if part == _PSNR and number[0] is not None:
                        xs, ys = curves.setdefault(attack, ([], []))
                        xs.append(self.rows[name].samples)
                        ys.append(number[0])
            if self.difference:
                entries += self._difference(name, found)
        panel = Panel("PSNR over N", "N", _PSNR, curves, lines=True)
        sizes = {row.samples for row in self.rows.values()}
        panels = (panel,) if len(sizes) == len(self.rows) > 2 else ()
        return Summary(tuple(entries), tuple(notes), panels)

    def piece(self) -> tuple[Self, Mapping[str, float]]:
        """One client and a hundredth of the steps."""
        attacks = {
            name: replace(a, steps=max(4, a.count // 100), clients=1)
            for name, a in self.attacks.items()
        }
        factor = max(
            a.count / attacks[name].count * (a.clients or self.clients)
            for name, a in self.attacks.items()
        )
        return replace(self, attacks=attacks, clients=1), {"attack": factor}

    def _difference(
        self, name: str, found: Mapping[tuple[str, str, str], Outcome]
    ) -> list[Entry]:
        a, b = self.difference
        pairs = [
            (x, y)
            for seed in range(self.seeds)
            if (name, a, f"seed {seed}") in found and (name, b, f"seed {seed}") in found
            for x, y in zip(
                found[name, a, f"seed {seed}"].columns[_PSNR],
                found[name, b, f"seed {seed}"].columns[_PSNR],
                strict=False,
            )
        ]
        apart = [x - y for x, y in pairs]
        number = mean_interval(apart)
        column = f"{a} − {b}"
        return [Entry(name, column, _PSNR, *number, n=len(apart), decimals=1)]


@final
@dataclass(frozen=True)
class UpdatePaths(_Updates):
    """How well one gradient can stand for many local steps.

    The least share of a step's gradient of all samples, as a norm, in the plane of the
    first two principal directions; the cosine of w_0 − w_T with the gradient at w_0,
    at w_T, and at the best point between them.
    """

    def cells(self, lab: Lab) -> Sequence[Cell]:
        """Every row under every seed."""
        found = []
        for name, row in self.rows.items():
            for seed in range(self.seeds):
                net, samples = self._given(lab, row, seed)
                place = {"row": name, "seed": f"seed {seed}"}
                found.append(
                    Cell(place, "scores", _path, (net, samples, row.plain, seed))
                )
        return found

    def summarise(self, outcomes: Sequence[Outcome]) -> Summary:
        """Means over clients, and the mean curves."""
        entries = []
        cosines: dict[str, tuple[Sequence[float], Sequence[float]]] = {}
        for name in self.rows:
            mine = [o for o in outcomes if o.place["row"] == name]
            for column in (
                "least in the plane",
                "cos at w_0",
                "cos at w_T",
                "best cos",
            ):
                values = [v for o in mine for v in o.columns[column]]
                number = mean_interval(values)
                entries.append(
                    Entry(name, column, "", *number, n=len(values), decimals=3)
                )
            alphas = np.linspace(0, 1, _POINTS)
            curve = [
                float(
                    np.nanmean([v for o in mine for v in o.columns[f"cos at {a:.1f}"]])
                )
                for a in alphas
            ]
            cosines[name] = alphas.tolist(), curve
        panel = Panel(
            "cosine along the line",
            "α, the share of w_0",
            "cosine",
            cosines,
            lines=True,
        )
        return Summary(tuple(entries), (), (panel,))

    def piece(self) -> tuple[Self, Mapping[str, float]]:
        """One client."""
        return replace(self, clients=1), {"scores": float(self.clients)}


@final
@dataclass(frozen=True)
class UpdateCosts(_Updates):
    """Hours of 100 attacks on one client each, from the CPU time of some evaluations.

    Args:
        attacks: by name; columns of the table.
        calls: evaluations that are timed, after as many that aren't; four times as
            many, and so on, where they take under two seconds.
        ratio: two attacks: the time of the first by that of the second.
    """

    attacks: dict[str, UpdateAttackSettings] = field(default_factory=dict)
    calls: int = 4
    ratio: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("calls", self.calls)
        for name in self.ratio:
            check_choice("an attack of ratio", name, self.attacks)

    def cells(self, lab: Lab) -> Sequence[Cell]:
        """Every attack on every row."""
        found = []
        for name, row in self.rows.items():
            for seed in range(self.seeds):
                net, samples = self._given(lab, row, seed, 1)
                for attack, settings in self.attacks.items():
                    place = {"row": name, "what": attack, "seed": f"seed {seed}"}
                    inputs = (net, samples, row.plain, settings, self.calls, seed)
                    found.append(Cell(place, "attack", _cost, inputs))
        return found

    def summarise(self, outcomes: Sequence[Outcome]) -> Summary:
        """Means over repeats, and the ratio."""
        entries = []
        for name in self.rows:
            hours = {
                attack: [
                    v
                    for o in outcomes
                    if (o.place["row"], o.place["what"]) == (name, attack)
                    for v in o.columns["hours"]
                ]
                for attack in self.attacks
            }
            for attack, values in hours.items():
                number = mean_interval(values)
                entries.append(Entry(name, attack, "hours", *number, n=len(values)))
            if self.ratio:
                a, b = (hours[attack] for attack in self.ratio)
                values = [x / y for x, y in zip(a, b, strict=True)]
                number = mean_interval(values)
                column = " / ".join(self.ratio)
                entries.append(
                    Entry(name, column, "hours", *number, n=len(values), decimals=1)
                )
        note = "CPU time of one thread; the paper's hours are those of a V100."
        return Summary(tuple(entries), (note,))

    def piece(self) -> tuple[Self, Mapping[str, float]]:
        """One evaluation."""
        return replace(self, calls=1), {"attack": float(self.calls)}


def _clients(
    net: nn.Module, samples: Samples, row: UpdateRow, seed: int
) -> tuple[WeightUpdate, Float[Tensor, "clients N ..."]]:
    """What clients send, and their images as pixels."""
    x = samples.x.view(-1, row.samples, *samples.x.shape[1:])
    y = samples.y.view(-1, row.samples)
    sent = [
        train_client(net, a, b, row.training, client=i, seed=seed)
        for i, (a, b) in enumerate(zip(x, y, strict=True))
    ]
    return client_updates(sent)[0], x


def _attacked(
    net: nn.Module,
    samples: Samples,
    row: UpdateRow,
    settings: UpdateAttackSettings,
    seed: int,
) -> Values:
    update, x = _clients(net, samples, row, seed)
    found = attack_update(
        net,
        update,
        settings.preset,
        steps=settings.steps,
        mean=samples.mean,
        std=samples.std,
        seed=seed,
        **settings.settings,
    )
    pixels = PixelScale(samples.mean, samples.std)
    pictures = pixels.to_pixels(found.images.flatten(0, 1)).clamp(0, 1)
    truth = pixels.to_pixels(x.flatten(0, 1)).clamp(0, 1)
    ours = align(pictures.view(x.shape), truth.view(x.shape)).flatten(0, 1)
    psnr = quality(ours, truth, metrics=("psnr",))["psnr"].view(len(x), -1).mean(1)
    columns = {
        _SIMILARITY: found.loss.tolist(),
        _PSNR: psnr.tolist(),
        "α": found.alpha.tolist(),
    }
    return Values(columns, {"attack": [s.word for s in found.status]})


def _path(net: nn.Module, samples: Samples, row: UpdateRow, seed: int) -> Values:
    x = samples.x.view(-1, row.samples, *samples.x.shape[1:])
    y = samples.y.view(-1, row.samples)
    columns: dict[str, list[float]] = {}
    for client, (a, b) in enumerate(zip(x, y, strict=True)):
        found = _one_path(net, a, b, row, seed, client)
        for name, value in found.items():
            columns.setdefault(name, []).append(value)
    return Values(columns)


def _one_path(
    net: nn.Module,
    x: Float[Tensor, "N ..."],
    y: Int[Tensor, " N"],
    row: UpdateRow,
    seed: int,
    client: int,
) -> dict[str, float]:
    # A step on all samples has their gradient anyway.
    record: Any = "steps" if row.batch >= len(x) else "full"
    update = train_client(
        net, x, y, row.training, client=client, seed=seed, record=record
    )
    assert update.recorded is not None
    segment = segment_similarity(net, update, points=_POINTS)
    along = zip(segment.alphas.tolist(), segment.similarity.tolist(), strict=True)
    return {
        "least in the plane": principal_subspace(update.recorded).worst,
        "cos at w_0": segment.at_start,
        "cos at w_T": segment.at_end,
        "best cos": segment.best,
        "best α": segment.best_alpha,
    } | {f"cos at {alpha:.1f}": value for alpha, value in along}


def _cost(
    net: nn.Module,
    samples: Samples,
    row: UpdateRow,
    settings: UpdateAttackSettings,
    calls: int,
    seed: int,
) -> Values:
    update, _ = _clients(net, samples, row, seed)

    def seconds(steps: int) -> float:
        began = time.process_time()
        attack_update(
            net,
            update,
            settings.preset,
            steps=steps,
            mean=samples.mean,
            std=samples.std,
            **settings.settings,
        )
        return time.process_time() - began

    # What is done once, before the first step and after the last, doesn't count.
    once, more = seconds(calls), calls
    while (took := seconds(calls + more) - once) < _TIMED and more < settings.count:
        more *= 4  # so few take less than what is done once varies by
    return Values({"hours": [100 * max(took, 0.0) / more * settings.count / 3600]})
