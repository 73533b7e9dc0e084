"""An experiment from its settings to its result: data, networks, cells, tables."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar, final

import torch

import leakwatch
from leakwatch.reporting.ledger.storage import write_atomically
from leakwatch.reproduction import cells, networks
from leakwatch.reproduction.cells import Cell, Lab, Outcome
from leakwatch.reproduction.data import Pictures, open_data
from leakwatch.reproduction.experiment import Experiment, place_of
from leakwatch.reproduction.federation import trainer
from leakwatch.reproduction.figures import draw
from leakwatch.reproduction.kinds.base import Kind, check_data
from leakwatch.reproduction.networks import Trained
from leakwatch.reproduction.result import MARKS, Result
from leakwatch.studies.cells import CellStore, Work, run_cells

__all__ = ["Estimate", "estimate", "reproduce"]

_T = TypeVar("_T")
Say = Callable[[str], object]

#: What all cells are computed by: changes when old ones can't be used any more.
_FORMAT: Final = "reproduction 1"
# Times the accuracy of guessing, from which on a network has learnt something.
_LEARNT: Final = 1.5
# Images that are enough to time an epoch.
_TIMED: Final = 512


def reproduce(
    experiment: Experiment,
    *,
    scale: str,
    output: Path,
    root: str | Path = "data",
    data: str | None = None,
    n_jobs: int | None = None,
    device: str = "cpu",
    say: Say = print,
) -> tuple[Result, Path]:
    """Run an experiment, or go on where it was killed.

    Args:
        experiment: what to run.
        scale: ``"small"`` or ``"paper"``.
        output: folder of all results; finished cells and networks lie there too, and
            serve every experiment that needs the same.
        root: folder of the data sets.
        data: a data set to run on instead of the paper's.
        n_jobs: processes, as of ``joblib.Parallel``.
        device: where networks are trained, scored and attacked.
        say: told what is done, one line at a time.

    Returns:
        The result, and the folder that holds it.

    Raises:
        FileNotFoundError: a data set is missing; says which and what to do.
        ValueError: the settings don't fit each other.
    """
    settings = _settings(experiment, scale, data)
    pictures = _open(experiment, settings, root)
    for found in pictures.values():
        say(f"{experiment.name}: {found.words}")
    lab = _trained(settings, pictures, output, n_jobs, device, say)
    untaught = list(_untaught(settings, lab))
    for line in untaught:
        say(f"{experiment.name}: {line}")
    work = list(settings.cells(lab))
    store = _store(output, cells.encode, cells.decode)
    told = _Told(experiment.name, say, len(work))
    outcomes = run_cells(
        [c.work(device) for c in work], n_jobs=n_jobs, store=store, done=told.cell
    )
    outcomes = [
        replace(o, place=dict(c.place)) for o, c in zip(outcomes, work, strict=True)
    ]
    summary = settings.summarise(outcomes)
    result = Result(
        experiment=experiment.name,
        scale=scale,
        versions={
            "leakwatch": leakwatch.__version__,
            "torch": torch.__version__.partition("+")[0],
        },
        data={name: found.words for name, found in pictures.items()},
        networks={
            place: round(t.accuracy[t.last], 4) for place, t in lab.trained.items()
        },
        settings=experiment.content(scale),
        entries=summary.entries,
        notes=(*untaught, *summary.notes),
        cells=_rows(lab.trained, outcomes),
        beside=dict(settings.beside()),
        figure=bool(summary.panels),
    )
    where = place_of(experiment.name, scale, data, output)
    result.save(where)
    write_atomically(where / "table.md", page(experiment, result).encode())
    if summary.panels:
        try:
            write_atomically(where / "figure.png", draw(summary.panels))
        except ModuleNotFoundError as error:
            say(f"{experiment.name}: no figure.png: {error}")
    return result, where


def page(experiment: Experiment, result: Result) -> str:
    """A result as Markdown: the table, what its marks mean, the notes.

    Args:
        experiment: what was run.
        result: what came out.
    """
    compare = experiment.settings(result.scale).compare
    published = experiment.paper_numbers
    parts = [result.table(compare, published)]
    found = result.marks(compare, published)
    legend = [f"{sign} {MARKS[sign]} ({count})" for sign, count in found.items()]
    if compare == "sign":
        legend.insert(0, "an asterisk: the 95 % interval excludes 0")
    parts.append("; ".join(legend) + "." if legend else "")
    parts.append("\n".join(f"- {note}" for note in result.notes))
    data = "; ".join(result.data.values())
    nets = ", ".join(f"{k} {100 * v:.1f} %" for k, v in result.networks.items())
    parts.append(
        f"Data: {data}.\nTest accuracy: {nets or 'no network was trained'}.\n"
        f"{len(result.cells)} cells, {result.seconds / 60:.1f} minutes of one CPU core."
    )
    return "\n\n".join(part for part in parts if part) + "\n"


@final
@dataclass(frozen=True)
class Estimate:
    """How long an experiment would take.

    Attributes:
        cells: how many there are.
        networks: how many are trained.
        timed: what was computed for it, a line for each.
        hours: of the whole, on one process of this machine.
    """

    cells: int
    networks: int
    timed: tuple[str, ...]
    hours: float

    def __str__(self) -> str:
        return (
            f"{self.networks} networks and {self.cells} cells: at most about "
            f"{self.hours:.1f} hours of one process on this machine, in proportion to "
            "what follows, of which some is spent once however long a cell is\n  "
            + "\n  ".join(self.timed)
        )


def estimate(
    experiment: Experiment,
    *,
    scale: str,
    most: int,
    root: str | Path = "data",
    data: str | None = None,
    device: str = "cpu",
) -> Estimate:
    """Time part of an epoch of each network and small pieces of a few cells.

    The seconds of an image are multiplied by the images and epochs, those of a piece by
    how many more images, tries and steps a cell has. Networks are hardly trained.

    Args:
        experiment: what to time.
        scale: at which.
        most: cells of each part (scores, attacks) that are timed.
        root: folder of the data sets.
        data: as in :func:`reproduce`.
        device: the same.

    Raises:
        FileNotFoundError: a data set is missing.
    """
    settings = _settings(experiment, scale, data)
    pictures = _open(experiment, settings, root)
    whole = settings.needed()
    small, factors = settings.piece()
    trained: dict[str, Trained] = {}
    seconds, timed = 0.0, list[str]()
    known = dict[tuple[str, str], tuple[float, Trained]]()
    for need in whole:
        if (need.data, need.name) not in known:
            epoch, fixed, one = _epoch(need.network, pictures[need.data], device)
            known[need.data, need.name] = epoch * need.network.epochs + fixed, one
            timed.append(
                f"an epoch of {need.name} on {need.data}: {epoch:.1f} s, "
                f"{need.network.epochs} in all, {len(whole)} networks"
            )
        each, one = known[need.data, need.name]
        trained[need.place] = _as_if_all(one, need.network)
        seconds += each
    lab = Lab(pictures, trained)
    pieces, cells_ = small.cells(lab), settings.cells(lab)
    for part in dict.fromkeys(cell.part for cell in pieces):
        took = []
        for cell in _spread([c for c in pieces if c.part == part], most):
            work = cell.work(device)
            found = work.call(*work.arguments)
            took.append(found.seconds)
            timed.append(f"{found.name}: {found.seconds:.1f} s × {factors[part]:g}")
        count = sum(cell.part == part for cell in cells_)
        seconds += sum(took) / len(took) * factors[part] * count
    return Estimate(len(cells_), len(whole), tuple(timed), seconds / 3600)


def _settings(experiment: Experiment, scale: str, data: str | None) -> Kind:
    settings = experiment.settings(scale)
    if data is None:
        return settings
    check_data(data)
    return settings.on(data)


def _open(
    experiment: Experiment, settings: Kind, root: str | Path
) -> dict[str, Pictures]:
    found = {}
    for name in settings.data_names:
        try:
            found[name] = open_data(name, root)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{experiment.name}: {error}") from None
    return found


def _trained(
    settings: Kind,
    pictures: Mapping[str, Pictures],
    output: Path,
    n_jobs: int | None,
    device: str,
    say: Say,
) -> Lab:
    needed = list(settings.needed())
    work = [
        Work(
            name=f"train {need.place}",
            call=trainer(need.network),
            arguments=(need.network, pictures[need.data].module, need.seed, device),
            key=(
                trainer(need.network),
                need.network,
                pictures[need.data].fingerprint,
                need.seed,
            ),
        )
        for need in needed
    ]
    told = _Told("networks", say, len(work))
    store = _store(output, networks.encode, networks.decode)
    found = run_cells(work, n_jobs=n_jobs, store=store, done=told.network)
    trained = {need.place: t for need, t in zip(needed, found, strict=True)}
    return Lab(pictures, trained)


def _untaught(settings: Kind, lab: Lab) -> Iterator[str]:
    """What to say of networks that training left where they were."""
    for need in settings.needed():
        trained, module = lab.trained[need.place], lab.data[need.data].module
        right = trained.accuracy[trained.last]
        if need.network.epochs and right < _LEARNT / module.num_classes:
            yield (
                f"{need.place} has learnt nothing in {need.network.epochs} epochs "
                f"({100 * right:.0f} % right): read the numbers as those of its "
                f"initialisation."
            )


def _store(
    output: Path, encode: Callable[[_T], Any], decode: Callable[[Any], _T]
) -> CellStore[_T]:
    return CellStore(output / "cells", _FORMAT, encode, decode)


def _epoch(
    network: networks.Network, pictures: Pictures, device: str
) -> tuple[float, float, Trained]:
    """Seconds of an epoch, those spent once, and a network that saw a part of one."""
    data = pictures.module
    assert data.train_dataset is not None  # set up
    images = len(data.train_dataset) if network.images is None else network.images
    # Of few clients none may answer.
    few = images if network.optimizer == "fedavg" else min(_TIMED, images)
    short = replace(network, epochs=min(1, network.epochs), keep=(), images=few)
    found = trainer(short)(short, data, 0, device)
    return found.learning * images / few, found.seconds - found.learning, found


def _as_if_all(kept: Trained, network: networks.Network) -> Trained:
    """The weights after one epoch in place of those of every epoch that is kept."""
    state, right = kept.states[kept.last], kept.accuracy[kept.last]
    epochs = {*network.keep, network.epochs}
    return Trained(
        dict.fromkeys(epochs, state), dict.fromkeys(epochs, right), kept.seconds
    )


def _spread(cells: Sequence[Cell], most: int) -> list[Cell]:
    """So many of them, evenly from the first to the last."""
    count = min(most, len(cells))
    return [cells[i * len(cells) // count] for i in range(count)]


def _rows(
    trained: Mapping[str, Trained], outcomes: Sequence[Outcome]
) -> tuple[Mapping[str, Any], ...]:
    rows: list[Mapping[str, Any]] = [
        {"cell": f"train {place}", "seconds": round(t.seconds, 2)}
        for place, t in trained.items()
    ]
    for o in outcomes:
        good, attacked = o.matched
        n = len(next(iter(o.columns.values()), ()))
        row: dict[str, Any] = {"cell": o.name, "n": n, "seconds": round(o.seconds, 2)}
        if attacked:
            row["matched"] = good
        rows.append(row)
    return tuple(rows)


class _Told:
    """Lines about finished cells, with the time that the others will take."""

    def __init__(self, name: str, say: Say, total: int) -> None:
        self._name, self._say, self._total = name, say, total
        self._done, self._computed = 0, 0
        self._began = self._last = time.perf_counter()

    def network(self, work: Work[Trained], found: Trained) -> None:
        """A network is there."""
        right = found.accuracy[found.last]
        self._tell(work.name, f"{100 * right:.1f} % right")

    def cell(self, work: Work[Outcome], found: Outcome) -> None:
        """A cell is there."""
        good, attacked = found.matched
        self._tell(work.name, f"{good} of {attacked} matched" if attacked else "")

    def _tell(self, name: str, what: str) -> None:
        self._done += 1
        now = time.perf_counter()
        # What was found in the folder takes no time and says nothing about the rest.
        self._computed += now - self._last > _READ
        self._last = now
        left = self._total - self._done
        words = f"{self._name} {self._done}/{self._total}: {name}"
        if what:
            words += f", {what}"
        if left and self._computed:
            seconds = (now - self._began) / self._computed * left
            words += f", about {_duration(seconds)} left"
        self._say(words)


_READ: Final = 0.5


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
