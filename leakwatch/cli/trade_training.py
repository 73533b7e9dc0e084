"""What a trade-off needs of Lightning: training under a defense, and W&B runs."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast, final

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities import move_data_to_device
from torch import nn

from leakwatch.callbacks import GradientDefense
from leakwatch.callbacks._probing.observing import observing
from leakwatch.callbacks._probing.preparation import (
    HOOKS,
    samples_of,
    transfer_hooks,
)
from leakwatch.callbacks._recording.loggers import publish_figures, publish_scalars
from leakwatch.defenses import Defense, Reduction
from leakwatch.studies import Applied, TradeOff, TradeOffRow
from leakwatch.studies.trade_offs.study import Accuracy
from leakwatch.studies.trade_offs.table import columns

__all__ = [
    "LightningTraining",
    "WandbMode",
    "accuracy_on",
    "publish",
]


WandbMode: TypeAlias = Literal["off", "offline", "online"]
"""Where runs go: nowhere, to this disk, or to the server."""

_PREFIX = "trade_off"


@final
@dataclass(frozen=True, eq=False)
class LightningTraining:
    """Trains a network with :class:`leakwatch.callbacks.GradientDefense` in between.

    The validation loop is left out: it draws from the global generators.

    Args:
        trainer: Keywords of ``Trainer``: how long, on what.
        data: Where batches come from; None: the module itself.
        reduction: How the training loss combines samples.
        delta: δ at which ε is stated; None: none is.

    Example:
        >>> LightningTraining({"max_epochs": 1}, None).trainer["max_epochs"]
        1
    """

    trainer: Mapping[str, Any]
    data: LightningDataModule | None
    reduction: Reduction = "mean"
    delta: float | None = None

    def __call__(
        self, module: nn.Module, defense: Defense | None, seed: int
    ) -> Applied | None:
        """Train in place.

        Args:
            module: A LightningModule.
            defense: None for none.
            seed: Of its noise.

        Returns:
            What the optimiser really consumed; None without a defense.

        Raises:
            RuntimeError: What can't be defended, or diverges.
        """
        callback = None
        if defense is not None:
            callback = GradientDefense(
                defense, reduction=self.reduction, seed=seed, delta=self.delta
            )
        device = next(module.parameters()).device
        with _without_info():
            trainer = Trainer(
                **{
                    **self.trainer,
                    "callbacks": [] if callback is None else [callback],
                    "logger": False,
                    "enable_checkpointing": False,
                    "enable_progress_bar": False,
                    "enable_model_summary": False,
                    "limit_val_batches": 0,
                    "num_sanity_val_steps": 0,
                }
            )
            trainer.fit(cast(LightningModule, module), datamodule=self.data)
        module.to(device)
        if callback is None:
            return None
        done = callback.summary
        if done.steps == 0:
            raise RuntimeError(
                "training took no step, so that the defense defended nothing; set "
                "trainer.max_epochs or trainer.max_steps to at least 1."
            )
        spent = callback.privacy
        if spent is not None and not spent.status.usable:
            spent = None
        return Applied(
            steps=done.steps,
            asked=done.asked,
            norm=done.applied,
            relative=done.relative,
            seconds=done.seconds,
            epsilon=math.nan if spent is None else spent.epsilon,
            delta=math.nan if spent is None else spent.delta,
        )


def accuracy_on(
    data: LightningDataModule | LightningModule, split: Literal["test", "val"]
) -> Accuracy:
    """A function that measures the accuracy of a network on a split.

    Args:
        data: Whose loader gives batches; hooks prepare them as a Trainer has it.
        split: Which.

    Raises:
        ValueError: It has no such samples.
    """
    if isinstance(data, LightningDataModule) and split == "test":
        data.setup("test")
    try:
        loader = data.test_dataloader() if split == "test" else data.val_dataloader()
    except Exception as error:
        raise ValueError(
            f"there are no {split} samples to measure accuracy on ({error}); choose "
            f"another --trade_off.accuracy_on, test or val."
        ) from None
    batches = cast(Iterable[Any], loader)
    own = data if isinstance(data, LightningDataModule) else None

    def accuracy(module: nn.Module) -> float:
        device = next(module.parameters()).device
        hooks = transfer_hooks(cast(LightningModule, module), own)
        before, transfer, after = (hooks.get(name, _as_it_is) for name in HOOKS)
        right = total = 0
        with observing(module), torch.no_grad():
            module.eval()
            for batch in batches:
                moved = move_data_to_device(transfer(before(batch, 0), 0), device)
                x, y = samples_of(after(moved, 0))
                right += int((module(x).argmax(1) == y).sum())
                total += len(y)
        if total == 0:
            raise ValueError(f"the {split} samples are none; accuracy needs some.")
        return right / total

    return accuracy


def _as_it_is(batch: Any, dataloader_idx: int) -> Any:
    return batch


@contextmanager
def _without_info() -> Iterator[None]:
    """Leave out what Lightning repeats at the start and end of every training."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


def publish(
    study: TradeOff, directory: Path, *, mode: WandbMode, project: str, group: str
) -> list[str]:
    """Log numbers of every cell, and the table and figure of all. No pictures.

    Args:
        study: What to log.
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
    for row in study.rows:
        name = f"{row.setting.words(study.unit)}, seed {row.seed}"
        try:
            logger = _logger(directory, mode, project, group, name, row)
            refused += publish_scalars([logger], _scalars(row), step=0)
            _finish(logger)
        except Exception as error:
            refused.append(f"W&B refused {name!r}: {type(error).__name__}: {error}")
    try:
        refused += _publish_all(
            study, _logger(directory, mode, project, group, "trade-off", None)
        )
    except Exception as error:
        refused.append(f"W&B refused the table: {type(error).__name__}: {error}")
    return refused


def _publish_all(study: TradeOff, logger: WandbLogger) -> list[str]:
    head, lines = columns(study.overview)
    logger.log_table(f"{_PREFIX}/table", columns=head, data=lines)
    refused: list[str] = []
    try:
        figures = {"privacy_utility": study.figure()}
    except ModuleNotFoundError as error:
        refused.append(str(error))
    else:
        refused += publish_figures([logger], figures, axes={}, prefix=_PREFIX)
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
