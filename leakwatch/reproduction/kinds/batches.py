"""One gradient of many images, recovered together: CI-Net's tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self, final

import torch
from torch import nn

from leakwatch.checks import check_integer
from leakwatch.quality import align
from leakwatch.quality.metrics import check_metrics
from leakwatch.reproduction.cells import Cell, Lab, Need, Outcome, Values
from leakwatch.reproduction.data import Samples
from leakwatch.reproduction.intervals import mean_interval
from leakwatch.reproduction.kinds.base import (
    AttackSettings,
    OneDataSet,
    check_data,
    measured,
    needs,
    shortened,
)
from leakwatch.reproduction.networks import Network
from leakwatch.reproduction.result import Compare, Entry, Summary

__all__ = ["Batches"]


@final
@dataclass(frozen=True)
class Batches(OneDataSet):
    """The averaged gradient of a batch is attacked; quality of its images.

    Reconstructions are set beside the originals by the assignment with the least
    squared error, none twice. Means over the images of all batches; intervals are over
    batches, which are few.

    Args:
        data: name of the data set.
        attacks: by name; rows of the table.
        networks: one.
        batch: images that are averaged over.
        metrics: of quality; columns of the table.
        seeds: batches, each of other images and on other weights.
    """

    compare: ClassVar[Compare] = "level"

    data: str
    attacks: dict[str, AttackSettings]
    networks: dict[str, Network]
    batch: int
    metrics: tuple[str, ...] = ("ssim", "fsim", "psnr", "lpips_vgg")
    seeds: int = 3

    def __post_init__(self) -> None:
        check_integer("batch", self.batch)
        check_integer("seeds", self.seeds)
        check_metrics(self.metrics)
        check_data(self.data)
        if len(self.networks) != 1:
            raise ValueError(f"give one network, got {len(self.networks)}.")

    def needed(self) -> Sequence[Need]:
        """The network under every seed."""
        return needs((self.data,), self.networks, self.seeds)

    def cells(self, lab: Lab) -> Sequence[Cell]:
        """Every attack on every batch."""
        found = []
        for need in self.needed():
            samples = lab.data[self.data].samples(self.batch * self.seeds)
            first = need.seed * self.batch
            part = samples.part(first, first + self.batch)
            for name, settings in self.attacks.items():
                place = {"row": name, "batch": f"batch {need.seed}"}
                how = replace(settings, seed=need.seed)
                inputs = (lab.net(need), part, how, self.metrics)
                found.append(Cell(place, "attack", _recovered, inputs))
        return found

    def summarise(self, outcomes: Sequence[Outcome]) -> Summary:
        """Means by attack."""
        entries = []
        notes = []
        for name in self.attacks:
            mine = [o for o in outcomes if o.place["row"] == name]
            for metric in self.metrics:
                means = [float(torch.tensor(o.columns[metric]).mean()) for o in mine]
                number = mean_interval(means)
                decimals = 1 if metric == "psnr" else 2
                entries.append(
                    Entry(
                        name,
                        metric,
                        "",
                        *number,
                        n=len(means) * self.batch,
                        decimals=decimals,
                        status="ok" if number[0] is not None else "not available here",
                    )
                )
            good = sum(o.matched[0] for o in mine)
            notes.append(f"{name}: {good} of {len(mine)} gradients were matched.")
        return Summary(tuple(entries), tuple(notes))

    def piece(self) -> tuple[Self, Mapping[str, float]]:
        """Four steps."""
        attacks, factor = shortened(self.attacks, 4)
        return replace(self, attacks=attacks), {"attack": factor}


def _recovered(
    net: nn.Module, samples: Samples, settings: AttackSettings, metrics: tuple[str, ...]
) -> Values:
    found = settings.run(net, samples, images=len(samples.x))
    # Mean and std are alike for all channels or nearly: the order is the same.
    order = align(found.images.view(1, *samples.x.shape), samples.x[None])[0]
    columns = measured(order, samples, metrics)
    return Values(columns, {"attack": [s.word for s in found.status]})
