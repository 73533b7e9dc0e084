"""What watching costs on a GPU, in one run of under 8 minutes.

    python benchmarks/gpu.py [--device cuda] [--network resnet18] [--images 50000]

A network on 3×32×32 inputs in the shapes of CIFAR-10: seconds of a training epoch
(timed batches, extrapolated), of the monitor's probe step at its defaults and its share
of training when it probes every 5 epochs, of λ_1 of 32 images, in float32 and float64,
steps of an attack per second, and the peak of the device's memory. Rows for which the
time left does not suffice are left out, and said to be. Clocks wait for the device.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import leakwatch
from leakwatch.derivatives.runtime.clock import finished
from leakwatch.models import build_model

LIMIT = 450.0
PROBES, EVERY, BATCH = 32, 5, 128


class Bench:
    """Times rows of a table while the time lasts.

    Args:
        device: where.
        started: when the run began.
    """

    def __init__(self, device: torch.device, started: float) -> None:
        self.device, self._started = device, started

    def row(
        self, name: str, act: Callable[[], object], per: float = 1.0, *, warm: bool
    ) -> float | None:
        """Prints seconds of a call over ``per``, and the peak of memory.

        Args:
            name: of the row.
            act: the call.
            per: what one call does of what the row states.
            warm: whether it is called once before it is timed.

        Returns:
            The seconds, ``None`` if they were left out.
        """
        cuda = self.device.type == "cuda"
        if finished(self.device) - self._started > LIMIT:
            print(f"{name:44}{'left out: no time':>20}", flush=True)
            return None
        if cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        try:
            if warm:
                act()
            start = finished(self.device)
            act()
            seconds = (finished(self.device) - start) / per
        except Exception as error:
            print(f"{name:44}{type(error).__name__:>20}: {error}", flush=True)
            return None
        peak = torch.cuda.max_memory_allocated(self.device) / 2**20 if cuda else 0.0
        print(f"{name:44}{seconds:12.4f} s{peak:14.0f} MiB", flush=True)
        return seconds


def epoch(net: nn.Module, x: Tensor, y: Tensor, batches: int) -> None:
    """Some optimiser steps of SGD."""
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9)
    net.train()
    for _ in range(batches):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    net.eval()


def main() -> None:
    """Times and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--network", default="resnet18")
    parser.add_argument("--images", type=int, default=50_000, help="of an epoch")
    parser.add_argument("--size", type=int, default=32, help="pixels along an edge")
    parser.add_argument("--probes", type=int, default=PROBES)
    parser.add_argument("--steps", type=int, default=20, help="of the attack")
    parser.add_argument("--batches", type=int, default=20, help="that are timed")
    args = parser.parse_args()
    device = torch.device(args.device)
    torch.manual_seed(0)
    net = build_model(
        args.network, in_channels=3, num_classes=10, image_size=args.size
    ).to(device)
    n = args.probes
    x = torch.rand(max(n, BATCH), 3, args.size, args.size).to(device)
    y = (torch.arange(len(x)) % 10).to(device)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(
        f"{args.network} on {where}, 3×{args.size}×{args.size}, "
        f"torch {torch.__version__}"
    )
    bench = Bench(device, time.perf_counter())
    whole = args.images / (args.batches * BATCH)
    training = bench.row(
        f"epoch of {args.images:,} images",
        lambda: epoch(net, x[:BATCH], y[:BATCH], args.batches),
        1 / whole,
        warm=True,
    )

    def scored(scores: list[str], dtype: torch.dtype) -> Callable[[], object]:
        return lambda: leakwatch.score(
            net,
            x[:n],
            y[:n],
            scores,
            noise_std=1e-2,
            dtype=dtype,
            prior="natural",
            precision="dashboard",
        )

    default = scored(["lavp", "i2f"], torch.float32)
    probing = bench.row(f"default scores of {n} probes", default, warm=False)
    if training and probing:
        share = probing / (probing + EVERY * training)
        print(f"{f'share of training, every {EVERY} epochs':44}{100 * share:12.2f} %")
    for dtype in (torch.float32, torch.float64):
        name = f"λ_1 of {n} images, {str(dtype).removeprefix('torch.')}"
        bench.row(name, scored(["lavp_l2_max"], dtype), warm=True)
    few = min(8, n)
    steps = bench.row(
        f"attack step of {few} images",
        lambda: leakwatch.attack(
            net, x[:few], y[:few], "inverting-gradients", steps=args.steps, restarts=1
        ),
        args.steps,
        warm=False,
    )
    if steps:
        print(f"{'attack steps per second and image':44}{few / steps:12.1f}")


if __name__ == "__main__":
    main()
