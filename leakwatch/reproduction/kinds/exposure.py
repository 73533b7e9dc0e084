"""What gradients give away in the course of training: scores and attacks by epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self, final

import numpy as np

from leakwatch.checks import check_integer
from leakwatch.quality.metrics import check_metrics
from leakwatch.reproduction.cells import Cell, Lab, Need, Outcome
from leakwatch.reproduction.data import SOURCES
from leakwatch.reproduction.intervals import median_interval
from leakwatch.reproduction.kinds.base import (
    AttackSettings,
    OneDataSet,
    check_data,
    chunks,
    joined,
    matched,
    needs,
    shortened,
)
from leakwatch.reproduction.kinds.correlation import attacked, score_values, usable
from leakwatch.reproduction.networks import Network
from leakwatch.reproduction.result import Compare, Entry, Panel, Summary

__all__ = ["Exposure"]


@final
@dataclass(frozen=True)
class Exposure(OneDataSet):
    """Medians over test images and seeds, after each epoch that a network keeps.

    Args:
        data: name of the data set.
        networks: by name; each keeps the epochs to look at.
        scores: that are computed.
        noise_std: what they assume.
        attacks: by name.
        metric: quality of attacks.
        images: test images for each network.
        seeds: of each network.
        per_cell: images in a cell.

    Raises:
        ValueError: for names that nothing has.
    """

    compare: ClassVar[Compare] = "level"

    data: str
    networks: dict[str, Network]
    scores: tuple[str, ...]
    noise_std: float
    attacks: dict[str, AttackSettings] = field(default_factory=dict)
    metric: str = "psnr"
    images: int = 20
    seeds: int = 3
    per_cell: int = 20

    def __post_init__(self) -> None:
        check_integer("images", self.images)
        check_integer("seeds", self.seeds)
        check_metrics((self.metric,))
        check_data(self.data)

    def needed(self) -> Sequence[Need]:
        """Every network under every seed."""
        return needs([self.data], self.networks, self.seeds)

    def cells(self, lab: Lab) -> Sequence[Cell]:
        """Scores and attacks of each network after each epoch."""
        found = []
        samples = lab.data[self.data].samples(self.images)
        for need in self.needed():
            for epoch in _epochs(need.network):
                net = lab.net(need, epoch)
                for first, last in chunks(self.images, self.per_cell):
                    part = samples.part(first, last)
                    place = {
                        "data": SOURCES[self.data].label,
                        "network": f"{need.name}, epoch {epoch}",
                        "seed": f"seed {need.seed}",
                    }
                    images = {"images": f"images {first}-{last - 1}"}
                    where = {**place, "what": "scores", **images}
                    scores = (net, part, self.scores, self.noise_std)
                    found.append(Cell(where, "scores", score_values, scores))
                    for name, settings in self.attacks.items():
                        where = {**place, "what": name, **images}
                        job = (net, part, settings, (self.metric,))
                        found.append(Cell(where, "attack", attacked, job))
        return found

    def summarise(self, outcomes: Sequence[Outcome]) -> Summary:
        """A row for each epoch, a column for each quantity, and curves."""
        groups: dict[tuple[str, str, str], list[Outcome]] = {}
        for o in outcomes:
            key = (o.place["network"], o.place["what"], o.place["seed"])
            groups.setdefault(key, []).append(o)
        whole = {key: joined(group) for key, group in groups.items()}
        entries, notes = [], []
        curves: dict[str, dict[str, tuple[list[float], list[float]]]] = {}
        for name, network in self.networks.items():
            for epoch in _epochs(network):
                row = f"{name}, epoch {epoch}"
                columns = {}
                for what in ("scores", *self.attacks):
                    mine = [
                        o for (r, w, _), o in whole.items() if (r, w) == (row, what)
                    ]
                    if what == "scores":
                        for score in self.scores:
                            columns[score] = [usable(o, score) for o in mine]
                    else:
                        column = f"{what}: {self.metric}"
                        columns[column] = [list(o.columns[self.metric]) for o in mine]
                        notes.append(f"{row}, {what}: {matched(mine)} matched.")
                for column, values in columns.items():
                    middle, low, high = median_interval(values)
                    n = int(np.isfinite(values).sum())
                    place = row, column, "median"
                    entries.append(Entry(*place, middle, low, high, n, decimals=None))
                    xs, ys = curves.setdefault(column, {}).setdefault(name, ([], []))
                    if middle is not None:
                        xs.append(epoch)
                        ys.append(middle)
        panels = tuple(
            Panel(column, "epoch", column, series, lines=True)
            for column, series in curves.items()
        )
        return Summary(tuple(entries), tuple(notes), panels)

    def piece(self) -> tuple[Self, Mapping[str, float]]:
        """One image and three steps."""
        attacks, factor = shortened(self.attacks, 3)
        small = replace(self, attacks=attacks, images=1, per_cell=1)
        return small, {"scores": self.per_cell, "attack": self.per_cell * factor}


def _epochs(network: Network) -> list[int]:
    return sorted({*network.keep, network.epochs})
