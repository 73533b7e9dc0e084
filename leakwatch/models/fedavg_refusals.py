"""Trainers under which a round would not be federated averaging."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch import callbacks
from lightning.pytorch.plugins import DoublePrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import SingleDeviceStrategy

__all__ = ["refuse_unsuited"]

# Exactly these: others cast or replace the weights that the server averages.
_PRECISIONS = (Precision, DoublePrecision, MixedPrecision)

_TUNERS = (
    "tunes a setting of the Trainer's optimiser or loader, which clients don't use; "
    "remove it and give {argument} of FedAvgModule"
)
# Class of Lightning's callbacks -> what it would do, and what to do instead.
_CALLBACKS: dict[type[L.Callback], str] = {
    callbacks.StochasticWeightAveraging: (
        "replaces the learning rate of the Trainer's optimiser, which clients don't "
        "use, and trains for one more round to renew BatchNorm's statistics; remove "
        "it, or average the server's weights over rounds with Lightning's "
        "WeightAveraging"
    ),
    callbacks.GradientAccumulationScheduler: (
        "accumulates gradients over batches, but a round is one batch and clients "
        "share weights; remove it, and give batch_size of FedAvgModule"
    ),
    callbacks.LearningRateFinder: _TUNERS.format(argument="lr"),
    callbacks.BatchSizeFinder: _TUNERS.format(argument="batch_size"),
    callbacks.ModelPruning: (
        "renames and reorders weights between rounds, so that what clients sent no "
        "longer fits the network; remove it, and prune the network before training "
        "with torch.nn.utils.prune"
    ),
    callbacks.BaseFinetuning: (
        "gives thawed layers learning rates of their own, which clients don't use; "
        "remove it, and freeze layers with requires_grad_(False) before training"
    ),
}


def refuse_unsuited(trainer: L.Trainer) -> None:
    """Raise where something would change weights or gradients behind the clients.

    `gradient_clip_val` and `accumulate_grad_batches` of the Trainer are refused by
    Lightning itself, as for any module that steps its own optimiser.

    Args:
        trainer: With its strategy, plugins and callbacks chosen.

    Raises:
        RuntimeError: With what was given and what to do.
    """
    strategy, precision = trainer.strategy, trainer.precision_plugin
    if trainer.world_size > 1:
        raise RuntimeError(
            f"FedAvgModule simulates all clients in one process, but the Trainer has "
            f"{trainer.world_size}; use devices=1."
        )
    if not isinstance(strategy, SingleDeviceStrategy):
        raise RuntimeError(
            f"FedAvgModule simulates all clients on one device, but the Trainer has "
            f"{type(strategy).__name__}, which splits weights, gradients or data; use "
            f"strategy='auto' and devices=1."
        )
    if getattr(precision, "scaler", None) is not None:
        raise RuntimeError(
            f"clients train in full precision, and there are no gradients that "
            f"precision={trainer.precision!r} could scale; use precision='32-true'."
        )
    if type(precision) not in _PRECISIONS:
        raise RuntimeError(
            f"precision={trainer.precision!r} ({type(precision).__name__}) casts or "
            f"replaces the server's weights, and small updates would vanish in their "
            f"average; use precision='32-true', '64-true' or 'bf16-mixed'."
        )
    known: Any = trainer  # Lightning declares no callbacks
    for callback in known.callbacks:
        _refuse_callback(callback)


def _refuse_callback(callback: L.Callback) -> None:
    # By name: models don't know callbacks of their own package.
    names = {kind.__name__ for kind in type(callback).__mro__}
    if "GradientDefense" in names:
        raise RuntimeError(
            "GradientDefense perturbs the gradient of an optimiser's step, but in "
            "federated averaging clients share weights, which it would leave as they "
            "are; remove it."
        )
    for kind, why in _CALLBACKS.items():
        if isinstance(callback, kind):
            raise RuntimeError(f"{type(callback).__name__} {why}.")
