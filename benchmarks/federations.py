"""A small federation of MNIST digits, for benchmarks on networks it has trained."""

from __future__ import annotations

import torch
from networks import pixels
from torch import Tensor, nn

from leakwatch.federated import FederatedAveraging, LocalTraining, dirichlet_split
from leakwatch.models import build_model

# The learning rate that SME publishes for its CNN.
LR = 0.004


def digits(*, train: bool, size: int = 28) -> tuple[Tensor, Tensor]:
    """MNIST, normalised."""
    x, y = pixels("MNIST", train=train, size=size)
    return (x - 0.1307) / 0.3081, y


def federation(
    seed: int = 0, network: str = "femnist_cnn", size: int = 28, lr: float = LR
) -> FederatedAveraging:
    """40 clients with 100 digits on average, a tenth of which answers."""
    x, y = digits(train=True, size=size)
    x, y = x[:4000], y[:4000]
    parts = dirichlet_split(y, 40, alpha=0.5, least=10, seed=seed)
    torch.manual_seed(seed)
    net = build_model(network, in_channels=1, num_classes=10, image_size=size)
    return FederatedAveraging(
        net,
        [(x[part], y[part]) for part in parts],
        LocalTraining(epochs=10, batch_size=50, lr=lr),
        share=0.1,
        answering="chance",
        seed=seed,
    )


def accuracy(net: nn.Module, size: int = 28, images: int = 2000) -> float:
    """Share of the first test digits that a network classifies correctly."""
    x, y = digits(train=False, size=size)
    with torch.no_grad():
        right = net(x[:images]).argmax(1) == y[:images]
    return float(right.double().mean())
