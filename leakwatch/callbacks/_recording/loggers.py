"""What reaches people and loggers: lines, warnings, scalars, tables and figures.

Scalars reach every logger, tables and figures those that can hold them.

The only module that knows Weights & Biases. No picture of private data is sent
anywhere unless the caller passes some. A logger that raises doesn't keep values from
the others, nor does one key: every function returns what went wrong, one sentence per
logger.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
import numpy.typing as npt
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from leakwatch.reporting import Quantity, Row
from leakwatch.reporting.quantities import describe
from leakwatch.reporting.words import sign_of_bound

__all__ = [
    "GrowingTable",
    "alert",
    "define",
    "has_figures",
    "publish_figures",
    "publish_ledger",
    "publish_pictures",
    "publish_scalars",
    "publish_spectrum",
    "say",
    "state",
    "warn",
]

_HISTOGRAM_BINS = 64

# So many keys in a row are not refused for what they are called.
_GIVE_UP = 3


def publish_scalars(
    loggers: Iterable[Logger], scalars: Mapping[str, float], *, step: int
) -> list[str]:
    """Sends numbers to every logger; call it in the main process.

    Values that can't be read (NaN, infinity) are left out: no dashboard may draw them
    as 0.

    Args:
        loggers: of the trainer.
        scalars: key → number.
        step: optimiser steps taken.
    """
    finite = {key: value for key, value in scalars.items() if np.isfinite(value)}

    def send(logger: Logger) -> None:
        # W&B gets its axis among the scalars: Lightning logs the values of an epoch
        # one step earlier, so that a shared one would run backwards.
        at = None if isinstance(logger, WandbLogger) else step
        try:
            logger.log_metrics(finite, step=at)
        except Exception as error:
            _one_by_one(logger, finite, at, error)
        finally:
            logger.save()

    return _each(loggers, send)


def _one_by_one(
    logger: Logger, scalars: Mapping[str, float], step: int | None, error: Exception
) -> None:
    """Sends what a logger takes of values that it refused together.

    Raises:
        RuntimeError: which keys it refuses, and why.
    """
    refused: list[str] = []
    for number, (key, value) in enumerate(scalars.items()):
        if len(refused) == number == _GIVE_UP:
            raise error
        try:
            logger.log_metrics({key: value}, step=step)
        except Exception:
            refused.append(key)
    if refused:
        raise RuntimeError(f"{', '.join(refused)}: {error}") from error


def state(
    loggers: Iterable[Logger], settings: Mapping[str, Any], *, prefix: str
) -> list[str]:
    """Puts the settings of a run into its W&B config, and defines its axis.

    Args:
        loggers: of the trainer.
        settings: plain values.
        prefix: of the keys.
    """

    def send(logger: Logger) -> None:
        run = logger.experiment  # type: ignore[attr-defined]
        run.config.update({prefix: dict(settings)}, allow_val_change=True)
        run.define_metric(f"{prefix}/step", hidden=True)
        run.define_metric(f"{prefix}/epoch", step_metric=f"{prefix}/step")

    return _each(filter(has_figures, loggers), send)


def define(
    loggers: Iterable[Logger], extremes: Mapping[str, str], *, prefix: str
) -> list[str]:
    """Tells W&B over which axis keys are drawn, and what to keep of their history.

    Args:
        loggers: of the trainer.
        extremes: key → ``"max"``, ``"min"``, or empty: only the last value.
        prefix: of the keys.
    """

    def send(logger: Logger) -> None:
        for key, extreme in extremes.items():
            logger.experiment.define_metric(  # type: ignore[attr-defined]
                key,
                step_metric=f"{prefix}/step",
                summary=f"{extreme},last" if extreme else None,
            )

    return _each(filter(has_figures, loggers), send)


def publish_spectrum(
    loggers: Iterable[Logger],
    eigenvalues: npt.NDArray[np.float64],
    *,
    axes: Mapping[str, int],
    step: int,
    key: str,
) -> list[str]:
    """Sends a histogram of log10 of the positive eigenvalues to W&B and TensorBoard.

    Args:
        loggers: of the trainer.
        eigenvalues: ``(samples, d_x)``.
        axes: key → where on the axes this is.
        step: optimiser steps taken.
        key: of the histogram.
    """
    positive = eigenvalues[np.isfinite(eigenvalues) & (eigenvalues > 0)]
    if not positive.size:
        return []
    logarithms = np.log10(positive)

    def send(logger: Logger) -> None:
        if isinstance(logger, WandbLogger):
            wandb = importlib.import_module("wandb")
            counts = np.histogram(logarithms, bins=_HISTOGRAM_BINS)
            _log_wandb(logger, {key: wandb.Histogram(np_histogram=counts)}, axes)
        elif isinstance(logger, TensorBoardLogger):
            logger.experiment.add_histogram(key, logarithms, step)

    return _each(loggers, send)


@final
class GrowingTable:
    """One W&B table of all samples at all probe steps; each step sends its own rows.

    Args:
        key: of the table.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._columns: list[str] = []
        self._tables: dict[int, Any] = {}

    def publish(
        self,
        loggers: Iterable[Logger],
        rows: Sequence[Row],
        class_names: Sequence[str] | None,
        quantities: Mapping[str, Quantity],
        *,
        axes: Mapping[str, int],
    ) -> list[str]:
        """Adds what one step recorded of each sample.

        The column ``bounds`` names quantities of which exposure is at least what their
        column says, and maybe more.

        Args:
            loggers: of the trainer.
            rows: what was recorded.
            class_names: by label.
            quantities: descriptions, which give the directions.
            axes: key → where on the axes this is.
        """
        samples = _samples(rows, class_names, quantities)
        if not samples:
            return []
        # The first step decides: W&B can't add columns to a table that is there.
        self._columns = self._columns or list(samples[0])

        def send(logger: Logger) -> None:
            wandb = importlib.import_module("wandb")
            table = self._tables.get(id(logger))
            if table is None:
                table = self._tables[id(logger)] = wandb.Table(
                    columns=self._columns,
                    log_mode="INCREMENTAL",
                    allow_mixed_types=True,
                )
            for sample in samples:
                table.add_data(*map(sample.get, self._columns))
            _log_wandb(logger, {self._key: table}, axes)

        return _each(filter(has_figures, loggers), send)


def publish_figures(
    loggers: Iterable[Logger],
    figures: Mapping[str, Any],
    *,
    axes: Mapping[str, int],
    prefix: str,
) -> list[str]:
    """Sends plotly figures to W&B, where there is a W&B logger.

    Args:
        loggers: of the trainer.
        figures: name → figure; ``None`` entries are left out.
        axes: key → where on the axes this is.
        prefix: of the keys.
    """
    drawn = {name: figure for name, figure in figures.items() if figure is not None}

    def send(logger: Logger) -> None:
        wandb = importlib.import_module("wandb")
        payload = {
            f"{prefix}/figure/{name}": wandb.Plotly(figure)
            for name, figure in drawn.items()
        }
        _log_wandb(logger, payload, axes)

    return _each(filter(has_figures, loggers), send) if drawn else []


def publish_pictures(
    loggers: Iterable[Logger],
    pixels: npt.NDArray[np.uint8],
    captions: Sequence[str],
    *,
    axes: Mapping[str, int],
    key: str,
) -> list[str]:
    """Sends private pictures to remote loggers; only on the user's explicit wish.

    Args:
        loggers: of the trainer.
        pixels: ``(n, height, width, channels)``, uint8: W&B rescales floats
            differently between releases.
        captions: one per picture.
        axes: key → where on the axes this is.
        key: of the pictures.
    """
    shown = pixels[..., 0] if pixels.shape[-1] == 1 else pixels

    def send(logger: Logger) -> None:
        wandb = importlib.import_module("wandb")
        images = [
            wandb.Image(picture, caption=caption)
            for picture, caption in zip(shown, captions, strict=True)
        ]
        _log_wandb(logger, {key: images}, axes)

    return _each(filter(has_figures, loggers), send)


def publish_ledger(
    loggers: Iterable[Logger], directory: Path, *, name: str, pictures: bool
) -> list[str]:
    """Sends the record of a run to W&B as an artifact.

    Args:
        loggers: of the trainer.
        directory: of the run.
        name: of the artifact.
        pictures: whether to send those of samples too, in arrays and the report.
    """
    public = [directory / "run.json", *directory.glob("ledger/*.csv")]
    paths = list(directory.rglob("*")) if pictures else public

    def send(logger: Logger) -> None:
        wandb = importlib.import_module("wandb")
        artifact = wandb.Artifact(name, type="leakwatch-ledger")
        for path in sorted(filter(Path.is_file, paths)):
            if path.name.startswith("."):  # the lock of its writer
                continue
            artifact.add_file(str(path), name=path.relative_to(directory).as_posix())
        logger.experiment.log_artifact(artifact)  # type: ignore[attr-defined]

    return _each(filter(has_figures, loggers), send)


def alert(loggers: Iterable[Logger], title: str, text: str) -> list[str]:
    """Sends an alert by W&B, which forwards it as its user has set.

    Args:
        loggers: of the trainer.
        title: a few words.
        text: a sentence.
    """

    def send(logger: Logger) -> None:
        logger.experiment.alert(title=title, text=text)  # type: ignore[attr-defined]

    return _each(filter(has_figures, loggers), send)


def has_figures(logger: Logger) -> bool:
    """Whether a logger can hold interactive figures."""
    return isinstance(logger, WandbLogger)


def _each(loggers: Iterable[Logger], send: Callable[[Logger], None]) -> list[str]:
    refused = []
    for logger in loggers:
        try:
            send(logger)
        except Exception as error:
            kind = type(logger).__name__
            refused.append(f"{kind} raised {type(error).__name__}: {error}")
    return refused


def _log_wandb(
    logger: Logger, payload: dict[str, Any], axes: Mapping[str, int]
) -> None:
    # W&B drops rows whose own step runs backwards, and its counter is not Lightning's:
    # the step travels as a value.
    logger.experiment.log({**payload, **axes})  # type: ignore[attr-defined]


def _samples(
    rows: Sequence[Row],
    names: Sequence[str] | None,
    described: Mapping[str, Quantity],
) -> list[dict[str, Any]]:
    """Column → cell of each sample."""
    quantities = list(dict.fromkeys(r.quantity for r in rows if r.sample is not None))
    cells: dict[int, dict[str, Row]] = {}
    for row in rows:
        if row.sample is not None:
            cells.setdefault(row.sample, {})[row.quantity] = row
    table = []
    for sample, measured in cells.items():
        first = next(iter(measured.values()))
        bad = [f"{q}: {r.status}" for q, r in measured.items() if r.status != "ok"]
        bad += [f"{q}: infinite" for q, r in measured.items() if np.isinf(r.value)]
        table.append(
            {
                "epoch": first.epoch,
                "step": first.step,
                "sample": sample,
                "class": _name(first.label, names),
                "bounds": ", ".join(
                    sign_of_bound(q, True, describe(q, described).sign)
                    for q, row in measured.items()
                    if row.bound
                ),
                **{
                    q: _finite(measured[q].value) if q in measured else None
                    for q in quantities
                },
                "status": "; ".join(bad) or "ok",
            }
        )
    return table


def _finite(value: float) -> float | None:
    """A table cell: JSON knows neither NaN nor infinity."""
    return value if np.isfinite(value) else None


def _name(label: int | None, names: Sequence[str] | None) -> str:
    if label is None:
        return ""
    return names[label] if names is not None and label < len(names) else str(label)


def say(trainer: Trainer, text: str) -> None:
    """Prints a line without tearing a progress bar.

    Args:
        trainer: whose bar it is.
        text: the line.
    """
    bar = trainer.progress_bar_callback
    if bar is not None and getattr(bar, "is_enabled", False):
        bar.print(text)
    else:
        rank_zero_info(text)


def warn(text: str, name: str = "leakwatch") -> None:
    """Warns in the first process; training goes on whatever warnings are.

    Args:
        text: a sentence.
        name: of the callback that it is about.
    """
    try:
        rank_zero_warn(f"{name}: {text}")
    except Warning:
        # Where warnings are errors, ours must still not end training.
        rank_zero_info(f"{name}: {text}")
