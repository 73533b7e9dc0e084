"""Where a run is recorded, and what is known about it."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from leakwatch.probes import ProbeSet
from leakwatch.reporting import RiskLedger
from leakwatch.scores import Score

_PACKAGES = ("leakwatch", "torch", "lightning", "wandb")


def new_run_name() -> str:
    """A name that no other run has; draws from no random stream."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:6]}"


@dataclass(frozen=True)
class Recorded:
    """What a checkpoint knows about the record of its run.

    Attributes:
        run: name of the run.
        directory: where its ledger was.
        position: how many parts it had.
    """

    run: str
    directory: str
    position: int


def run_directory(
    trainer: Trainer, directory: str | None, resumed: Recorded | None
) -> Path:
    """The directory of this run's ledger, the same in every process.

    Nothing recorded is ever overwritten: a run goes on in a directory only if that
    holds exactly its own past. Everywhere else it starts a new one, named
    ``leakwatch-1``, ``leakwatch-2``, … where the natural name is taken.

    Args:
        trainer: the trainer; every process must call this.
        directory: what the user chose, or ``None``: ``leakwatch`` in the logger's
            directory for this run.
        resumed: the record of the checkpoint that this run continues.

    Returns:
        The directory; not created yet.
    """
    path = Path(directory) if directory else _beside_logger(trainer) / "leakwatch"
    if trainer.is_global_zero:
        candidate, number = path, 0
        while _occupied(candidate, resumed):
            number += 1
            candidate = path.with_name(f"{path.name}-{number}")
        path = candidate
    shared: str = trainer.strategy.broadcast(str(path))
    return Path(shared)


def open_ledger(directory: Path, run: str, resumed: Recorded | None) -> RiskLedger:
    """The ledger of this run, with the past of the checkpoint that it continues.

    Args:
        directory: from :func:`run_directory`.
        run: name of the run.
        resumed: the record of that checkpoint.

    Returns:
        A ledger that is ready for the next part.

    Raises:
        FileNotFoundError: if the past is nowhere to be found.
    """
    ledger = RiskLedger(directory, run=run)
    if resumed is not None and resumed.position:
        if Path(resumed.directory).resolve() == directory.resolve():
            ledger.truncate(resumed.position)
        else:
            ledger.copy_from(resumed.directory, resumed.position)
    return ledger


def _occupied(path: Path, resumed: Recorded | None) -> bool:
    there = RiskLedger(path)
    if not there.position and not (path / "run.json").exists():
        return False
    if resumed is None or Path(resumed.directory).resolve() != path.resolve():
        return True
    return there.position > resumed.position


def _beside_logger(trainer: Trainer) -> Path:
    base = Path(trainer.log_dir or trainer.default_root_dir)
    logger = trainer.logger
    if logger is None or isinstance(logger, CSVLogger | TensorBoardLogger):
        return base
    # These loggers name no directory of their own for one run.
    name = "-".join(str(part) for part in (logger.name, logger.version) if part)
    return base / "leakwatch-runs" / name if name else base


def describe_scores(scores: Sequence[Score]) -> dict[str, dict[str, str]]:
    """Unit, direction, meaning and source of each score, for the report."""
    return {
        s.name: {
            "unit": s.unit,
            "direction": s.direction,
            "meaning": s.meaning,
            "source": s.source,
        }
        for s in scores
    }


def describe_run(
    probes: ProbeSet,
    scores: Sequence[Score],
    config: Mapping[str, Any],
    model: torch.nn.Module,
) -> dict[str, Any]:
    """The metadata of a run, everything but pictures."""
    return {
        "class_names": None if probes.class_names is None else list(probes.class_names),
        "units": probes.units,
        "data_range": probes.data_range,
        "prior_std": probes.prior_std,
        "probes": len(probes),
        "probes_fingerprint": probes.fingerprint(),
        "input_shape": list(probes.x.shape[1:]),
        "model": type(model).__name__,
        "parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "quantities": describe_scores(scores),
        "config": dict(config),
        "versions": {name: _version(name) for name in _PACKAGES},
    }


def pictures(probes: ProbeSet) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
    """The probes as ``(n, height, width, channels)`` uint8, if they are images."""
    pixels = probes.pixels()
    if pixels.ndim == 3:
        pixels = pixels[:, None]
    if pixels.ndim != 4 or pixels.shape[1] not in (1, 3):
        return None
    if probes.units == "input":  # unknown range: spread what there is
        low, high = pixels.amin(), pixels.amax()
        pixels = (pixels - low) / (high - low).clamp_min(1e-12)
    else:
        pixels = pixels / probes.data_range
    scaled = (pixels.clamp(0, 1) * 255).round().to(torch.uint8)
    return scaled.permute(0, 2, 3, 1).numpy()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
