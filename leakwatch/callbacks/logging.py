"""What reaches which logger: scalars all of them, tables and figures those that can.

The only module that knows Weights & Biases. No picture of private data is sent
anywhere unless the caller passes some.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger

from leakwatch.reporting import LedgerTable, Row, summarize_classes
from leakwatch.reporting.keys import PREFIX

_HISTOGRAM_BINS = 64


def publish_scalars(
    trainer: Trainer, scalars: Mapping[str, float], *, step: int, epoch: int
) -> None:
    """Sends numbers to every logger of the trainer, in the main process.

    Args:
        trainer: the trainer.
        scalars: key → number.
        step: optimiser steps taken.
        epoch: completed epochs.
    """
    for logger in trainer.loggers:
        # Values that can't be read are left out: no dashboard may draw them as 0.
        finite = {k: v for k, v in scalars.items() if np.isfinite(v)}
        logger.log_metrics({**finite, "epoch": epoch}, step=step)
        logger.save()


def publish_step(
    trainer: Trainer,
    rows: Sequence[Row],
    eigenvalues: npt.NDArray[np.float64] | None,
    *,
    step: int,
    epoch: int,
    class_names: Sequence[str] | None,
) -> None:
    """Sends tables and histograms of one probe step to the loggers that hold them.

    Args:
        trainer: the trainer.
        rows: what was recorded.
        eigenvalues: ``(samples, d_x)``, or ``None``.
        step: optimiser steps taken.
        epoch: completed epochs.
        class_names: by label.
    """
    spectrum = _log_eigenvalues(eigenvalues)
    for logger in trainer.loggers:
        if isinstance(logger, WandbLogger):
            wandb = importlib.import_module("wandb")
            payload: dict[str, Any] = {
                f"{PREFIX}/samples": wandb.Table(*_samples(rows, class_names)),
                f"{PREFIX}/classes": wandb.Table(*_classes(rows, class_names)),
            }
            if spectrum is not None:
                payload[f"{PREFIX}/spectrum"] = wandb.Histogram(
                    np_histogram=np.histogram(spectrum, bins=_HISTOGRAM_BINS)
                )
            _log_wandb(logger, payload, step=step, epoch=epoch)
        elif isinstance(logger, TensorBoardLogger) and spectrum is not None:
            logger.experiment.add_histogram(f"{PREFIX}/spectrum", spectrum, step)


def publish_figures(
    trainer: Trainer, figures: Mapping[str, Any], *, step: int, epoch: int
) -> None:
    """Sends plotly figures to W&B, where there is a W&B logger.

    Args:
        trainer: the trainer.
        figures: name → figure; ``None`` entries are left out.
        step: optimiser steps taken.
        epoch: completed epochs.
    """
    drawn = {name: figure for name, figure in figures.items() if figure is not None}
    for logger in _wandb_loggers(trainer):
        wandb = importlib.import_module("wandb")
        payload = {
            f"{PREFIX}/figure/{name}": wandb.Plotly(figure)
            for name, figure in drawn.items()
        }
        if payload:
            _log_wandb(logger, payload, step=step, epoch=epoch)


def publish_pictures(
    trainer: Trainer,
    pixels: npt.NDArray[np.uint8],
    captions: Sequence[str],
    *,
    step: int,
    epoch: int,
) -> None:
    """Sends private pictures to remote loggers; only on the user's explicit wish.

    Args:
        trainer: the trainer.
        pixels: ``(n, height, width, channels)``, uint8: W&B rescales floats
            differently between releases.
        captions: one per picture.
        step: optimiser steps taken.
        epoch: completed epochs.
    """
    for logger in _wandb_loggers(trainer):
        wandb = importlib.import_module("wandb")
        shown = pixels[..., 0] if pixels.shape[-1] == 1 else pixels
        images = [
            wandb.Image(picture, caption=caption)
            for picture, caption in zip(shown, captions, strict=True)
        ]
        _log_wandb(logger, {f"{PREFIX}/probes": images}, step=step, epoch=epoch)


def has_figures(logger: Logger) -> bool:
    """Whether a logger can hold interactive figures."""
    return isinstance(logger, WandbLogger)


def _wandb_loggers(trainer: Trainer) -> list[WandbLogger]:
    return [x for x in trainer.loggers if isinstance(x, WandbLogger)]


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
    for sample, found in cells.items():
        first = next(iter(found.values()))
        bad = [f"{q}: {r.status}" for q, r in found.items() if r.status != "ok"]
        values = [found[q].value if q in found else None for q in quantities]
        table.append(
            [
                first.epoch,
                first.step,
                sample,
                _name(first.label, names),
                *(None if v is None or np.isnan(v) else v for v in values),
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
        for found in summarize_classes(column):
            numbers = (found.mean, found.median)
            cells.append(
                [
                    moment.epoch,
                    moment.step,
                    _name(found.label, names),
                    quantity,
                    *(None if np.isnan(v) else v for v in numbers),
                    found.used,
                ]
            )
    return columns, cells


def _name(label: int | None, names: Sequence[str] | None) -> str:
    if label is None:
        return ""
    return names[label] if names is not None and label < len(names) else str(label)


def _log_eigenvalues(
    eigenvalues: npt.NDArray[np.float64] | None,
) -> npt.NDArray[np.float64] | None:
    if eigenvalues is None:
        return None
    positive = eigenvalues[np.isfinite(eigenvalues) & (eigenvalues > 0)]
    return np.log10(positive) if positive.size else None
