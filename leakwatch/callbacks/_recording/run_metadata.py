"""Where a run is recorded, and what is known about it."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, final

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from leakwatch import __version__
from leakwatch.probes import ProbeSet
from leakwatch.reporting import RiskLedger
from leakwatch.reporting.ledger.claim import claim, release
from leakwatch.reporting.message import GRADIENT, Message
from leakwatch.reporting.quantities import Quantity
from leakwatch.reporting.run_facts import NEARLY_UNDEFENDED
from leakwatch.scores import Score, Settings

__all__ = [
    "PastRecord",
    "assumed",
    "created",
    "describe_run",
    "describe_scores",
    "natural_directory",
    "new_run_name",
    "open_ledger",
    "run_directory",
]

_SAID = ("unit", "direction", "meaning", "source")
_PACKAGES = ("torch", "lightning", "wandb")


def new_run_name() -> str:
    """A name that no other run has; draws from no random stream."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:6]}"


@final
@dataclass(frozen=True)
class PastRecord:
    """What a checkpoint knows about the record of its run.

    Attributes:
        run: name of the run.
        directory: where its ledger was; empty if nothing was recorded.
        position: how many parts it had.
    """

    run: str
    directory: str
    position: int


def natural_directory(trainer: Trainer, directory: str | None, name: str) -> Path:
    """Where a run is recorded if nothing is there yet; every process must call this.

    Args:
        trainer: the trainer.
        directory: what the user chose; ``None`` for one that is named after ``name``
            in the logger's directory for this run, ``leakwatch-run`` by default.
        name: of the monitor.

    Returns:
        An absolute path.
    """
    if directory is not None:
        return Path(directory).absolute()
    base = Path(trainer.log_dir or trainer.default_root_dir)
    logger = trainer.logger
    if logger is not None and not isinstance(logger, CSVLogger | TensorBoardLogger):
        # These loggers name no directory of their own for one run.
        parts = "-".join(str(part) for part in (logger.name, logger.version) if part)
        # Whoever names a run chooses no other folder by it.
        safe = re.sub(r"[^\w.=-]", "_", parts).lstrip(".")
        base = base / "leakwatch-runs" / safe if safe else base
    # A folder that could be imported would hide the package of its name.
    return (base / (f"{name}-run" if name.isidentifier() else name)).absolute()


def run_directory(trainer: Trainer, natural: Path, past: PastRecord | None) -> Path:
    """The directory of this run's ledger, the same in every process.

    Nothing recorded is ever overwritten: a run goes on in a directory only if that
    holds its own past, cut back to the checkpoint, and no other process writes there.
    Everywhere else it starts a new one, named ``leakwatch-run-1``,
    ``leakwatch-run-2``, … where the natural name is taken. The directory is this
    process's until `release`.

    Args:
        trainer: the trainer; every process must call this.
        natural: from :func:`natural_directory`.
        past: the record that this run continues.

    Returns:
        The directory; not created yet.
    """
    path = natural
    if trainer.is_global_zero:
        number = 0
        while not _claimed(path, past):
            number += 1
            path = natural.with_name(f"{natural.name}-{number}")
    shared: str = trainer.strategy.broadcast(str(path))
    return Path(shared)


def open_ledger(directory: Path, run: str, past: PastRecord | None) -> RiskLedger:
    """The ledger of this run, with the past that it continues.

    Args:
        directory: from :func:`run_directory`.
        run: name of the run.
        past: the record that this run continues.

    Returns:
        A ledger that is ready for the next part.

    Raises:
        FileNotFoundError: if the past is nowhere to be found.
        OSError: if the disk refuses.
    """
    ledger = RiskLedger(directory, run=run)
    if past is None:
        return ledger
    if not past.position:
        ledger.truncate(0)  # what a killed process recorded after the checkpoint
        return ledger
    if not past.directory or _run_in(Path(past.directory)) != past.run:
        raise FileNotFoundError(
            f"run {past.run} is not in {past.directory or 'any directory'} any more"
        )
    if _same(past.directory, directory):
        ledger.truncate(past.position)
    else:
        ledger.copy_from(past.directory, past.position)
    return ledger


def created(past: PastRecord | None) -> str | None:
    """When the run that is continued began, as its metadata say."""
    if past is None or not past.directory:
        return None
    metadata = RiskLedger(past.directory).read_metadata()
    return str(metadata["created"]) if "created" in metadata else None


def _occupied(path: Path, past: PastRecord | None) -> bool:
    try:
        there = RiskLedger(path)
        if not there.position and not (path / "run.json").exists():
            return False
    except OSError:  # nothing can be recorded there; opening the ledger says why
        return False
    return past is None or not _same(past.directory, path) or _run_in(path) != past.run


def _claimed(path: Path, past: PastRecord | None) -> bool:
    if _occupied(path, past):
        return False
    try:
        mine = claim(path)
    except OSError:  # nothing can be recorded there; opening the ledger says why
        return True
    if mine and _occupied(path, past):  # by a process that was faster
        release(path)
        return False
    return mine


def _same(directory: str, path: Path) -> bool:
    return bool(directory) and Path(directory).resolve() == path.resolve()


def _run_in(path: Path) -> str | None:
    run = RiskLedger(path).read_metadata().get("run")
    return None if run is None else str(run)


def describe_run(
    probes: ProbeSet,
    quantities: Mapping[str, Quantity],
    settings: Settings,
    config: Mapping[str, Any],
    model: torch.nn.Module,
    message: Message = GRADIENT,
) -> dict[str, Any]:
    """The metadata of a run, everything but pictures.

    Args:
        probes: the samples watched.
        quantities: what is recorded, from :func:`describe_scores`.
        settings: the assumptions in force, which may differ from those of ``probes``.
        config: the callback's arguments.
        model: the network.
        message: what clients share.
    """
    # A LightningModule usually wraps the network that people speak of.
    inner = getattr(model, "model", None)
    network = inner if isinstance(inner, torch.nn.Module) else model
    assumed = {
        "noise_std": settings.noise_std,
        "epsilon": settings.epsilon,
        "prior": settings.knows,
        "prior_std": settings.prior_std,
        "data_range": settings.data_range,
        "target_psnr": settings.target_psnr,
    }
    return {
        "message": message.name,
        "class_names": None if probes.class_names is None else list(probes.class_names),
        "units": probes.units,
        "data_range": settings.data_range,
        "prior_std": settings.prior_std,
        "probes": len(probes),
        "probes_fingerprint": probes.fingerprint(),
        "input_shape": list(probes.x.shape[1:]),
        "model": type(model).__name__,
        "model_name": type(network).__name__,
        "parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "quantities": {
            name: {field: getattr(quantity, field) for field in _SAID}
            for name, quantity in quantities.items()
        },
        "config": {**config, **assumed},
        "versions": {
            "leakwatch": __version__,
            **{name: _version(name) for name in _PACKAGES},
        },
    }


def assumed(config: Mapping[str, Any], *, defended: bool) -> list[str]:
    """What predictions take for granted that the run does not do.

    Args:
        config: of :func:`describe_run`.
        defended: whether a :class:`GradientDefense` takes part in training.
    """
    noise, defense = config.get("noise_std"), config.get("defense")
    if defense:
        return [
            f"attacks met gradients under the defense {defense}, of which predictions "
            f"know nothing: they assume only the noise that is stated"
        ]
    if noise and noise > NEARLY_UNDEFENDED and not defended:
        return [
            f"no defense of this run adds the noise of standard deviation {noise:g} "
            f"that predictions assume; without it more is exposed"
        ]
    return []


def describe_scores(scores: Sequence[Score]) -> dict[str, Quantity]:
    """Unit, direction, meaning and source of each score, for readers of the record."""
    return {
        s.name: Quantity(s.name, s.unit, s.direction, s.meaning, s.source)
        for s in scores
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
