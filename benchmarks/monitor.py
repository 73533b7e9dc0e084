"""What the monitor costs: seconds per probe step against seconds of training.

    python benchmarks/monitor.py [--threads 2] [--only quickstart|resnet18]

``quickstart``: LeNet (I²F) on MNISTSample shapes, 4,000 images an epoch, 32 probes,
the default scores by the exact solver. ``resnet18``: ResNet18 on CIFAR-10 shapes;
there the Jacobian doesn't fit and λ_1 comes from Lanczos. Its epoch of 50,000 images is
extrapolated from timed batches, and its probe step of 32 probes from two probes. The
examination of the network, once a run, is shown apart.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

from leakwatch.derivatives import GradientMap
from leakwatch.models import LeNet, ResNet18, initialize
from leakwatch.scores import ScoreInputs, ScoreResult, Scoring, Settings, resolve


def seconds_per_image(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """One optimiser step of Adam per batch, timed after a warm-up, per image."""
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    net.train()
    times = []
    for _ in range(4):
        start = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
        times.append(time.perf_counter() - start)
    return min(times[1:]) / len(x)


def probe_step(
    net: nn.Module, x: torch.Tensor, y: torch.Tensor
) -> tuple[ScoreResult, float]:
    """The scores of all probes, and the seconds that a run spends once before."""
    start = time.perf_counter()
    gradients = GradientMap(net)
    gradients(x[:2], y[:2])
    once = time.perf_counter() - start
    scoring = Scoring(resolve(["lavp", "i2f", "grad_norm", "loss"]))
    return scoring.evaluate(
        ScoreInputs(gradients, x, y), Settings(noise_std=1e-4)
    ), once


def report(name: str, images: int, per_image: float, probe: float, note: str) -> None:
    """One line for each of three schedules."""
    epoch = images * per_image
    print(f"{name}: epoch of {images} images {epoch:.1f} s, probe step {probe:.1f} s")
    for every in (1, 5, 10):
        share = probe / (every * epoch + probe)
        print(f"  every {every:2d} epochs: {100 * share:5.1f} % of the time")
    print(f"  {note}")


def quickstart(probes: int) -> None:
    """The quickstart's shapes."""
    net = LeNet()
    initialize(net, "xavier", seed=0)
    x, y = torch.rand(64, 1, 28, 28), torch.arange(64) % 10
    per_image = seconds_per_image(net, x, y)
    result, once = probe_step(net, x[:probes], y[:probes])
    report(
        "LeNet (I²F), 1×28×28",
        4000,
        per_image,
        result.seconds,
        f"{probes} probes, solver {result.solver}, "
        f"{result.seconds / probes:.2f} s a probe; once a run {once:.1f} s",
    )


def resnet18(probes: int) -> None:
    """ResNet18 on CIFAR-10 shapes."""
    net = ResNet18()
    x, y = torch.rand(64, 3, 32, 32), torch.arange(64) % 10
    per_image = seconds_per_image(net, x, y)
    result, once = probe_step(net, x[:probes], y[:probes])
    each = result.seconds / probes
    report(
        "ResNet18, 3×32×32",
        50_000,
        per_image,
        32 * each,
        f"32 probes extrapolated from {probes} at {each:.1f} s each, solver "
        f"{result.solver} ({result.reason}); once a run {once:.1f} s",
    )


def main() -> None:
    """Runs and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=("quickstart", "resnet18"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    print(f"{args.threads} thread(s), torch {torch.__version__}")
    if args.only != "resnet18":
        quickstart(32)
    if args.only != "quickstart":
        resnet18(2)


if __name__ == "__main__":
    main()
