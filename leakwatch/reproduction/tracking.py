"""A result in W&B, only where somebody asked for it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import wandb

from leakwatch.reproduction.experiment import Experiment
from leakwatch.reproduction.result import Result

__all__ = ["log"]


def log(
    experiment: Experiment,
    result: Result,
    folder: Path,
    mode: Literal["offline", "online"],
) -> None:
    """Log the numbers, and the figure if there is one, in a group of the paper's name.

    Args:
        experiment: what was run.
        result: what came out.
        folder: holds the figure; W&B's own files go there too.
        mode: offline keeps them on this disk.
    """
    columns: list[str | int] = [
        "row",
        "column",
        "part",
        "value",
        "low",
        "high",
        "n",
        "status",
    ]
    run = wandb.init(
        project="leakwatch",
        group=f"reproduce-{experiment.paper}",
        name=f"{experiment.name}-{result.scale}",
        mode=mode,
        dir=folder,
        config=dict(result.settings),
    )
    data: list[Iterable[Any]] = [
        [getattr(entry, str(c)) for c in columns] for entry in result.entries
    ]
    run.log({"numbers": wandb.Table(columns=columns, data=data)})
    figure = folder / "figure.png"
    if figure.is_file():
        run.log({"figure": wandb.Image(str(figure))})
    run.finish()
