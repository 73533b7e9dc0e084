"""Small trained networks for the benchmarks: made once, the same on every run.

    python benchmarks/networks.py [--data FashionMNIST | CIFAR10]

Trains what the other benchmarks attack and prints test accuracies. Weights are kept in
``benchmarks/.cache`` under a name that holds everything they depend on; delete the
folder to train again. One thread, a fixed order of batches and seeded weights make the
training repeatable on one machine.

The images are found through the environment variable ``LEAKWATCH_TEST_DATA``, a folder
with ``MNIST/raw``, ``FashionMNIST/raw`` and ``cifar10.npz`` (``train_images``,
``train_labels`` and the same of ``test``; images as bytes, channels last).
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

import numpy as np
import torch
from torch import Tensor, nn
from torchvision.datasets import MNIST, FashionMNIST

from leakwatch.models import build_model, initialize

_CACHE = Path(__file__).parent / ".cache"
_SOURCES = {"MNIST": MNIST, "FashionMNIST": FashionMNIST}
# As in leakwatch.datamodules.
_SCALE = {
    "MNIST": (0.1307, 0.3081),
    "FashionMNIST": (0.2860, 0.3530),
    # One number for all channels: their own differ by less than a tenth of the range.
    "CIFAR10": (0.4727, 0.2516),
}
NAMES = tuple(_SCALE)


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
    flip: bool = False
    decay: float = 0.0


RECIPES = {
    "lenet-sigmoid-untrained": Recipe("lenet", "sigmoid", "uniform", 0, 0, 0.0),
    "lenet-sigmoid": Recipe("lenet", "sigmoid", "xavier", 30_000, 6, 2e-3),
    "lenet-relu": Recipe("lenet", "relu", "kaiming", 30_000, 2, 1e-3),
    "resnet8": Recipe("resnet8", "relu", "default", 12_000, 2, 2e-3),
    "resnet8-14": Recipe("resnet8", "relu", "default", 12_000, 3, 2e-3, size=14),
    "resnet18-14-untrained": Recipe("resnet18", "", "default", 0, 0, 0.0, size=14),
    "lenet-relu-14": Recipe("lenet", "relu", "kaiming", 30_000, 2, 1e-3, size=14),
    "lenet-relu-untrained": Recipe("lenet", "relu", "kaiming", 0, 0, 0.0),
    "lenet-relu-32": Recipe("lenet", "relu", "kaiming", 10_000, 12, 1e-3, size=32),
    "lenet-relu-32-untrained": Recipe("lenet", "relu", "kaiming", 0, 0, 0.0, size=32),
    "lenet-sigmoid-32": Recipe("lenet", "sigmoid", "xavier", 10_000, 12, 2e-3, size=32),
    "resnet8-32": Recipe(
        "resnet8", "relu", "default", 10_000, 16, 2e-3, size=32, flip=True, decay=1e-2
    ),
    "resnet8-32-untrained": Recipe("resnet8", "relu", "default", 0, 0, 0.0, size=32),
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
    if name == "CIFAR10":
        if size != 32:
            raise SystemExit("CIFAR10 images are used at 32×32: take a network for it.")
        part = "train" if train else "test"
        with np.load(Path(root) / "cifar10.npz") as file:
            x = torch.from_numpy(file[f"{part}_images"]).permute(0, 3, 1, 2)
            return x.float() / 255, torch.from_numpy(file[f"{part}_labels"]).long()
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
    later = {"size": 28, "flip": False, "decay": 0.0}
    stated = {k: v for k, v in asdict(recipe).items() if (k, v) not in later.items()}
    text = json.dumps(stated | {"data": data, "torch": torch.__version__})
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    path = _CACHE / f"{data}-{name}-{digest}.pt"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        net = build_model(
            recipe.model,
            in_channels=3 if data == "CIFAR10" else 1,
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
    optimizer = torch.optim.AdamW(
        net.parameters(), lr=recipe.lr, weight_decay=recipe.decay
    )
    order = torch.Generator().manual_seed(recipe.seed)
    net.train()
    for _ in range(recipe.epochs):
        for part in torch.randperm(len(x), generator=order).split(recipe.batch):
            optimizer.zero_grad()
            batch = x[part]
            if recipe.flip:
                turned = torch.rand(len(batch), 1, 1, 1, generator=order) < 0.5
                batch = torch.where(turned, batch.flip(3), batch)
            nn.functional.cross_entropy(net(batch), y[part]).backward()
            optimizer.step()


def main() -> None:
    """Trains what is missing and prints accuracies."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="MNIST", choices=NAMES)
    parser.add_argument("--only", nargs="+", choices=tuple(RECIPES))
    args = parser.parse_args()
    torch.set_num_threads(1)
    colour = args.data == "CIFAR10"
    every = [name for name, r in RECIPES.items() if (r.size == 32) == colour]
    for name in args.only or every:
        start = time.perf_counter()
        network(name, args.data)
        seconds = time.perf_counter() - start
        print(f"{name:26}{100 * accuracy(name, args.data):6.1f} %{seconds:8.1f} s")


Source = Literal["MNIST", "FashionMNIST", "CIFAR10"]

if __name__ == "__main__":
    main()
