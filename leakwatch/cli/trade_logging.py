"""A trade-off in Weights & Biases: one group, a run for each cell, one for all."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypeAlias

from lightning.pytorch.loggers import WandbLogger

from leakwatch.callbacks._recording.loggers import publish_figures, publish_scalars
from leakwatch.studies import TradeOff, TradeOffRow
from leakwatch.studies.trade_offs.table import columns

__all__ = ["WandbMode", "publish"]

WandbMode: TypeAlias = Literal["off", "offline", "online"]
"""Where runs go: nowhere, to this disk, or to the server."""

_PREFIX = "trade_off"


def publish(
    found: TradeOff, directory: Path, *, mode: WandbMode, project: str, group: str
) -> list[str]:
    """Log numbers of every cell, and the table and figure of all. No pictures.

    Args:
        found: What to log.
        directory: Where W&B keeps its files.
        mode: ``"off"`` logs nothing.
        project: Of the runs.
        group: That holds all of them.

    Returns:
        What went wrong, one sentence for each refusal; files are there all the same.
    """
    if mode == "off":
        return []
    refused: list[str] = []
    for row in found.rows:
        name = f"{row.setting.words(found.unit)}, seed {row.seed}"
        try:
            logger = _logger(directory, mode, project, group, name, row)
            refused += publish_scalars([logger], _scalars(row), step=0, epoch=0)
            _finish(logger)
        except Exception as error:
            refused.append(f"W&B refused {name!r}: {type(error).__name__}: {error}")
    try:
        refused += _publish_all(
            found, _logger(directory, mode, project, group, "trade-off", None)
        )
    except Exception as error:
        refused.append(f"W&B refused the table: {type(error).__name__}: {error}")
    return refused


def _publish_all(found: TradeOff, logger: WandbLogger) -> list[str]:
    head, lines = columns(found)
    logger.log_table(f"{_PREFIX}/table", columns=head, data=lines)
    refused: list[str] = []
    try:
        figures = {"privacy_utility": found.figure()}
    except ModuleNotFoundError as error:
        refused.append(str(error))
    else:
        refused += publish_figures([logger], figures, step=0, epoch=0, prefix=_PREFIX)
    _finish(logger)
    return refused


def _scalars(row: TradeOffRow) -> dict[str, float]:
    return {
        f"{_PREFIX}/{key}": float(value)
        for key, value in row.flat().items()
        if isinstance(value, int | float) and key not in ("seed", "cells")
    }


def _logger(
    directory: Path,
    mode: WandbMode,
    project: str,
    group: str,
    name: str,
    row: TradeOffRow | None,
) -> WandbLogger:
    about: dict[str, Any] = {}
    if row is not None:
        names = ("defense", "budget", "coefficient", "seed")
        about = {name: row.flat()[name] for name in names}
    return WandbLogger(
        name=name,
        save_dir=str(directory),
        offline=mode == "offline",
        project=project,
        group=group,
        job_type="cell" if about else "summary",
        config=about,
        # Its summary of every run would bury the table.
        settings={"silent": True},
    )


def _finish(logger: WandbLogger) -> None:
    # The next logger would go on with this run.
    logger.experiment.finish()
