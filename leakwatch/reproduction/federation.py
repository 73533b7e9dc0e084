"""Networks as a federation has trained them, for clients that join later."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from leakwatch.datamodules import ImageDataModule
from leakwatch.datamodules.splits import stratified_first
from leakwatch.federated import FederatedAveraging, LocalTraining, dirichlet_split
from leakwatch.reproduction.networks import Network, Trained, train

__all__ = ["federate", "trainer"]

# SME, Appendix D, but for the clients: it has those of LEAF.
_SHARE: Final = 0.1
_LOCAL_EPOCHS: Final = 10
_EACH: Final = 100
_CONCENTRATION: Final = 0.5
_LEAST: Final = 10


def trainer(
    network: Network,
) -> Callable[[Network, ImageDataModule, int, str], Trained]:
    """What trains a network.

    Args:
        network: how it is trained.
    """
    return federate if network.optimizer == "fedavg" else train


def federate(
    network: Network, data: ImageDataModule, seed: int, device: str = "cpu"
) -> Trained:
    """Initialise, and train by federated averaging; epochs are rounds.

    As Zhu, Yao & Blaschko (ICML 2023, Appendix D): E = 10, the network's batch size
    and step size, and each client answers with probability 0.1. Clients have 100
    images on average, with classes in unequal shares (Dirichlet, 0.5).

    Args:
        network: what and how.
        data: set up; its test images, or else its validation images, give accuracies.
        seed: of weights, split and order.
        device: where.
    """
    started, learning = time.process_time(), 0.0
    begun = train(replace(network, optimizer="sgd", epochs=0, keep=()), data, seed)
    server = FederatedAveraging(
        network.build(data, begun.states[0]).to(device),
        [(x.to(device), y.to(device)) for x, y in _clients(network, data, seed)],
        LocalTraining(_LOCAL_EPOCHS, network.batch_size, network.lr),
        share=_SHARE,
        answering="chance",
        seed=seed,
    )
    states, accuracy = {}, {}
    for rounds in sorted({*network.keep, network.epochs}):
        began = time.process_time()
        list(server.run(rounds - server.completed))
        learning += time.process_time() - began
        module = server.module
        states[rounds] = {
            k: v.detach().cpu().clone() for k, v in module.state_dict().items()
        }
        accuracy[rounds] = _accuracy(network, data, states[rounds])
    return Trained(states, accuracy, time.process_time() - started, learning)


def _clients(
    network: Network, data: ImageDataModule, seed: int
) -> list[tuple[Tensor, Tensor]]:
    found = data.train_dataset
    assert found is not None  # set up
    count = len(found) if network.images is None else network.images
    chosen = stratified_first(found.targets, count)
    y = found.targets[chosen]
    x = torch.stack([found[i][0] for i in chosen.tolist()])
    clients = max(1, count // _EACH)
    least = min(_LEAST, count // clients)
    parts = dirichlet_split(y, clients, alpha=_CONCENTRATION, least=least, seed=seed)
    return [(x[part], y[part]) for part in parts]


def _accuracy(
    network: Network, data: ImageDataModule, state: dict[str, Tensor]
) -> float:
    found = data.test_dataset or data.val_dataset
    assert found is not None  # set up
    chosen = stratified_first(found.targets, min(2000, len(found)))
    x = torch.stack([found[i][0] for i in chosen.tolist()])
    with torch.no_grad():
        right = network.build(data, state)(x).argmax(1) == found.targets[chosen]
    return float(right.double().mean())
