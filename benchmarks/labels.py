"""How many labels each rule reads off the gradient of a batch of MNIST digits.

    python benchmarks/labels.py --data FOLDER [--targets 100] [--epochs 0 1 5]

FOLDER holds MNIST as torchvision keeps it; default: the LEAKWATCH_TEST_DATA folder.
For each network, batch size and way of drawing the batch (at random, or without
repeated labels): the share of labels found and of batches found completely.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
from torch import Tensor, nn
from torchvision.datasets import MNIST

from leakwatch.attacks import SharedGradient, infer_labels
from leakwatch.attacks.labels.infer import LabelMethod, label_accuracy
from leakwatch.derivatives import GradientMap
from leakwatch.models import LeNet, initialize

MEAN, STD = 0.1307, 0.3081


def digits(root: str, train: bool) -> tuple[Tensor, Tensor]:
    """Normalised images and labels."""
    data = MNIST(root, train=train)
    return ((data.data[:, None].float() / 255) - MEAN) / STD, data.targets


def train(net: nn.Module, x: Tensor, y: Tensor, epochs: int) -> None:
    """Adam, batches of 64."""
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[batch]), y[batch]).backward()
            optimizer.step()


def draw(y: Tensor, size: int, repeats: bool, generator: torch.Generator) -> Tensor:
    """Positions of one batch."""
    if repeats:
        return torch.randperm(len(y), generator=generator)[:size]
    classes = torch.randperm(10, generator=generator)[:size]
    shuffled = torch.randperm(len(y), generator=generator)
    return torch.stack([shuffled[(y[shuffled] == c).nonzero()[0, 0]] for c in classes])


def measure(
    gradients: GradientMap, x: Tensor, y: Tensor, size: int, repeats: bool, targets: int
) -> str:
    """One line of the table."""
    generator = torch.Generator().manual_seed(size)
    index = torch.cat([draw(y, size, repeats, generator) for _ in range(targets)])
    shared = SharedGradient.of(gradients, x[index], y[index], images=size)
    true = y[index].view(targets, size)
    rules: tuple[LabelMethod, ...] = ("sign",) if size == 1 else ("minimum", "count")
    entries = []
    for rule in rules:
        if rule == "minimum" and size > 10:
            continue
        start = time.perf_counter()
        found = infer_labels(shared.without_labels(), gradients, rule)
        seconds = (time.perf_counter() - start) / targets
        accuracy = label_accuracy(found.labels, true)
        sure = torch.tensor([s.word == "ok" for s in found.status])
        wrong = int((sure & (accuracy < 1)).sum())
        whole = (accuracy == 1).double().mean()
        entries.append(
            f"{rule} {100 * accuracy.mean():5.1f} % / {100 * whole:5.1f} % "
            f"(ok: {int(sure.sum())}, wrong: {wrong}; {1e3 * seconds:.1f} ms)"
        )
    return "; ".join(entries)


def main() -> None:
    """Runs and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default=os.environ.get("LEAKWATCH_TEST_DATA"))
    parser.add_argument("--targets", type=int, default=100)
    parser.add_argument("--epochs", type=int, nargs="+", default=[0, 1, 5])
    parser.add_argument("--activation", default="sigmoid")
    args = parser.parse_args()
    if args.data is None:
        parser.error("give --data or set LEAKWATCH_TEST_DATA")
    torch.set_num_threads(1)
    x, y = digits(args.data, train=True)
    x_test, y_test = digits(args.data, train=False)
    print("share of labels found / of batches found completely")
    for epochs in args.epochs:
        torch.manual_seed(0)
        net = LeNet(activation=args.activation)
        initialize(net, "xavier" if epochs else "uniform", seed=0)
        train(net, x[:20_000], y[:20_000], epochs)
        net.eval()
        with torch.no_grad():
            right = (net(x_test[:2000]).argmax(1) == y_test[:2000]).double().mean()
        print(
            f"LeNet ({args.activation}), {epochs} epochs, accuracy {100 * right:.0f} %"
        )
        gradients = GradientMap(net)
        for size in (1, 4, 8, 16):
            for repeats in (True, False):
                if not repeats and size in (1, 16):
                    continue
                kind = "at random" if repeats else "no repeats"
                line = measure(gradients, x_test, y_test, size, repeats, args.targets)
                print(f"  batch {size:2d} {kind:10s} {line}", flush=True)


if __name__ == "__main__":
    main()
