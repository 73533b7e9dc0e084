"""Eigenvalues of JᵀJ, noise along its eigenvectors, and what λ_1 costs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, Self, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from leakwatch.checks import check_integer
from leakwatch.defenses import Budget, EigenNoise, Single
from leakwatch.defenses import Samples as Protected
from leakwatch.derivatives import GradientMap
from leakwatch.derivatives.jacobian import GradientJacobian
from leakwatch.reproduction.cells import Cell, Lab, Need, Outcome, Values
from leakwatch.reproduction.data import Samples
from leakwatch.reproduction.intervals import bootstrapped, median_interval
from leakwatch.reproduction.kinds.base import (
    AttackSettings,
    OfRows,
    chunks,
    joined,
    measured,
    shortened,
)
from leakwatch.reproduction.networks import Network
from leakwatch.reproduction.result import Compare, Entry, Panel, Summary
from leakwatch.scores.api import DEFAULT_MAX_MEMORY

__all__ = ["Effort", "EigenRow", "Eigenvalues", "Eigenvectors"]

_Array = npt.NDArray[np.float64]

# Quantiles of the eigenvalues of an image that a cell keeps.
_QUANTILES: Final = (0.0, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)


@final
@dataclass(frozen=True)
class EigenRow:
    """A network on a data set.

    Args:
        data: name of the data set.
        network: name of the network.
        images: another number than that of the experiment, where one takes long.
    """

    data: str
    network: str
    images: int | None = None


@dataclass(frozen=True)
class _Rows(OfRows):
    """Test images at networks.

    Args:
        rows: of the table, by their names.
        networks: by name.
        images: test images for each seed, others for each.
        seeds: of each network.
        per_cell: images in a cell, at most.
    """

    compare: ClassVar[Compare] = "level"

    rows: dict[str, EigenRow]
    networks: dict[str, Network]
    images: int = 100
    seeds: int = 3
    per_cell: int = 10

    def __post_init__(self) -> None:
        check_integer("images", self.images, example=100)
        check_integer("seeds", self.seeds)
        check_integer("per_cell", self.per_cell)
        self.check_rows()

    def _parts(self, lab: Lab) -> list[tuple[dict[str, str], nn.Module, Samples]]:
        found = []
        for name, row in self.rows.items():
            for seed in range(self.seeds):
                need = Need(row.data, row.network, self.networks[row.network], seed)
                count = min(self.images, row.images or self.images)
                samples = lab.data[row.data].samples(count * self.seeds)
                begin = seed * count
                for first, last in chunks(count, self.per_cell):
                    place = {
                        "row": name,
                        "seed": f"seed {seed}",
                        "images": f"images {first}-{last - 1}",
                    }
                    found.append(
                        (
                            place,
                            lab.net(need),
                            samples.part(begin + first, begin + last),
                        )
                    )
        return found


@final
@dataclass(frozen=True)
class Eigenvalues(_Rows):
    """The distribution of the eigenvalues of JᵀJ, pixel units.

    Medians over images of the largest, the middle and the smallest, and of the share
    of them that is below 0.01. An eigenvalue that is not resolved counts as zero.
    """

    def cells(self, lab: Lab) -> Sequence[Cell]:
        """Every image at every network."""
        return [
            Cell(place, "scores", _spectrum, (net, part))
            for place, net, part in self._parts(lab)
        ]

    def summarise(self, outcomes: Sequence[Outcome]) -> Summary:
        """Quantiles."""
        entries, notes = [], []
        curves: dict[str, tuple[Sequence[float], Sequence[float]]] = {}
        for name in self.rows:
            whole = joined([o for o in outcomes if o.place["row"] == name])
            columns = {
                "largest": whole.columns["λ 1"],
                "median": whole.columns["λ 0.5"],
                "smallest": whole.columns["λ 0"],
                "share below 0.01": whole.columns["small"],
            }
            for column, values in columns.items():
                number = median_interval(values)
                entries.append(
                    Entry(name, column, "", *number, n=len(values), decimals=4)
                )
            lost = int(np.sum(whole.columns["unresolved"]))
            notes.append(
                f"{name}: {lost} eigenvalues were not resolved, and count as 0."
            )
            middle = [float(np.median(whole.columns[f"λ {q:g}"])) for q in _QUANTILES]
            curves[name] = _QUANTILES, middle
        panel = Panel(
            "eigenvalues of JᵀJ", "quantile", "λ", curves, log="y", lines=True
        )
        return Summary(tuple(entries), tuple(notes), (panel,))

    def piece(self) -> tuple[Self, Mapping[str, float]]:
        """One image."""
        return replace(self, images=1, per_cell=1), {"scores": float(self.per_cell)}


@final
@dataclass(frozen=True)
class Eigenvectors(_Rows):
    """The error that noise of one size along each of several eigenvectors causes.

    For each attack and size: the slope of log MSE against log λ, which first order puts
    at −1, and the median distance of the MSE from ‖δ‖²/(λ d_x), in dB.

    Args:
        attacks: by name.
        directions: positions among the eigenvectors, 0 the one of λ_1.
        sizes: ‖δ‖.
    """

    attacks: dict[str, AttackSettings] = field(default_factory=dict)
    directions: tuple[int, ...] = (0, 30, 60, 99)
    sizes: tuple[float, ...] = (5.0,)

    def cells(self, lab: Lab) -> Sequence[Cell]:
        """All attacks and sizes of an image, which share its eigenvectors."""
        return [
            Cell(
                place,
                "attack",
                _along,
                (net, part, self.directions, self.sizes, self.attacks),
            )
            for place, net, part in self._parts(lab)
        ]

    def summarise(self, outcomes: Sequence[Outcome]) -> Summary:
        """Slopes."""
        entries: list[Entry] = []
        notes, panels = [], []
        for name in self.rows:
            whole = joined([o for o in outcomes if o.place["row"] == name])
            lam = np.array([whole.columns[f"λ {k}"] for k in self.directions])
            share = np.array(whole.columns["1/d_x"])
            for attack in self.attacks:
                for size in self.sizes:
                    case = _case(attack, size)
                    errors = [whole.columns[f"{case}: {k}"] for k in self.directions]
                    mse = np.array(errors)
                    row = f"{name}, {case}"
                    entries += _slopes(row, lam, mse, size**2 * share / lam)
                    words = whole.status[case]
                    good = sum(word in ("ok", "estimated") for word in words)
                    notes.append(
                        f"{row}: {good} of {len(words)} attacks matched their gradient."
                    )
                    points = lam.ravel().tolist(), mse.ravel().tolist()
                    panels.append(Panel(row, "λ", "MSE", {"images": points}, log="xy"))
        return Summary(tuple(entries), tuple(notes), tuple(panels))

    def piece(self) -> tuple[Self, Mapping[str, float]]:
        """One image and twenty steps."""
        attacks, factor = shortened(self.attacks, 20)
        small = replace(self, attacks=attacks, images=1, per_cell=1)
        return small, {"attack": self.per_cell * factor}


@final
@dataclass(frozen=True)
class Effort(_Rows):
    """What λ_1 by power iteration costs, and what an attack does.

    Products until the estimate stays within 1 % of the best one, and steps until the
    distance between gradients has come within 1 % of its whole fall; CPU seconds of
    both, for one image.

    Args:
        attacks: by name.
        iterations: of the power iteration.
    """

    attacks: dict[str, AttackSettings] = field(default_factory=dict)
    iterations: int = 300

    def cells(self, lab: Lab) -> Sequence[Cell]:
        """Every image: the power iteration, and every attack."""
        found = []
        for place, net, part in self._parts(lab):
            found.append(
                Cell(
                    {**place, "what": "λ_1"},
                    "scores",
                    _power,
                    (net, part, self.iterations),
                )
            )
            found += [
                Cell(
                    {**place, "what": name},
                    "attack",
                    _converging,
                    (net, part, settings),
                )
                for name, settings in self.attacks.items()
            ]
        return found

    def summarise(self, outcomes: Sequence[Outcome]) -> Summary:
        """Medians over images."""
        entries = []
        for name in self.rows:
            for what in ("λ_1", *self.attacks):
                whole = joined(
                    [
                        o
                        for o in outcomes
                        if (o.place["row"], o.place["what"]) == (name, what)
                    ]
                )
                for column in ("iterations", "seconds"):
                    values = whole.columns[column]
                    number = median_interval(values)
                    decimals = 0 if column == "iterations" else 2
                    row = f"{name}, {what}" if name else what
                    entries.append(
                        Entry(
                            row, column, "", *number, n=len(values), decimals=decimals
                        )
                    )
        note = "CPU seconds of one thread; the paper's are those of a GPU."
        return Summary(tuple(entries), (note,))

    def piece(self) -> tuple[Self, Mapping[str, float]]:
        """One image and twenty steps."""
        attacks, factor = shortened(self.attacks, 20)
        fewer = max(4, self.iterations // 40)
        many = self.per_cell * self.iterations / fewer
        small = replace(self, attacks=attacks, images=1, per_cell=1, iterations=fewer)
        return small, {"scores": many, "attack": self.per_cell * factor}


def _scale(samples: Samples) -> Tensor:
    """d(input)/d(pixel) of each input element."""
    std = torch.tensor(samples.std, dtype=torch.float64)
    return std.reciprocal().repeat_interleave(samples.x[0, 0].numel())


def _protected(net: nn.Module, samples: Samples) -> Protected:
    gradients = GradientMap(net, dtype=torch.float64)
    return Protected(
        gradients,
        samples.x.double(),
        samples.y,
        input_scale=_scale(samples),
        max_memory=DEFAULT_MAX_MEMORY,
    )


def _spectrum(net: nn.Module, samples: Samples) -> Values:
    basis = _protected(net, samples).basis
    values = basis.visible
    at = torch.tensor(_QUANTILES).to(values)
    found = values.quantile(at, dim=1)
    columns = {
        f"λ {q:g}": row.tolist() for q, row in zip(_QUANTILES, found, strict=True)
    }
    columns["small"] = (values < 0.01).double().mean(1).tolist()
    columns["unresolved"] = (~basis.resolved).double().sum(1).tolist()
    return Values(columns)


def _case(attack: str, size: float) -> str:
    return f"{attack}, ‖δ‖ = {size:g}"


def _along(
    net: nn.Module,
    samples: Samples,
    directions: Sequence[int],
    sizes: Sequence[float],
    attacks: Mapping[str, AttackSettings],
) -> Values:
    protected = _protected(net, samples)
    columns: dict[str, list[float]] = {
        f"λ {k}": protected.basis.eigenvalues[:, k].tolist() for k in directions
    }
    columns["1/d_x"] = [1 / samples.x[0].numel()] * len(samples.x)
    status: dict[str, list[str]] = {}
    for size in sizes:
        for k in directions:
            noise = EigenNoise(Budget(size, "norm"), Single(k), "sign")
            made = noise.protect(
                protected.gradient,
                generator=torch.Generator().manual_seed(0),
                samples=protected,
            )
            delta = made.gradient - protected.gradient
            for name, attack in attacks.items():
                case = _case(name, size)
                found = attack.run(net, samples, perturb=lambda g, d=delta: g + d.to(g))
                errors = measured(found.images, samples, ("mse",))["mse"]
                columns[f"{case}: {k}"] = errors
                status.setdefault(case, []).extend(s.word for s in found.status)
    return Values(columns, status)


def _slopes(row: str, lam: _Array, mse: _Array, predicted: _Array) -> list[Entry]:
    """Of ``(directions, images)``."""
    n = lam.shape[1]
    x, y = np.log10(lam), np.log10(mse)
    off = 10 * np.abs(y - np.log10(predicted))

    def slope(i: Any) -> float:
        a, b = x[:, i].ravel(), y[:, i].ravel()
        good = np.isfinite(a + b)
        return float(np.polyfit(a[good], b[good], 1)[0])

    def middle(i: Any) -> float:
        return float(np.nanmedian(off[:, i]))

    return [
        Entry(row, "slope", "", *bootstrapped(slope, n), n=lam.size),
        Entry(row, "off 1/λ, dB", "", *bootstrapped(middle, n), n=lam.size),
    ]


def _power(net: nn.Module, samples: Samples, iterations: int) -> Values:
    gradients = GradientMap(net, dtype=torch.float64)
    x = samples.x.double()
    columns: dict[str, list[float]] = {"iterations": [], "seconds": []}
    for i in range(len(x)):
        began = time.process_time()
        jacobian = GradientJacobian(
            gradients, x[i : i + 1], samples.y[i : i + 1], input_scale=_scale(samples)
        )
        stream = torch.Generator().manual_seed(i)
        v = torch.randn(1, x[0].numel(), dtype=torch.float64, generator=stream).to(x)
        values, times = [], []
        for _ in range(iterations):
            v = v / v.norm()
            w = jacobian.rmatvec(jacobian.matvec(v)).double()
            values.append(float((v * w).sum()))
            times.append(time.process_time() - began)
            v = w
        first = _settled(np.array(values), 0.01 * abs(values[-1]))
        columns["iterations"].append(first + 1)
        columns["seconds"].append(times[first])
    return Values(columns)


def _converging(net: nn.Module, samples: Samples, settings: AttackSettings) -> Values:
    columns: dict[str, list[float]] = {"iterations": [], "seconds": []}
    words = []
    for i in range(len(samples.x)):
        began = time.process_time()
        found = settings.run(net, samples.part(i, i + 1))
        taken = time.process_time() - began
        words += [s.word for s in found.status]
        steps = int(found.iterations.max())
        if found.history is None:
            share = 1.0
        else:
            best = int(found.best_restart[0])
            curve = found.history[:, best, 0].double().cpu().numpy()
            fall = float(curve[0] - curve.min())
            share = (_settled(curve, 0.01 * fall) + 1) / len(curve)
        columns["iterations"].append(share * steps)
        columns["seconds"].append(share * taken)
    return Values(columns, {"attack": words})


def _settled(curve: Any, tolerance: float) -> int:
    """Position from which on a curve stays near its end."""
    away = np.nonzero(np.abs(curve - curve[-1]) > tolerance)[0]
    return int(away[-1]) + 1 if len(away) else 0
