"""What attacks from beside the image end at, and whether λ says so: LAVP's Table 4."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final, Self, final

import torch
from torch import nn

from leakwatch.checks import check_integer
from leakwatch.names import unknown
from leakwatch.reporting.statistics.correlation import spearman
from leakwatch.reproduction.cells import Cell, Lab, Need, Outcome, Values
from leakwatch.reproduction.data import SOURCES, Samples
from leakwatch.reproduction.kinds.base import (
    AttackSettings,
    OneDataSet,
    check_data,
    chunks,
    joined,
    matched,
    needs,
)
from leakwatch.reproduction.kinds.correlation import score_values, usable
from leakwatch.reproduction.networks import Network
from leakwatch.reproduction.result import Compare, Entry, Summary

__all__ = ["FinalLosses"]

# That scores assume: none of those of the paper depends on it.
_NOISE: Final = 1e-3


@final
@dataclass(frozen=True)
class FinalLosses(OneDataSet):
    """Final matching losses of a few images beside their scores, and ρ over many.

    Args:
        data: name of the data set.
        network: the network.
        attacks: by name; each image is attacked ``restarts`` times.
        scores: row of the table → score.
        pairs: ``[attack, row]`` whose rank correlation over all images is reported.
        shown: images that have a column of their own, the first ones.
        images: test images for each network.
        seeds: networks; the shown images are at the first.
        per_cell: images in a cell.
        solver: of the scores.
        bounds: whether scores count that a solver stopped early at, as in the papers.

    Raises:
        ValueError: for names that nothing has.
    """

    compare: ClassVar[Compare] = "level"

    data: str
    network: Network
    attacks: dict[str, AttackSettings]
    scores: dict[str, str]
    pairs: tuple[tuple[str, str], ...]
    shown: int = 3
    images: int = 100
    seeds: int = 3
    per_cell: int = 50
    solver: str = "auto"
    bounds: bool = False

    def __post_init__(self) -> None:
        check_integer("shown", self.shown)
        check_integer("images", self.images, smallest=self.shown, example=100)
        check_integer("seeds", self.seeds)
        check_data(self.data)
        for attack, row in self.pairs:
            for kind, name, known in (
                ("attack", attack, self.attacks),
                ("row", row, self.scores),
            ):
                if name not in known:
                    raise ValueError(unknown(f"{kind} of a pair", name, known))

    def needed(self) -> Sequence[Need]:
        """The network under each seed."""
        return needs([self.data], {self.network.model: self.network}, self.seeds)

    def cells(self, lab: Lab) -> Sequence[Cell]:
        """Scores and attacks at each network."""
        found = []
        samples = lab.data[self.data].samples(self.images)
        for need in self.needed():
            net = lab.net(need)
            place = {
                "data": SOURCES[self.data].label,
                "network": f"{need.name} {need.seed}",
            }
            for first, last in chunks(self.images, self.per_cell):
                part = samples.part(first, last)
                images = {"images": f"images {first}-{last - 1}"}
                names = tuple(self.scores.values())
                scores = (net, part, names, _NOISE, self.solver)
                where = {**place, "what": "scores", **images}
                found.append(Cell(where, "scores", score_values, scores))
                for name, settings in self.attacks.items():
                    where = {**place, "what": name, **images}
                    found.append(Cell(where, "attack", _losses, (net, part, settings)))
        return found

    def summarise(self, outcomes: Sequence[Outcome]) -> Summary:
        """Means and standard deviations of losses, scores, and their correlations."""
        groups: dict[tuple[str, str], list[Outcome]] = {}
        for o in outcomes:
            groups.setdefault((o.place["network"], o.place["what"]), []).append(o)
        whole = {key: joined(group) for key, group in groups.items()}
        networks = list(dict.fromkeys(network for network, _ in whole))
        entries, notes = [], []
        for name in self.attacks:
            at = whole[networks[0], name]
            for i in range(self.shown):
                for part in ("mean", "std"):
                    value = at.columns[f"loss {part}"][i]
                    place = f"final loss ({name})", f"Image {i + 1}", part
                    n = self.attacks[name].tries
                    entries.append(Entry(*place, _number(value), n=n, decimals=None))
            mine = [whole[network, name] for network in networks]
            notes.append(f"{name}: {matched(mine)} images were matched by a try.")
        for row, score in self.scores.items():
            for i in range(self.shown):
                value = usable(whole[networks[0], "scores"], score, bounds=self.bounds)[
                    i
                ]
                place = row, f"Image {i + 1}", "mean"
                entries.append(Entry(*place, _number(value), n=1, decimals=None))
        for attack, row in self.pairs:
            for network in networks:
                values = usable(
                    whole[network, "scores"], self.scores[row], bounds=self.bounds
                )
                loss = whole[network, attack].columns["loss mean"]
                found = spearman(values, loss)
                entries.append(
                    Entry(
                        f"ρ of final loss ({attack}) with {row}",
                        network,
                        "ρ",
                        _number(found.rho),
                        _number(found.low),
                        _number(found.high),
                        found.n,
                        str(found.status),
                    )
                )
        return Summary(tuple(entries), tuple(notes))

    def piece(self) -> tuple[Self, Mapping[str, float]]:
        """Ten images at most, and fifty steps at most."""
        few = max(self.shown, min(10, self.images))
        attacks = {
            name: replace(a, steps=min(50, a.length))
            for name, a in self.attacks.items()
        }
        many = self.per_cell / few
        longest = max(a.length / attacks[k].length for k, a in self.attacks.items())
        small = replace(self, attacks=attacks, images=few, per_cell=few, seeds=1)
        return small, {"scores": many, "attack": many * longest}


def _losses(net: nn.Module, samples: Samples, settings: AttackSettings) -> Values:
    found = settings.run(net, samples)
    loss = found.restart_loss  # (restarts, targets)
    spread = loss.std(0) if len(loss) > 1 else torch.full_like(loss[0], math.nan)
    return Values(
        {"loss mean": loss.mean(0).tolist(), "loss std": spread.tolist()},
        {"attack": [s.word for s in found.status]},
    )


def _number(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None
