"""What perturbed gradients give away, and what I²F says of it beforehand."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, Self, final

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor, nn

import leakwatch
from leakwatch.checks import check_choice, check_integer, check_number
from leakwatch.defenses import GradientPruning
from leakwatch.defenses import Samples as Protected
from leakwatch.derivatives import GradientMap
from leakwatch.derivatives.jacobian import GradientJacobian
from leakwatch.reproduction.cells import Cell, Lab, Need, Outcome, Values
from leakwatch.reproduction.data import Samples
from leakwatch.reproduction.intervals import (
    bootstrapped,
    median_interval,
    rank_correlations,
)
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
from leakwatch.scores.measure.plan import Solver

__all__ = [
    "Fairness",
    "Influence",
    "Levels",
    "PerturbedGradients",
    "PerturbedRow",
    "Prediction",
    "influences",
    "perturbation",
]

_Array = npt.NDArray[np.float64]

#: What is known of a sample without any noise or Jacobian.
_BASELINES: Final = ("grad_norm", "loss")

#: Metrics of every attack, so that experiments share their cells.
_MEASURED: Final = ("mse", "rmse", "psnr", "ssim", "lpips_squeeze")


@final
@dataclass(frozen=True)
class PerturbedRow:
    """A network on a data set, attacked.

    Args:
        data: name of the data set.
        network: name of the network.
        attacks: names of attacks; empty: all.
        epoch: after how many epochs of training; None: all of them.
    """

    data: str
    network: str
    attacks: tuple[str, ...] = ()
    epoch: int | None = None


@final
@dataclass(frozen=True)
class Influence:
    """A number that is set against the error of attacks.

    Args:
        score: ``"i2f"`` for I, ``"i2f_lb"`` for its lower bound, ``"i2f_nom"`` for the
            bound's numerator, ``"grad_norm"``, or ``"loss"``.
        epsilon: damping of I, in the units of the eigenvalues of JᵀJ in pixels.
    """

    score: str
    epsilon: float = 0.0

    def __post_init__(self) -> None:
        check_choice("score", self.score, ("i2f", "i2f_lb", "i2f_nom", *_BASELINES))
        check_number("epsilon", self.epsilon, "[0, inf)", example=1.0)


@dataclass(frozen=True)
class PerturbedGradients(OfRows):
    """Gradients of test images are perturbed and attacked; I²F is told the same δ.

    Args:
        rows: of the table, by their names.
        attacks: by name.
        networks: by name.
        predictions: by name.
        variances: of Gaussian noise on every entry of the gradient.
        pruned: shares of the entries that are set to zero instead.
        metrics: of quality.
        images: test images for each seed, others for each.
        seeds: of each network, of the noise, and of the attacks' starts.
        per_cell: images in a cell, at most.
        solver: of λ_1 where I itself is not asked for.

    Raises:
        ValueError: for names that nothing has, or no perturbation at all.
    """

    rows: dict[str, PerturbedRow]
    attacks: dict[str, AttackSettings]
    networks: dict[str, Network]
    predictions: dict[str, Influence] = field(default_factory=dict)
    variances: tuple[float, ...] = ()
    pruned: tuple[float, ...] = ()
    metrics: tuple[str, ...] = ("rmse",)
    images: int = 100
    seeds: int = 3
    per_cell: int = 25
    solver: Solver = "lanczos"

    def __post_init__(self) -> None:
        check_integer("images", self.images, smallest=3, example=100)
        check_integer("seeds", self.seeds)
        check_integer("per_cell", self.per_cell)
        for metric in self.metrics:
            check_choice("a metric", metric, _MEASURED)
        self.check_rows()
        for row in self.rows.values():
            for name in row.attacks:
                check_choice("a row's attack", name, self.attacks)
        if not self.variances and not self.pruned:
            raise ValueError("give variances of noise, or shares to be pruned.")

    def cells(self, lab: Lab) -> Sequence[Cell]:
        """Predictions for every network, and attacks on every perturbation."""
        found: list[Cell] = []
        for name, row in self.rows.items():
            for seed in range(self.seeds):
                need = Need(row.data, row.network, self.networks[row.network], seed)
                net = lab.net(need, row.epoch)
                samples = lab.data[row.data].samples(self.images * self.seeds)
                begin = seed * self.images
                for first, last in chunks(self.images, self.per_cell):
                    part = samples.part(begin + first, begin + last)
                    jobs = self._jobs(row, net, part, first, seed)
                    for (what, level), (kind, call, arguments) in jobs.items():
                        place = {
                            "row": name,
                            "seed": f"seed {seed}",
                            "what": what,
                            "level": level,
                            "images": f"images {first}-{last - 1}",
                        }
                        found.append(Cell(place, kind, call, arguments))
        return found

    def piece(self) -> tuple[Self, Mapping[str, float]]:
        """Three images and twenty steps."""
        few = min(3, self.images)
        many = self.per_cell / few
        attacks, factor = shortened(self.attacks, 20)
        small = replace(self, attacks=attacks, images=few, per_cell=few)
        return small, {"scores": many, "attack": many * factor}

    @property
    def levels(self) -> dict[str, tuple[float, float]]:
        """Name → variance and share that is pruned."""
        return {f"variance {v:g}": (v, 0.0) for v in self.variances} | {
            f"pruned {p:g}": (0.0, p) for p in self.pruned
        }

    def _attacks(self, row: PerturbedRow) -> tuple[str, ...]:
        return row.attacks or tuple(self.attacks)

    def _jobs(
        self, row: PerturbedRow, net: nn.Module, part: Samples, first: int, seed: int
    ) -> dict[tuple[str, str], tuple[str, Any, tuple[Any, ...]]]:
        jobs: dict[tuple[str, str], tuple[str, Any, tuple[Any, ...]]] = {}
        levels = self.levels
        if self.predictions:
            told = (net, part, first, seed, levels, self.predictions, self.solver)
            jobs["predictions", ""] = "scores", _predictions, told
        for attack in self._attacks(row):
            settings = replace(self.attacks[attack], seed=seed)
            for level, (variance, share) in levels.items():
                how = (net, part, first, seed, variance, share, settings)
                jobs[attack, level] = "attack", _attack, how
        return jobs

    def _collected(self, outcomes: Sequence[Outcome]) -> dict[tuple[str, str], _Found]:
        """Everything of each row and attack."""
        groups: dict[tuple[str, ...], list[Outcome]] = {}
        for o in outcomes:
            key = tuple(o.place[k] for k in ("row", "what", "level", "seed"))
            groups.setdefault(key, []).append(o)
        whole = {key: joined(group) for key, group in groups.items()}
        found = {}
        for name, row in self.rows.items():
            for attack in self._attacks(row):
                grid = [
                    [whole[name, attack, level, f"seed {s}"] for level in self.levels]
                    for s in range(self.seeds)
                ]
                said = [
                    whole.get((name, "predictions", "", f"seed {s}"))
                    for s in range(self.seeds)
                ]
                predicted = {
                    p: np.array(
                        [
                            [one.columns[f"{p} at {level}"] for level in self.levels]
                            for one in said
                            if one is not None
                        ]
                    )
                    for p in self.predictions
                }
                achieved = {
                    m: np.array([[o.columns[m] for o in line] for line in grid])
                    for m in _MEASURED
                }
                labels = np.array([line[0].columns["label"] for line in grid])
                good = sum(o.matched[0] for line in grid for o in line)
                tried = sum(o.matched[1] for line in grid for o in line)
                label = f"{name}, {attack}" if len(self._attacks(row)) > 1 else name
                found[name, attack] = _Found(
                    label, predicted, achieved, labels, f"{good} of {tried}"
                )
        return found


@final
@dataclass(frozen=True, eq=False)
class _Found:
    """One row under one attack.

    Attributes:
        label: of the row.
        predicted: by prediction, ``(seeds, levels, images)``.
        achieved: by metric, the same.
        labels: of the images, ``(seeds, images)``.
        matched: attacks that matched their gradient, in words.
    """

    label: str
    predicted: Mapping[str, _Array]
    achieved: Mapping[str, _Array]
    labels: _Array
    matched: str

    def note(self) -> str:
        said = f"{self.label}: {self.matched} attacks matched their gradient"
        middle = np.nanmedian(self.achieved["rmse"], axis=(0, 2))
        levels = ", ".join(f"{v:.3g}" for v in middle)
        return f"{said}; median RMSE by level {levels}."


@final
@dataclass(frozen=True)
class Prediction(PerturbedGradients):
    """Whether I²F foresees the error of attacks.

    For each metric: Spearman's ρ over all images, levels and seeds, as the paper's
    scatter plots show it, and the same within a level and seed, averaged, where the
    size of the noise explains nothing. For the RMSE also by how much it is predicted
    too large (dB), and the share of images where the prediction lies below it.
    Intervals are bootstraps over images.
    """

    def summarise(self, outcomes: Sequence[Outcome]) -> Summary:
        """Correlations and ratios of each prediction."""
        entries: list[Entry] = []
        notes, panels = [], []
        for found in self._collected(outcomes).values():
            notes.append(found.note())
            for name, predicted in found.predicted.items():
                for metric in self.metrics:
                    achieved = found.achieved[metric]
                    entries += _compared(found.label, name, metric, predicted, achieved)
                panels.append(self._panel(found, name))
        return Summary(tuple(entries), tuple(notes), tuple(panels))

    def _panel(self, found: _Found, name: str) -> Panel:
        metric = self.metrics[0]
        x, y = found.predicted[name], found.achieved[metric]
        return Panel(
            title=found.label,
            x=name,
            y=metric,
            series={
                level: (x[:, i].ravel().tolist(), y[:, i].ravel().tolist())
                for i, level in enumerate(self.levels)
            },
            log="xy",
        )


@final
@dataclass(frozen=True)
class Fairness(PerturbedGradients):
    """How unequally the same noise protects images and classes.

    The ratio of the 90th to the 10th percentile of the squared error over images; the
    share of the variance of its logarithm that lies between classes, beside what a
    random division of the same images into classes has in 97.5 % of the cases; the
    classes with the smallest and the largest median.
    """

    def summarise(self, outcomes: Sequence[Outcome]) -> Summary:
        """Spread over samples and classes."""
        entries: list[Entry] = []
        notes, panels = [], []
        for found in self._collected(outcomes).values():
            notes.append(found.note())
            error = np.log10(found.achieved["mse"])
            entries += _spread(found.label, error, found.labels)
            panels.append(
                Panel(
                    title=found.label,
                    x="class",
                    y="mse",
                    series={
                        f"seed {s}": (
                            found.labels[s].tolist(),
                            (10 ** one.mean(0)).tolist(),
                        )
                        for s, one in enumerate(error)
                    },
                    log="y",
                )
            )
        return Summary(tuple(entries), tuple(notes), tuple(panels))


@final
@dataclass(frozen=True)
class Levels(PerturbedGradients):
    """Medians of predictions and errors, row by row, with bootstraps over images."""

    compare: ClassVar[Compare] = "level"

    def summarise(self, outcomes: Sequence[Outcome]) -> Summary:
        """Medians of each row."""
        entries: list[Entry] = []
        notes = []
        curves: dict[str, tuple[list[float], list[float]]] = {}
        for (name, attack), found in self._collected(outcomes).items():
            notes.append(found.note())
            quantities = dict(found.predicted) if attack == self._first(name) else {}
            quantities |= {f"{attack}, {m}": found.achieved[m] for m in self.metrics}
            for quantity, values in quantities.items():
                entries.append(_median(name, quantity, values))
                epoch = self.rows[name].epoch
                if epoch is not None:
                    xs, ys = curves.setdefault(quantity, ([], []))
                    xs.append(epoch)
                    ys.append(float(np.nanmedian(values)))
        panels = tuple(
            Panel(title=name, x="epoch", y=name, series={"median": c}, lines=True)
            for name, c in curves.items()
        )
        return Summary(tuple(entries), tuple(notes), panels)

    def _first(self, name: str) -> str:
        return self._attacks(self.rows[name])[0]


def perturbation(
    gradient: Float[Tensor, "n d_theta"],
    first: int,
    seed: int,
    *,
    variance: float = 0.0,
    pruned: float = 0.0,
) -> Float[Tensor, "n d_theta"]:
    """δ of each gradient, the same for attacks and scores, in whatever pieces.

    Args:
        gradient: the clean ones.
        first: position of the first among all images.
        seed: of the noise.
        variance: of Gaussian noise on every entry.
        pruned: share of the entries that become zero instead.
    """
    if pruned:
        made = GradientPruning(pruned).protect(gradient, generator=torch.Generator())
        return made.gradient - gradient
    # Levels draw from streams of their own.
    level = round(1000 * math.log10(variance))
    rows = []
    for i in range(first, first + len(gradient)):
        key = np.random.SeedSequence((seed, abs(level), i)).generate_state(1)
        stream = torch.Generator().manual_seed(int(key[0]))
        row = torch.randn(gradient.shape[1], generator=stream, dtype=torch.float64)
        rows.append(math.sqrt(variance) * row)
    return torch.stack(rows).to(gradient)


def influences(
    net: nn.Module,
    samples: Samples,
    deltas: Mapping[str, Float[Tensor, "n d_theta"]],
    predictions: Mapping[str, Influence],
    solver: Solver = "lanczos",
) -> dict[str, list[float]]:
    """Root mean square error of a pixel that I²F predicts for given perturbations.

    What :func:`leakwatch.score` gives for ``delta=`` and ``epsilon=``, divided by √d_x,
    from one decomposition for all perturbations and dampings; ``i2f_nom`` alike, and
    baselines as they are.

    Args:
        net: the network.
        samples: the images.
        deltas: perturbations by name, float64.
        predictions: by name.
        solver: of λ_1 where I itself is not asked for.

    Returns:
        ``"NAME at LEVEL"`` → one value for each image, NaN where I without damping
        rests on eigenvalues that are not resolved.
    """
    asked = {p.score for p in predictions.values()}
    scale = torch.tensor(samples.std, dtype=torch.float64).reciprocal()
    side = samples.x[0, 0].numel()
    gradients = GradientMap(net, dtype=torch.float64)
    x = samples.x.double()
    scale = scale.repeat_interleave(side)
    basis, jacobian = None, None
    if "i2f" in asked:
        protected = Protected(gradients, x, samples.y, input_scale=scale)
        basis, jacobian = protected.basis, protected.jacobian
        top = basis.eigenvalues[:, 0]
    else:
        jacobian = GradientJacobian(gradients, x, samples.y, input_scale=scale)
        top = _top(net, samples, solver)
    plain = _plain(net, samples, asked)
    found: dict[str, list[float]] = {}
    for level, delta in deltas.items():
        pulled = jacobian.rmatvec(delta).double()
        size = pulled.norm(dim=1)
        for name, prediction in predictions.items():
            if prediction.score in plain:
                values = plain[prediction.score]
            elif prediction.score == "i2f":
                assert basis is not None
                along = torch.einsum("nij,ni->nj", basis.directions, pulled)
                kept = basis.eigenvalues + prediction.epsilon
                values = (along / kept).norm(dim=1) / math.sqrt(x[0].numel())
                if not prediction.epsilon:
                    values = values.masked_fill(~basis.resolved.all(1), math.nan)
            else:
                values = size if prediction.score == "i2f_nom" else size / top
                values = values / math.sqrt(x[0].numel())
            found[f"{name} at {level}"] = values.tolist()
    return found


def _top(net: nn.Module, samples: Samples, solver: Solver) -> Tensor:
    found = leakwatch.score(
        net,
        samples.x.double(),
        samples.y,
        "lavp_l2_max",
        mean=samples.mean,
        std=samples.std,
        dtype=torch.float64,
        solver=solver,
    )
    values = found["lavp_l2_max"]
    return values.masked_fill(~found.usable("lavp_l2_max"), math.nan)


def _plain(net: nn.Module, samples: Samples, asked: set[str]) -> dict[str, Tensor]:
    names = [name for name in _BASELINES if name in asked]
    if not names:
        return {}
    found = leakwatch.score(
        net,
        samples.x,
        samples.y,
        names,
        noise_std=1.0,
        mean=samples.mean,
        std=samples.std,
    )
    return {name: found[name].double() for name in names}


def _predictions(
    net: nn.Module,
    samples: Samples,
    first: int,
    seed: int,
    levels: Mapping[str, tuple[float, float]],
    predictions: Mapping[str, Influence],
    solver: Solver,
) -> Values:
    clean = GradientMap(net, dtype=torch.float64)(samples.x.double(), samples.y)
    deltas = {
        name: perturbation(clean, first, seed, variance=variance, pruned=share)
        for name, (variance, share) in levels.items()
    }
    return Values(influences(net, samples, deltas, predictions, solver))


def _attack(
    net: nn.Module,
    samples: Samples,
    first: int,
    seed: int,
    variance: float,
    share: float,
    settings: AttackSettings,
) -> Values:
    clean = GradientMap(net, dtype=torch.float64)(samples.x.double(), samples.y)
    delta = perturbation(clean, first, seed, variance=variance, pruned=share)
    found = settings.run(net, samples, perturb=lambda g: g + delta.to(g))
    columns = measured(found.images, samples, _MEASURED)
    columns["label"] = samples.y.double().tolist()
    return Values(columns, {"attack": [s.word for s in found.status]})


def _compared(
    row: str, column: str, metric: str, predicted: _Array, achieved: _Array
) -> list[Entry]:
    n, size = achieved.shape[-1], int(np.isfinite(predicted * achieved).sum())

    def pooled(i: Any) -> float:
        a, b = predicted[..., i].ravel(), achieved[..., i].ravel()
        return float(rank_correlations(a, b))

    def within(i: Any) -> float:
        found = rank_correlations(predicted[..., i], achieved[..., i])
        return _mean(found)

    asked = {f"ρ {metric}": pooled, f"ρ {metric}, within a level": within}
    if metric == "rmse":
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = 20 * np.log10(predicted / achieved)
        asked["too large by, dB"] = lambda i: _middle(ratio[..., i])
        below = np.where(np.isfinite(ratio), ratio <= 0, np.nan)
        asked["share below"] = lambda i: _mean(below[..., i])
    return [
        Entry(row, column, part, *bootstrapped(statistic, n), n=size)
        for part, statistic in asked.items()
    ]


def _spread(row: str, error: _Array, labels: _Array) -> list[Entry]:
    """Of log10 squared errors, ``(seeds, levels, images)``."""
    n, size = error.shape[-1], error[:, 0].size

    def ratio(i: Any) -> float:
        low, high = np.quantile(error[..., i], [0.1, 0.9], axis=-1)
        return float((10 ** (high - low)).mean())

    def between(values: _Array, classes: _Array) -> float:
        return float(
            np.mean(
                [
                    _share_between(line, c)
                    for one, c in zip(values, classes, strict=True)
                    for line in one
                ]
            )
        )

    stream = np.random.default_rng(0)
    chance = [
        between(error, np.array([stream.permutation(c) for c in labels]))
        for _ in range(400)
    ]
    # Networks differ in level: a class is compared within each.
    level = error.mean(1) - error.mean((1, 2))[:, None]
    medians = {c: float(np.median(level[labels == c])) for c in np.unique(labels)}
    order = sorted(medians, key=lambda c: medians[c])
    found = [
        Entry(row, "90th by 10th percentile", "", *bootstrapped(ratio, n), n=size),
        # Images drawn twice are alike: a bootstrap of this share lies above it.
        Entry(row, "share between classes", "", between(error, labels), n=size),
        Entry(row, "by chance, up to", "", float(np.quantile(chance, 0.975)), n=size),
    ]
    for column, c in (("most exposed class", order[0]), ("best protected", order[-1])):
        found.append(Entry(row, column, "", float(c), n=size, decimals=0))
    return found


def _share_between(values: _Array, classes: _Array) -> float:
    """Share of the variance that lies between classes, in [0, 1]."""
    centred = values - values.mean()
    between = sum(
        (classes == c).sum() * centred[classes == c].mean() ** 2
        for c in np.unique(classes)
    )
    whole = float((centred**2).sum())
    return float(between) / whole if whole else math.nan


def _median(row: str, column: str, values: _Array) -> Entry:
    return Entry(row, column, "", *median_interval(values), n=values.size, decimals=4)


def _mean(values: _Array) -> float:
    """Of what is a number."""
    return float(np.nanmean(values)) if np.isfinite(values).any() else math.nan


def _middle(values: _Array) -> float:
    return float(np.nanmedian(values)) if np.isfinite(values).any() else math.nan
