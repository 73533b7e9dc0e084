"""A LightningModule that trains any of the architectures by federated averaging."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, final, get_args

import lightning as L
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.plugins import DoublePrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn

from leakwatch.checks import check_choice
from leakwatch.federated import (
    Buffers,
    LocalTraining,
    Round,
    average_updates,
    train_client,
)
from leakwatch.federated.objective import Objective
from leakwatch.federated.streams import client_stream
from leakwatch.models.classifier import ImageClassifier

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


@final
class FedAvgModule(ImageClassifier):
    """Image classifier trained by federated averaging; `forward(x)` gives logits.

    McMahan et al. (AISTATS 2017). An epoch is a communication round: its one batch
    holds the samples of the clients that answer, as (input, label, client), which
    `leakwatch.datamodules.ClientsDataModule` gives. Each client trains from the
    server's weights (`leakwatch.federated.train_client`), and the average becomes the
    server's weights in what counts as one optimiser step. So `max_epochs` is the
    number of rounds, and callbacks such as `LeakageMonitor(every_n_epochs=5)` see the
    server's network after every fifth round.

    Everything random in the clients' training depends on `seed`, the Trainer's epoch
    and the client only: a run resumed from a checkpoint equals an uninterrupted one,
    and both equal `leakwatch.federated.FederatedAveraging` with the same clients, bit
    by bit. What augmentation draws in the data of `ClientsDataModule` depends on its
    `seed`, the epoch and the client in the same way. Draws elsewhere, in a loader of
    your own or on whole batches, come from the global streams, which no checkpoint
    keeps.

    Everything runs in this process. Move on to Flower, with
    :mod:`leakwatch.integrations.flower`, when clients are other machines, when the
    server should do something else than average, or when their training is not this.

    Logs, once an epoch: `train/loss` (mean over the clients' local steps, before each
    of them), `train/clients` (how many answered), `val/loss`, `val/acc`, `test/loss`,
    `test/acc` (loss in nats, accuracy in [0, 1] over samples).

    Args:
        model: A registered name (`registered_models()`), or a module of your own
            whose `forward(x)` gives logits (B, num_classes).
        model_args: Further keywords of a registered architecture.
        num_classes: Number of classes, at least 2.
        in_channels: Channels of the input image; unused with a module of your own.
        image_size: Side of a square image, or (height, width), in pixels; unused
            with a module of your own.
        initialization: As of `LitClassifier`.
        epochs: E, a client's passes over its samples in a round.
        batch_size: B, samples in each local step; the last of an epoch may be smaller.
        lr: Learning rate of the local steps.
        momentum: Of the local steps, in [0, 1); each round starts without.
        weight_decay: Of the local steps, at least 0.
        freeze_batchnorm: Whether BatchNorm keeps its running statistics.
        buffers: "averaged" or "kept": what the server does with the clients'
            statistics.
        seed: Of the clients' shuffling and dropout, at least 0.

    Attributes:
        last_round: The round just completed, with what each client sent and held;
            None before the first. Not part of a checkpoint.

    Raises:
        TypeError: An argument of the wrong kind.
        ValueError: An argument out of range, or a name that is not registered.

    Example:
        >>> module = FedAvgModule("femnist_cnn", epochs=10, batch_size=10, lr=0.004)
        >>> module(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        model: str | nn.Module = "femnist_cnn",
        model_args: dict[str, Any] | None = None,
        num_classes: int = 10,
        in_channels: int = 1,
        image_size: int | tuple[int, int] = 28,
        initialization: str = "default",
        epochs: int = 1,
        batch_size: int = 10,
        lr: float = 0.004,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        freeze_batchnorm: bool = True,
        buffers: Buffers = "averaged",
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.training_settings = LocalTraining(
            epochs, batch_size, lr, momentum, weight_decay
        )
        client_stream(seed)  # raises early
        check_choice("buffers", buffers, get_args(Buffers))
        self.save_hyperparameters(
            ignore=["model"] if isinstance(model, nn.Module) else []
        )
        self.build(
            model, model_args, num_classes, in_channels, image_size, initialization
        )
        self.automatic_optimization = False
        self.freeze_batchnorm = freeze_batchnorm
        self.buffers_policy: Buffers = buffers
        self.seed = seed
        self.last_round: Round | None = None

    def setup(self, stage: str) -> None:
        """Refuse what would not be federated averaging.

        Raises:
            RuntimeError: Several processes, a strategy for them, a precision that
                scales gradients or casts weights, or a callback that acts on
                gradients, learning rates or weights in a way that clients don't see.
        """
        if stage == "fit":
            _refuse_unsuited(self.trainer)

    def on_fit_start(self) -> None:
        """Refuse weights that were in half precision before.

        Raises:
            ValueError: Weights that are too coarse to hold an average.
        """
        Objective(self.model).check_server()

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        """Run one communication round on (samples, labels, clients).

        Raises:
            TypeError: The batch doesn't say whose each sample is.
            ValueError: A client's training diverged.
        """
        if len(batch) != 3:
            raise TypeError(
                f"a batch must hold samples, labels and clients, got {len(batch)} "
                f"tensors; wrap the data: ClientsDataModule(data, 'dirichlet')."
            )
        x, y, owners = batch
        updates = tuple(
            train_client(
                self.model,
                x[owners == client],
                y[owners == client],
                self.training_settings,
                client=client,
                round=self.current_epoch,
                seed=self.seed,
                freeze_batchnorm=self.freeze_batchnorm,
            )
            for client in sorted(set(owners.tolist()))
        )
        weights, buffers = average_updates(updates, self.buffers_policy)
        optimizer: Any = self.optimizers()
        optimizer.step(closure=lambda: Objective(self.model).put(weights, buffers))
        self.last_round = Round(self.current_epoch, updates, weights, buffers)
        for key, value in (
            ("loss", self.last_round.loss),
            ("clients", float(len(updates))),
        ):
            self.log(
                f"train/{key}",
                value,
                on_step=False,
                on_epoch=True,
                prog_bar=key == "loss",
                batch_size=1,
            )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return what counts rounds as optimiser steps."""
        return _Server(self.model.parameters(), self.training_settings.lr)


@final
class _Server(torch.optim.Optimizer):
    """Its step is what the closure does: the average takes the weights' place.

    Checkpoints, schedules and callbacks count optimiser steps, and monitors read the
    learning rate, which is that of the clients.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return None if closure is None else closure()


def _refuse_unsuited(trainer: L.Trainer) -> None:
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
    undeclared: Any = trainer  # Lightning declares no callbacks
    for callback in undeclared.callbacks:
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
