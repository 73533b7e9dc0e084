"""Small trained networks for the benchmarks: made once, the same on every run.

    python benchmarks/networks.py [--data FashionMNIST]

Trains what the other benchmarks attack and prints test accuracies. Weights are kept in
``benchmarks/.cache`` under a name that holds everything they depend on; delete the
folder to train again. One thread, a fixed order of batches and seeded weights make the
training repeatable on one machine.

The images are found through the environment variable ``LEAKWATCH_TEST_DATA``, a folder
with ``MNIST/raw`` and ``FashionMNIST/raw``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torchvision.datasets import MNIST, FashionMNIST

from leakwatch.models import build_model, initialize

_CACHE = Path(__file__).parent / ".cache"
_SOURCES = {"MNIST": MNIST, "FashionMNIST": FashionMNIST}
# As in leakwatch.datamodules.
_SCALE = {"MNIST": (0.1307, 0.3081), "FashionMNIST": (0.2860, 0.3530)}


@dataclass(frozen=True)
class Recipe:
    """Everything that a network's weights depend on."""

    model: str
    activation: str
    scheme: str
    images: int
    epochs: int
    lr: float
    batch: int = 64
    seed: int = 0
    size: int = 28


RECIPES = {
    "lenet-sigmoid-untrained": Recipe("lenet", "sigmoid", "uniform", 0, 0, 0.0),
    "lenet-sigmoid": Recipe("lenet", "sigmoid", "xavier", 30_000, 6, 2e-3),
    "lenet-relu": Recipe("lenet", "relu", "kaiming", 30_000, 2, 1e-3),
    "resnet8": Recipe("resnet8", "relu", "default", 12_000, 2, 2e-3),
    "resnet8-14": Recipe("resnet8", "relu", "default", 12_000, 3, 2e-3, size=14),
    "resnet18-14-untrained": Recipe("resnet18", "", "default", 0, 0, 0.0, size=14),
    "lenet-relu-14": Recipe("lenet", "relu", "kaiming", 30_000, 2, 1e-3, size=14),
}


@dataclass(frozen=True)
class Data:
    """Images of one data set as network inputs, with their scale and prior.

    Attributes:
        x: test images, normalised, ``(n, 1, size, size)``.
        y: their labels.
        mean: of the normalisation.
        std: of the normalisation.
        prior_mean: mean training image, pixel units.
        prior_std: root of the mean pixel variance of the training images.
    """

    x: Tensor
    y: Tensor
    mean: float
    std: float
    prior_mean: Tensor
    prior_std: float


def pixels(name: str, *, train: bool, size: int = 28) -> tuple[Tensor, Tensor]:
    """Images in [0, 1] and labels, in the order of the files; 14×14 ones are pooled."""
    root = os.environ.get("LEAKWATCH_TEST_DATA")
    if not root:
        raise SystemExit(
            "Set LEAKWATCH_TEST_DATA to a folder that holds MNIST/raw, for instance "
            "LEAKWATCH_TEST_DATA=data before the command."
        )
    found = _SOURCES[name](root, train=train, download=False)
    x = found.data[:, None].float() / 255
    return (x if size == 28 else nn.functional.avg_pool2d(x, 28 // size)), found.targets


def load(name: str = "MNIST", images: int = 32, size: int = 28) -> Data:
    """The first test images, evenly by class, none of which was trained on."""
    x, y = pixels(name, train=False, size=size)
    each = range(-(-images // 10))
    order = [int((y == c).nonzero()[i]) for i in each for c in range(10)]
    x, y = x[order[:images]], y[order[:images]]
    train, _ = pixels(name, train=True, size=size)
    mean, std = _SCALE[name]
    return Data(
        (x - mean) / std,
        y,
        mean,
        std,
        train.mean(0),
        float(train.var(0).mean().sqrt()),
    )


def network(name: str, data: str = "MNIST") -> nn.Module:
    """A network of :data:`RECIPES`, from the cache or trained now; in eval mode."""
    recipe = RECIPES[name]
    stated = {k: v for k, v in asdict(recipe).items() if (k, v) != ("size", 28)}
    text = json.dumps(stated | {"data": data, "torch": torch.__version__})
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    path = _CACHE / f"{data}-{name}-{digest}.pt"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        net = build_model(
            recipe.model,
            in_channels=1,
            num_classes=10,
            image_size=recipe.size,
            model_args={"activation": recipe.activation} if recipe.activation else {},
        )
        initialize(net, recipe.scheme)
        if path.exists():
            net.load_state_dict(torch.load(path, weights_only=True))
        elif recipe.epochs:
            _train(net, recipe, data)
            path.parent.mkdir(exist_ok=True)
            (path.parent / ".gitignore").write_text("*\n")
            torch.save(net.state_dict(), path)
    return net.eval()


def accuracy(name: str, data: str = "MNIST", images: int = 2000) -> float:
    """Share of the first test images that a network classifies correctly."""
    net, x, y = network(name, data), *pixels(data, train=False, size=RECIPES[name].size)
    mean, std = _SCALE[data]
    with torch.no_grad():
        right = net((x[:images] - mean) / std).argmax(1) == y[:images]
    return float(right.float().mean())


def _train(net: nn.Module, recipe: Recipe, data: str) -> None:
    x, y = pixels(data, train=True, size=recipe.size)
    mean, std = _SCALE[data]
    x, y = (x[: recipe.images] - mean) / std, y[: recipe.images]
    optimizer = torch.optim.Adam(net.parameters(), lr=recipe.lr)
    order = torch.Generator().manual_seed(recipe.seed)
    net.train()
    for _ in range(recipe.epochs):
        for part in torch.randperm(len(x), generator=order).split(recipe.batch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[part]), y[part]).backward()
            optimizer.step()


def main() -> None:
    """Trains what is missing and prints accuracies."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="MNIST", choices=tuple(_SOURCES))
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in RECIPES:
        start = time.perf_counter()
        network(name, args.data)
        seconds = time.perf_counter() - start
        print(f"{name:26}{100 * accuracy(name, args.data):6.1f} %{seconds:8.1f} s")


Source = Literal["MNIST", "FashionMNIST"]

if __name__ == "__main__":
    main()
