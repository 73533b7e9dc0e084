"""Networks as an experiment describes them: built, trained, kept as a cell's result."""

from __future__ import annotations

import base64
import io
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from leakwatch.checks import check_integer, check_number
from leakwatch.datamodules import (
    ImageArrays,
    ImageDataModule,
    ImageDataset,
    ImageFiles,
)
from leakwatch.datamodules.splits import stratified_first
from leakwatch.models import build_model, initialize
from leakwatch.models.initialization import check_scheme

__all__ = ["Network", "Trained", "decode", "encode", "train"]

_TESTED = 2000


@final
@dataclass(frozen=True)
class Network:
    """How a network is built and trained.

    Args:
        model: a registered architecture.
        model_args: its own arguments.
        scheme: initialisation.
        epochs: of training; 0: none.
        images: training images, the first of each class, evenly; None: all.
        optimizer: which one; ``"fedavg"``: a federation, whose rounds are the epochs,
            see :func:`leakwatch.reproduction.federation.federate`.
        lr: its step size.
        momentum: of SGD.
        weight_decay: L2 penalty, decoupled for ``adamw``.
        batch_size: images in a step.
        milestones: epochs after which ``lr`` becomes a tenth.
        augment: random crops and mirror images.
        keep: epochs after which the weights are kept besides the last.

    Raises:
        ValueError: for values out of range.
    """

    model: str
    model_args: dict[str, Any] = field(default_factory=dict)
    scheme: str = "default"
    epochs: int = 0
    images: int | None = None
    optimizer: Literal["sgd", "adam", "adamw", "fedavg"] = "adamw"
    lr: float = 1e-3
    momentum: float = 0.0
    weight_decay: float = 0.0
    batch_size: int = 64
    milestones: tuple[int, ...] = ()
    augment: bool = False
    keep: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_integer("epochs", self.epochs, smallest=0)
        check_integer("batch_size", self.batch_size, example=64)
        check_number("lr", self.lr, example=1e-3)
        check_scheme(self.scheme)
        if late := [k for k in self.keep if not 0 <= k <= self.epochs]:
            raise ValueError(f"keep={late} is not within the {self.epochs} epochs.")

    def build(
        self, data: ImageDataModule, state: Mapping[str, Tensor] | None = None
    ) -> nn.Module:
        """The network, in evaluation mode.

        Args:
            data: whose images it takes.
            state: its weights; None: as it is initialised now.
        """
        channels, side, _ = data.image_shape
        net = build_model(
            self.model,
            in_channels=channels,
            num_classes=data.num_classes,
            image_size=side,
            model_args=self.model_args,
        )
        if state is None:
            initialize(net, self.scheme)
        else:
            net.load_state_dict(state)
        return net.eval()


@final
@dataclass(frozen=True, eq=False)
class Trained:
    """What training came to.

    Attributes:
        states: weights by completed epochs.
        accuracy: on test images, by completed epochs.
        seconds: CPU time.
        learning: CPU time of the steps alone, where it was trained in this process.
    """

    states: dict[int, dict[str, Tensor]]
    accuracy: dict[int, float]
    seconds: float
    learning: float = math.nan

    @property
    def last(self) -> int:
        """The number of epochs."""
        return max(self.states)


def train(
    network: Network, data: ImageDataModule, seed: int, device: str = "cpu"
) -> Trained:
    """Initialise and train.

    Args:
        network: what and how.
        data: set up; its test images, or else its validation images, give accuracies.
        seed: of weights, order and augmentation.
        device: where.
    """
    started, learning = time.process_time(), 0.0
    kept = {*network.keep, network.epochs}
    states: dict[int, dict[str, Tensor]] = {}
    accuracy: dict[int, float] = {}

    def keep(epoch: int, net: nn.Module) -> None:
        if epoch in kept:
            states[epoch] = {k: v.detach().cpu().clone() for k, v in _state(net)}
            accuracy[epoch] = _accuracy(net.eval(), data, device)

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = network.build(data).to(device)
        keep(0, net)
        if network.epochs:
            optimizer = _optimizer(net, network)
            schedule = torch.optim.lr_scheduler.MultiStepLR(
                optimizer, list(network.milestones)
            )
            loader = _loader(network, data)
            for epoch in range(1, network.epochs + 1):
                net.train()
                began = time.process_time()
                for x, y in loader:
                    optimizer.zero_grad()
                    logits = net(x.to(device))
                    loss = nn.functional.cross_entropy(logits, y.to(device))
                    loss.backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                schedule.step()
                learning += time.process_time() - began
                keep(epoch, net)
    return Trained(states, accuracy, time.process_time() - started, learning)


def encode(trained: Trained) -> dict[str, Any]:
    """As JSON holds it."""
    file = io.BytesIO()
    torch.save(trained.states, file)
    return {
        "states": base64.b64encode(file.getvalue()).decode(),
        "accuracy": {str(k): v for k, v in trained.accuracy.items()},
        "seconds": trained.seconds,
    }


def decode(content: Mapping[str, Any]) -> Trained:
    """The same backwards."""
    file = io.BytesIO(base64.b64decode(content["states"]))
    states = torch.load(file, weights_only=True)
    accuracy = {int(k): float(v) for k, v in content["accuracy"].items()}
    return Trained(states, accuracy, float(content["seconds"]))


def _state(net: nn.Module) -> Any:
    return net.state_dict().items()


def _optimizer(net: nn.Module, network: Network) -> torch.optim.Optimizer:
    lr, decay = network.lr, network.weight_decay
    if network.optimizer == "sgd":
        return torch.optim.SGD(
            net.parameters(), lr, momentum=network.momentum, weight_decay=decay
        )
    kind = torch.optim.Adam if network.optimizer == "adam" else torch.optim.AdamW
    return kind(net.parameters(), lr, weight_decay=decay)


def _loader(network: Network, data: ImageDataModule) -> DataLoader[Any]:
    found: Any = data.train_dataset
    if network.augment:
        found = _augmented(found, data)
    if network.images is not None:
        found = Subset(found, stratified_first(found.targets, network.images).tolist())
    return DataLoader(found, network.batch_size, shuffle=True)


def _augmented(found: Any, data: ImageDataModule) -> Any:
    stored: ImageArrays | ImageFiles
    if isinstance(found, ImageDataset):
        stored = ImageArrays(found.images, found.targets)
    else:
        stored = ImageFiles(found.paths, found.targets, data.image_shape[1])
    return stored.dataset(data.mean, data.std, augment=True)


@torch.no_grad()
def _accuracy(net: nn.Module, data: ImageDataModule, device: str) -> float:
    found: Any = data.test_dataset or data.val_dataset
    part = Subset(found, stratified_first(found.targets, _TESTED).tolist())
    right = total = 0
    for x, y in DataLoader(part, 250):
        right += int((net(x.to(device)).argmax(1).cpu() == y).sum())
        total += len(y)
    return right / total
