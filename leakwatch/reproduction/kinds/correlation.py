"""Do scores foresee what attacks rebuild? Rank correlations, in the shape of LAVP's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self, final

import numpy as np
import torch
from torch import nn

import leakwatch
from leakwatch.checks import check_choice, check_integer
from leakwatch.names import unknown
from leakwatch.quality.metrics import check_metrics
from leakwatch.reporting.statistics.correlation import (
    Correlation,
    resampled_spearman,
    spearman,
)
from leakwatch.reporting.statistics.correlation_table import (
    AverageCorrelation,
    CorrelationTable,
    Measurement,
    correlation_table,
)
from leakwatch.reproduction.cells import Cell, Lab, Need, Outcome, Values
from leakwatch.reproduction.data import SOURCES, Samples
from leakwatch.reproduction.kinds.base import (
    AttackSettings,
    Kind,
    check_data,
    chunks,
    joined,
    matched,
    measured,
    needs,
)
from leakwatch.reproduction.networks import Network
from leakwatch.reproduction.result import Entry, Panel, Summary

__all__ = ["Correlations", "Row", "attacked", "score_values", "usable"]

#: What is known of an image without any Jacobian.
BASELINES: Final = ("image_std", "image_tv")
#: Words of values that are numbers to be read.
USABLE: Final = ("ok", "estimated")
_SCORED: Final = "scores for noise"
# Steps of a piece that is timed.
_PIECE: Final = 20


@final
@dataclass(frozen=True)
class Row:
    """A row of the table.

    Args:
        data: name of the data set.
        attack: name of the attack.
        beside: row of the paper that stands beside it; empty: the one of its name.
    """

    data: str
    attack: str
    beside: str = ""


@final
@dataclass(frozen=True)
class Correlations(Kind):
    """Scores of test images against the quality of what attacks rebuilt of them.

    Correlations are computed for each network and seed, and averaged.

    Args:
        rows: of the table.
        attacks: by name, which is a part of the row's.
        networks: by name.
        scores: that are computed.
        columns: column → score, or one of ``image_std`` and ``image_tv``; empty: the
            scores under their own names.
        metrics: of quality.
        images: test images for each network.
        seeds: of each network.
        per_cell: images in a cell.
        noise_std: what the scores assume where attacked gradients have no noise; else
            they assume that.
        max_memory: MiB for the Jacobian of one image.
        solver: of the scores.
        bounds: whether scores count that a solver stopped early at, such as bounds of
            λ_min, as they do in the papers; a note says how many. Else they don't.
        each_network: whether each network has rows of its own.
        against: a column; rows of differences say by how much the others foresee the
            first metric better than it does, with paired bootstraps. Empty: none.
        panels: ``[row, column]`` of each part of a figure; empty: a table.

    Raises:
        ValueError: for names that nothing has.
    """

    rows: tuple[Row, ...]
    attacks: dict[str, AttackSettings]
    networks: dict[str, Network]
    scores: tuple[str, ...]
    columns: dict[str, str] = field(default_factory=dict)
    metrics: tuple[str, ...] = ("mse", "ssim", "psnr")
    images: int = 100
    seeds: int = 3
    per_cell: int = 50
    noise_std: float = 1e-3
    max_memory: float = 8192
    solver: str = "auto"
    bounds: bool = False
    each_network: bool = False
    against: str = ""
    panels: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        check_integer("images", self.images, smallest=3, example=100)
        check_integer("seeds", self.seeds)
        check_metrics(self.metrics)
        check_data(*self.data_names)
        for row in self.rows:
            check_choice("a row's attack", row.attack, self.attacks)
        known = (*self.scores, *BASELINES)
        for score in self.columns.values():
            if score not in known:
                raise ValueError(unknown("score of a column", score, known))
        if self.against:
            check_choice("against", self.against, self._columns())

    @property
    def data_names(self) -> tuple[str, ...]:
        """Those of the rows."""
        return tuple(dict.fromkeys(row.data for row in self.rows))

    def on(self, data: str) -> Self:
        """All rows on one data set, each attack once."""
        rows = {row.attack: row for row in reversed(self.rows)}
        kept = [row for row in self.rows if rows[row.attack] is row]
        names = {
            _label(row): f"{SOURCES[data].label}+{row.attack}" for row in self.rows
        }
        return replace(
            self,
            rows=tuple(
                Row(data, row.attack, row.beside or _label(row)) for row in kept
            ),
            panels=tuple(dict.fromkeys((names[r], c) for r, c in self.panels)),
        )

    def needed(self) -> Sequence[Need]:
        """Every network under every seed on every data set."""
        return needs(self.data_names, self.networks, self.seeds)

    def cells(self, lab: Lab) -> Sequence[Cell]:
        """The scores of every network, and every attack on it."""
        found = []
        for need in self.needed():
            net = lab.net(need)
            samples = lab.data[need.data].samples(self.images)
            jobs: dict[str, tuple[str, Any, tuple[Any, ...]]] = {}
            for row in self.rows:
                if row.data != need.data:
                    continue
                noise = self._assumed(row)
                settings = (self.scores, noise, self.solver, self.max_memory)
                jobs[_scored(noise)] = "scores", score_values, settings
                attack = (self.attacks[row.attack], self.metrics)
                jobs[row.attack] = row.attack, attacked, attack
            for what, (part, call, arguments) in jobs.items():
                for first, last in chunks(self.images, self.per_cell):
                    place = {
                        "data": SOURCES[need.data].label,
                        "network": f"{need.name} {need.seed}",
                        "what": what,
                        "images": f"images {first}-{last - 1}",
                    }
                    inputs = (net, samples.part(first, last), *arguments)
                    found.append(Cell(place, part, call, inputs))
        return found

    def summarise(self, outcomes: Sequence[Outcome]) -> Summary:
        """Correlations, averaged over networks and seeds as in the paper."""
        whole = _whole(outcomes)
        measurements, notes = [], []
        for row in self.rows:
            label, data = _label(row), SOURCES[row.data].label
            mine = {
                n: o for (d, n, w), o in whole.items() if (d, w) == (data, row.attack)
            }
            for network, rebuilt in mine.items():
                scores = whole[data, network, _scored(self._assumed(row))]
                measurements.append(
                    Measurement(
                        label,
                        network,
                        {
                            name: usable(scores, s, bounds=self.bounds)
                            for name, s in self._columns().items()
                        },
                        {m: rebuilt.columns[m] for m in self.metrics},
                    )
                )
            notes.append(_note(label, mine))
        notes += self._doubts(whole)
        table = correlation_table(measurements)
        panels = _panels(self.panels, measurements, self.metrics[0])
        entries = self._entries(table)
        if self.against:
            entries += _differences(measurements, self.against, self.metrics[0])
        if self.panels:
            shown = set(self.panels)
            entries = [
                e
                for e in entries
                if (e.row, e.column) in shown and e.part == self.metrics[0]
            ]
        return Summary(tuple(entries), tuple(notes), panels)

    def piece(self) -> tuple[Self, Mapping[str, float]]:
        """Three images, one try of twenty steps."""
        few = 3
        many = self.per_cell / few
        attacks = {
            name: replace(a, steps=min(_PIECE, a.steps or _PIECE), restarts=1)
            for name, a in self.attacks.items()
        }
        factors = {
            name: many * a.tries * a.length / attacks[name].length
            for name, a in self.attacks.items()
        }
        small = replace(self, attacks=attacks, images=few, per_cell=few)
        return small, {"scores": many, **factors}

    def beside(self) -> Mapping[str, str]:
        """As the rows say."""
        return {_label(row): row.beside for row in self.rows if row.beside}

    def _doubts(self, whole: Mapping[tuple[str, str, str], Outcome]) -> list[str]:
        """How many values of a score are no more than bounds, or none at all."""
        counts: dict[tuple[str, str], int] = {}
        total = 0
        for (_, _, what), outcome in whole.items():
            if not what.startswith(_SCORED):
                continue
            total += len(next(iter(outcome.columns.values())))
            for score, words in outcome.status.items():
                for word in words:
                    if word not in USABLE and score in self._columns().values():
                        counts[score, word] = counts.get((score, word), 0) + 1
        how = "used as they are" if self.bounds else "left out"
        return [
            f"{score}: {count} of {total} values are {word}, {how}."
            for (score, word), count in counts.items()
        ]

    def _assumed(self, row: Row) -> float:
        return self.attacks[row.attack].noise_std or self.noise_std

    def _columns(self) -> Mapping[str, str]:
        return self.columns or {s: s for s in (*self.scores, *BASELINES)}

    def _entries(self, table: CorrelationTable) -> list[Entry]:
        entries = []
        for setting in table.settings:
            for score in table.scores:
                for metric in table.metrics:
                    average = table.averages[setting, score, metric]
                    entries.append(_entry(setting, score, metric, average))
            if not self.each_network:
                continue
            for (row, network, score, metric), one in table.cells.items():
                if row == setting:
                    entries.append(_entry(f"{row}, {network}", score, metric, one))
        return entries


def usable(scored: Outcome, name: str, *, bounds: bool = False) -> list[float]:
    """A score of all images, NaN where it is no number to be read.

    Args:
        scored: a cell of :func:`score_values`.
        name: of the score.
        bounds: whether those of solvers that stopped early count.
    """
    values, words = scored.columns[name], scored.status.get(name, ())
    if bounds:
        if name == "lavp_fusion":
            # Without a status of its own where one of its parts is a bound.
            parts = zip(
                scored.columns["lavp_l2_max"],
                scored.columns["lavp_cos_min"],
                strict=True,
            )
            return [math.sqrt(a * b) if a * b >= 0 else math.nan for a, b in parts]
        return list(values)
    if not words:
        return list(values)
    pairs = zip(values, words, strict=True)
    return [v if word in USABLE else math.nan for v, word in pairs]


def _scored(noise_std: float) -> str:
    return f"{_SCORED} {noise_std:g}"


def _label(row: Row) -> str:
    return f"{SOURCES[row.data].label}+{row.attack}"


def score_values(
    net: nn.Module,
    samples: Samples,
    scores: tuple[str, ...],
    noise_std: float = 1e-3,
    solver: Any = "auto",
    max_memory: float = 8192,
) -> Values:
    """Scores of samples as they are, their statuses, and the baselines.

    Args:
        net: the network.
        samples: the images.
        scores: names.
        noise_std: that they assume.
        solver: of the spectrum.
        max_memory: MiB for the Jacobian of one image.
    """
    found = leakwatch.score(
        net,
        samples.x,
        samples.y,
        list(scores),
        noise_std=noise_std,
        mean=samples.mean,
        std=samples.std,
        prior_std=samples.prior_std,
        solver=solver,
        max_memory=max_memory,
    )
    columns = {name: found[name].double().tolist() for name in scores}
    status = {name: [s.word for s in found.status[name]] for name in scores}
    return Values(columns | _baselines(samples), status)


def _baselines(samples: Samples) -> dict[str, list[float]]:
    """Contrast and total variation, in pixel units."""
    std = torch.tensor(samples.std, dtype=torch.float64)[:, None, None]
    x = samples.x.double().cpu() * std
    tv = x.diff(dim=-1).abs().flatten(1).mean(1) + x.diff(dim=-2).abs().flatten(1).mean(
        1
    )
    return {"image_std": x.flatten(1).std(1).tolist(), "image_tv": tv.tolist()}


def attacked(
    net: nn.Module, samples: Samples, settings: AttackSettings, metrics: tuple[str, ...]
) -> Values:
    """Quality and matching loss of every image's reconstruction.

    Args:
        net: the network.
        samples: the images.
        settings: of the attack.
        metrics: of quality.
    """
    found = settings.run(net, samples)
    columns = measured(found.images, samples, metrics)
    columns |= {"loss": found.loss.tolist()}
    return Values(columns, {"attack": [s.word for s in found.status]})


def _whole(outcomes: Sequence[Outcome]) -> dict[tuple[str, str, str], Outcome]:
    groups: dict[tuple[str, str, str], list[Outcome]] = {}
    for o in outcomes:
        key = (o.place["data"], o.place["network"], o.place["what"])
        groups.setdefault(key, []).append(o)
    return {key: joined(group) for key, group in groups.items()}


def _note(label: str, mine: Mapping[str, Outcome]) -> str:
    said = f"{label}: {matched(list(mine.values()))} attacks matched their gradient"
    psnr = [v for o in mine.values() for v in o.columns.get("psnr", ()) if v == v]
    if not psnr:
        return f"{said}."
    over = sum(v > 20 for v in psnr)
    return f"{said}, median PSNR {np.median(psnr):.1f} dB, {over} over 20 dB."


def _entry(
    row: str, column: str, part: str, found: Correlation | AverageCorrelation
) -> Entry:
    if not found.status.usable:
        return Entry(row, column, part, None, n=found.n, status=str(found.status))
    return Entry(
        row,
        column,
        part,
        round(found.rho, 4),
        _end(found.low),
        _end(found.high),
        found.n,
        str(found.status),
    )


def _differences(
    measurements: Sequence[Measurement], against: str, metric: str
) -> list[Entry]:
    """By how much |ρ|, averaged over networks, exceeds that of one column."""
    entries = []
    for row in dict.fromkeys(m.setting for m in measurements):
        mine = [m for m in measurements if m.setting == row]
        columns = list(mine[0].scores)
        rho, drawn = {}, {}
        for column in columns:
            pairs = [(m.scores[column], m.metrics[metric]) for m in mine]
            rho[column] = float(np.mean([spearman(*p, bootstrap=0).rho for p in pairs]))
            # Drawn alike for all columns and networks: differences are paired.
            resampled = [resampled_spearman(*p, resamples=1000) for p in pairs]
            drawn[column] = np.sign(rho[column]) * np.mean(resampled, 0)
        for column in columns:
            if column == against:
                continue
            value = abs(rho[column]) - abs(rho[against])
            gap = drawn[column] - drawn[against]
            gap = gap[np.isfinite(gap)]
            place = f"{row}: |ρ| − |ρ of {against}|", column, metric
            n = sum(len(np.asarray(m.metrics[metric])) for m in mine)
            if not math.isfinite(value) or not len(gap):
                entries.append(Entry(*place, None, n=n, status="undefined"))
                continue
            low, high = np.quantile(gap, [0.025, 0.975])
            ends = _end(float(low)), _end(float(high))
            entries.append(Entry(*place, round(value, 4), *ends, n))
    return entries


def _end(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 4)


def _panels(
    asked: Sequence[tuple[str, str]], measurements: Sequence[Measurement], metric: str
) -> tuple[Panel, ...]:
    return tuple(
        Panel(
            title=f"{row}: {column}",
            x=column,
            y=metric,
            series={
                m.architecture: (
                    np.asarray(m.scores[column]).tolist(),
                    np.asarray(m.metrics[metric]).tolist(),
                )
                for m in measurements
                if m.setting == row
            },
            log="x",
        )
        for row, column in asked
    )
