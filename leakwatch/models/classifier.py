"""A LightningModule that trains any of the architectures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, final

import lightning as L
import torch
import torch.nn.functional as F
from jaxtyping import Float
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from leakwatch.checks import check_choice, check_integer, check_number
from leakwatch.models.architectures.parts import checked_sizes
from leakwatch.models.initialization import check_scheme, initialize
from leakwatch.models.registry import build_model

_OPTIMIZERS = ("adam", "sgd")
_SCHEDULERS = ("none", "cosine")

# (x, y) of shapes (B, C, H, W) and (B,); PyTorch's collation makes it a list
Batch = Sequence[Tensor]


class ImageClassifier(L.LightningModule):
    """A network whose `forward(x)` gives logits, and what is logged about it.

    How it is trained is what the classes below it are about. Logs `val/loss`,
    `val/acc`, `test/loss`, `test/acc` once an epoch.

    Attributes:
        model: The network.
        num_classes: Number of logits.
    """

    model: nn.Module
    num_classes: int

    def build(
        self,
        model: str | nn.Module,
        model_args: dict[str, Any] | None,
        num_classes: int,
        in_channels: int,
        image_size: int | tuple[int, int],
        initialization: str,
    ) -> None:
        """Make and initialise the network; arguments as of `LitClassifier`.

        Raises:
            TypeError: An argument of the wrong kind.
            ValueError: An argument out of range, or a name that is not registered.
        """
        check_integer("num_classes", num_classes, smallest=2, example=10)
        checked_sizes(in_channels, num_classes, image_size)
        check_scheme(initialization)
        if isinstance(model, nn.Module):
            if model_args:
                raise ValueError(
                    f"model_args={model_args!r} belongs to a registered model; the "
                    f"module given ({type(model).__name__}) is built already."
                )
        elif isinstance(model, str):
            model = build_model(
                model,
                in_channels=in_channels,
                num_classes=num_classes,
                image_size=image_size,
                model_args=model_args,
            )
        else:
            raise TypeError(
                "model must be a registered name, such as model='lenet', or a "
                f"torch.nn.Module, got {type(model).__name__}."
            )
        self.model = initialize(model, initialization)
        self.num_classes = num_classes
        self.val_acc = MulticlassAccuracy(num_classes, average="micro")
        self.test_acc = MulticlassAccuracy(num_classes, average="micro")

    def forward(
        self, x: Float[Tensor, "batch channels height width"]
    ) -> Float[Tensor, "batch classes"]:
        """Return logits."""
        logits: Tensor = self.model(x)
        return logits

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log loss and accuracy of a validation batch."""
        self.evaluate("val", batch, self.val_acc)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Log loss and accuracy of a test batch."""
        self.evaluate("test", batch, self.test_acc)

    def evaluate(
        self, stage: str, batch: Batch, accuracy: MulticlassAccuracy
    ) -> Float[Tensor, ""]:
        """Log the mean cross-entropy of a batch, in nats, and its accuracy.

        Args:
            stage: "train", "val" or "test".
            batch: (x, y).
            accuracy: That of the stage.

        Returns:
            The loss.

        Raises:
            ValueError: The network gives no logits of these classes.
        """
        x, y = batch
        logits = self(x)
        if logits.shape != (len(x), self.num_classes):
            raise ValueError(
                f"forward(x) must give logits of shape ({len(x)}, "
                f"{self.num_classes}) for this batch, got {tuple(logits.shape)}; "
                "num_classes and the model disagree."
            )
        loss = F.cross_entropy(logits, y)
        accuracy(logits, y)
        self.log(
            f"{stage}/loss",
            loss,
            on_step=False,
            on_epoch=True,
            prog_bar=stage == "train",
            batch_size=len(x),
            sync_dist=True,
        )
        self.log(
            f"{stage}/acc",
            accuracy,
            on_step=False,
            on_epoch=True,
            prog_bar=stage == "val",
            batch_size=len(x),
        )
        return loss


@final
class LitClassifier(ImageClassifier):
    """Image classifier with cross-entropy; `forward(x)` gives logits.

    Logs, once an epoch: `train/loss`, `train/acc`, `val/loss`, `val/acc`,
    `test/loss`, `test/acc` (loss in nats, accuracy in [0, 1] over samples).

    Args:
        model: A registered name (`registered_models()`), or a module of your own
            whose `forward(x)` gives logits (B, num_classes).
        model_args: Further keywords of a registered architecture, such as
            `{"activation": "relu"}`.
        num_classes: Number of classes, at least 2.
        in_channels: Channels of the input image; unused with a module of your own.
        image_size: Side of a square image, or (height, width), in pixels; unused
            with a module of your own.
        initialization: "default", "uniform", "normal", "kaiming" or "xavier"; see
            `leakwatch.models.initialize`. Drawn from the global generator, so that
            `seed_everything` decides.
        optimizer: "adam" or "sgd".
        lr: Learning rate.
        momentum: Momentum of SGD, in [0, 1); Adam ignores it.
        weight_decay: L2 penalty, at least 0.
        scheduler: "none", or "cosine": the rate falls to 0 over the Trainer's steps.

    Raises:
        TypeError: An argument of the wrong kind.
        ValueError: An argument out of range, or a name that is not registered.

    A module of your own is not stored among the hyperparameters:
    `LitClassifier.load_from_checkpoint(path, model=module)` then needs it again.

    Example:
        >>> net = LitClassifier("lenet", model_args={"activation": "relu"}, lr=1e-3)
        >>> net(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        model: str | nn.Module = "lenet",
        model_args: dict[str, Any] | None = None,
        num_classes: int = 10,
        in_channels: int = 1,
        image_size: int | tuple[int, int] = 28,
        initialization: str = "default",
        optimizer: Literal["adam", "sgd"] = "adam",
        lr: float = 1e-3,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        scheduler: Literal["none", "cosine"] = "none",
    ) -> None:
        super().__init__()
        check_choice("optimizer", optimizer, _OPTIMIZERS)
        check_choice("scheduler", scheduler, _SCHEDULERS)
        check_number("lr", lr, example=1e-3)
        check_number("momentum", momentum, "[0, 1)", example=0.9)
        check_number("weight_decay", weight_decay, "[0, inf)", example=0.0)
        self.save_hyperparameters(
            ignore=["model"] if isinstance(model, nn.Module) else []
        )
        self.build(
            model, model_args, num_classes, in_channels, image_size, initialization
        )
        self.optimizer_name = optimizer
        self.scheduler_name = scheduler
        self.lr = float(lr)
        self.momentum = float(momentum)
        self.weight_decay = float(weight_decay)
        self.train_acc = MulticlassAccuracy(num_classes, average="micro")

    def training_step(self, batch: Batch, batch_idx: int) -> Float[Tensor, ""]:
        """Return the mean cross-entropy of a batch, in nats."""
        return self.evaluate("train", batch, self.train_acc)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return the optimiser and, with "cosine", its schedule over all steps.

        Raises:
            ValueError: "cosine" with a Trainer that has no end.
        """
        optimizer: torch.optim.Optimizer
        if self.optimizer_name == "adam":
            optimizer = torch.optim.Adam(
                self.model.parameters(), self.lr, weight_decay=self.weight_decay
            )
        else:
            optimizer = torch.optim.SGD(
                self.model.parameters(),
                self.lr,
                momentum=self.momentum,
                weight_decay=self.weight_decay,
            )
        if self.scheduler_name == "none":
            return optimizer
        steps = self.trainer.estimated_stepping_batches
        if not math.isfinite(steps):
            raise ValueError(
                "scheduler='cosine' needs a Trainer with an end: set max_epochs or "
                "max_steps, or use scheduler='none'."
            )
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
            optimizer, T_max=max(1, int(steps))
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }
