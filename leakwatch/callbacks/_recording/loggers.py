"""What reaches people and loggers: lines, warnings, scalars, tables and figures.

Scalars reach every logger, tables and figures those that can hold them.

The only module that knows Weights & Biases. No picture of private data is sent
anywhere unless the caller passes some. A logger that raises doesn't keep values from
the others: every function returns what went wrong, one sentence per logger.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from leakwatch.reporting import LedgerTable, Row, summarize_classes

__all__ = [
    "has_figures",
    "publish_figures",
    "publish_pictures",
    "publish_scalars",
    "publish_step",
    "say",
    "warn",
]

_HISTOGRAM_BINS = 64


def publish_scalars(
    loggers: Iterable[Logger], scalars: Mapping[str, float], *, step: int, epoch: int
) -> list[str]:
    """Sends numbers to every logger; call it in the main process.

    Values that can't be read (NaN, infinity) are left out: no dashboard may draw them
    as 0.

    Args:
        loggers: of the trainer.
        scalars: key → number.
        step: optimiser steps taken.
        epoch: completed epochs.
    """
    finite = {key: value for key, value in scalars.items() if np.isfinite(value)}

    def send(logger: Logger) -> None:
        logger.log_metrics({**finite, "epoch": epoch}, step=step)
        logger.save()

    return _each(loggers, send)


def publish_step(
    loggers: Iterable[Logger],
    rows: Sequence[Row],
    eigenvalues: npt.NDArray[np.float64] | None,
    *,
    step: int,
    epoch: int,
    class_names: Sequence[str] | None,
    prefix: str,
) -> list[str]:
    """Sends tables and histograms of one probe step to the loggers that hold them.

    Args:
        loggers: of the trainer.
        rows: what was recorded.
        eigenvalues: ``(samples, d_x)``, or ``None``.
        step: optimiser steps taken.
        epoch: completed epochs.
        class_names: by label.
        prefix: of the keys.
    """
    spectrum = _log_eigenvalues(eigenvalues)

    def send(logger: Logger) -> None:
        if isinstance(logger, WandbLogger):
            wandb = importlib.import_module("wandb")
            payload: dict[str, Any] = {
                f"{prefix}/samples": wandb.Table(*_samples(rows, class_names)),
                f"{prefix}/classes": wandb.Table(*_classes(rows, class_names)),
            }
            if spectrum is not None:
                payload[f"{prefix}/spectrum"] = wandb.Histogram(
                    np_histogram=np.histogram(spectrum, bins=_HISTOGRAM_BINS)
                )
            _log_wandb(logger, payload, step=step, epoch=epoch)
        elif isinstance(logger, TensorBoardLogger) and spectrum is not None:
            logger.experiment.add_histogram(f"{prefix}/spectrum", spectrum, step)

    return _each(loggers, send)


def publish_figures(
    loggers: Iterable[Logger],
    figures: Mapping[str, Any],
    *,
    step: int,
    epoch: int,
    prefix: str,
) -> list[str]:
    """Sends plotly figures to W&B, where there is a W&B logger.

    Args:
        loggers: of the trainer.
        figures: name → figure; ``None`` entries are left out.
        step: optimiser steps taken.
        epoch: completed epochs.
        prefix: of the keys.
    """
    drawn = {name: figure for name, figure in figures.items() if figure is not None}

    def send(logger: Logger) -> None:
        wandb = importlib.import_module("wandb")
        payload = {
            f"{prefix}/figure/{name}": wandb.Plotly(figure)
            for name, figure in drawn.items()
        }
        _log_wandb(logger, payload, step=step, epoch=epoch)

    return _each(filter(has_figures, loggers), send) if drawn else []


def publish_pictures(
    loggers: Iterable[Logger],
    pixels: npt.NDArray[np.uint8],
    captions: Sequence[str],
    *,
    step: int,
    epoch: int,
    prefix: str,
    key: str,
) -> list[str]:
    """Sends private pictures to remote loggers; only on the user's explicit wish.

    Args:
        loggers: of the trainer.
        pixels: ``(n, height, width, channels)``, uint8: W&B rescales floats
            differently between releases.
        captions: one per picture.
        step: optimiser steps taken.
        epoch: completed epochs.
        prefix: of the key.
        key: its last part.
    """
    shown = pixels[..., 0] if pixels.shape[-1] == 1 else pixels

    def send(logger: Logger) -> None:
        wandb = importlib.import_module("wandb")
        images = [
            wandb.Image(picture, caption=caption)
            for picture, caption in zip(shown, captions, strict=True)
        ]
        _log_wandb(logger, {f"{prefix}/{key}": images}, step=step, epoch=epoch)

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
    logger: Logger, payload: dict[str, Any], *, step: int, epoch: int
) -> None:
    # W&B drops rows whose own step runs backwards, and its counter is not Lightning's:
    # the step travels as a value.
    logger.experiment.log(  # type: ignore[attr-defined]
        {**payload, "trainer/global_step": step, "epoch": epoch}
    )


def _samples(
    rows: Sequence[Row], names: Sequence[str] | None
) -> tuple[list[str], list[list[Any]]]:
    quantities = list(dict.fromkeys(r.quantity for r in rows if r.sample is not None))
    cells: dict[int, dict[str, Row]] = {}
    for row in rows:
        if row.sample is not None:
            cells.setdefault(row.sample, {})[row.quantity] = row
    columns = ["epoch", "step", "sample", "class", *quantities, "status"]
    table = []
    for sample, measured in cells.items():
        first = next(iter(measured.values()))
        bad = [f"{q}: {r.status}" for q, r in measured.items() if r.status != "ok"]
        bad += [f"{q}: infinite" for q, r in measured.items() if np.isinf(r.value)]
        values = [measured[q].value if q in measured else None for q in quantities]
        table.append(
            [
                first.epoch,
                first.step,
                sample,
                _name(first.label, names),
                *map(_finite, values),
                "; ".join(bad) or "ok",
            ]
        )
    return columns, table


def _classes(
    rows: Sequence[Row], names: Sequence[str] | None
) -> tuple[list[str], list[list[Any]]]:
    columns = ["epoch", "step", "class", "score", "mean", "median", "n"]
    table = LedgerTable.from_rows(rows)
    cells = []
    for (moment, quantity), column in table.columns.items():
        for summary in summarize_classes(column):
            cells.append(
                [
                    moment.epoch,
                    moment.step,
                    _name(summary.label, names),
                    quantity,
                    _finite(summary.mean),
                    _finite(summary.median),
                    summary.used,
                ]
            )
    return columns, cells


def _finite(value: float | None) -> float | None:
    """A table cell: JSON knows neither NaN nor infinity."""
    return None if value is None or not np.isfinite(value) else value


def _name(label: int | None, names: Sequence[str] | None) -> str:
    if label is None:
        return ""
    return names[label] if names is not None and label < len(names) else str(label)


def _log_eigenvalues(
    eigenvalues: npt.NDArray[np.float64] | None,
) -> npt.NDArray[np.float64] | None:
    """log10 of the positive eigenvalues, for a histogram; ``None`` without any."""
    if eigenvalues is None:
        return None
    positive = eigenvalues[np.isfinite(eigenvalues) & (eigenvalues > 0)]
    return np.log10(positive) if positive.size else None


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


def warn(text: str) -> None:
    """Warns in the first process; training goes on whatever warnings are.

    Args:
        text: a sentence.
    """
    try:
        rank_zero_warn(f"leakwatch: {text}")
    except Warning:
        # Where warnings are errors, ours must still not end training.
        rank_zero_info(f"leakwatch: {text}")
