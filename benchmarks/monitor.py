"""What the monitor costs, beside the training that it watches: CPU seconds.

    LEAKWATCH_TEST_DATA=... python benchmarks/monitor.py [--only lenet resnet8 resnet18]

A Lightning Trainer with ``LeakageMonitor(precision="dashboard")`` and nothing else,
on real images: LeNet on MNIST, ResNet8 and ResNet18 on CIFAR-10. Timed are some batches
of training, the start (drawing of probes, statistics of the data, examination of the
network, first probe step) and a later probe step. An epoch is extrapolated from the
batches, and a step of 32 probes from ``--probes`` of them. CPU seconds of this process:
other work on the machine hardly counts.

``--exact`` watches with ``precision="exact"``.
"""

from __future__ import annotations

import argparse
import logging
import resource
import tempfile
import time
import warnings
from typing import Any

import lightning as L
import torch
from networks import pixels
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from leakwatch.callbacks import LeakageMonitor
from leakwatch.models import build_model

PROBES = 32
CASES = {
    # network, data, images of an epoch, batch size
    "lenet": ("lenet", "MNIST", 60_000, 64),
    "resnet8": ("resnet8", "CIFAR10", 50_000, 64),
    "resnet18": ("resnet18", "CIFAR10", 50_000, 64),
}


class Timed(LeakageMonitor):
    """The monitor, with the CPU seconds of its hooks."""

    def __init__(self, probes: int, **arguments: Any) -> None:
        super().__init__(
            probes, report=False, **({"precision": "dashboard"} | arguments)
        )
        self.start = 0.0
        self.steps: list[float] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """The start, with its probe step."""
        started = time.process_time()
        super().on_train_start(trainer, pl_module)
        self.start = time.process_time() - started

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """A later step, after the last batch of an epoch."""
        before = self.latest_rows
        started = time.process_time()
        super().on_train_batch_end(*args, **kwargs)
        if self.latest_rows is not before:
            self.steps.append(time.process_time() - started)


class Network(L.LightningModule):
    """A network of the registry, trained by Adam."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.net(x)
        return logits

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Cross-entropy."""
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """As in the quickstart."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def fit(net: nn.Module, data: DataLoader[Any], batches: int, *callbacks: Any) -> float:
    """CPU seconds of a training of some batches."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            max_epochs=1,
            limit_train_batches=batches,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            callbacks=list(callbacks),
        )
        started = time.process_time()
        trainer.fit(Network(net), data)
        return time.process_time() - started


def case(name: str, probes: int, batches: int, arguments: dict[str, Any]) -> None:
    """Measures and prints one network."""
    model, source, images, batch = CASES[name]
    colour = source == "CIFAR10"
    x, y = pixels(source, train=True, size=32 if colour else 28)
    data = DataLoader(TensorDataset(x, y), batch, shuffle=True)
    torch.manual_seed(0)
    net = build_model(
        model,
        in_channels=3 if colour else 1,
        num_classes=10,
        image_size=32 if colour else 28,
        model_args={},
    )
    fit(net, data, 2)
    few, many = (fit(net, data, k) for k in (batches, 3 * batches))
    each = (many - few) / (2 * batches)
    epoch = each * -(-images // batch)
    watched = Timed(probes, **arguments)
    fit(net, data, batches, watched)
    scale = PROBES / probes
    start, step = watched.start, watched.steps[-1] * scale
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{name:10} epoch of {images:,} images {epoch:8.1f} s ({1e3 * each:.1f} ms a "
        f"batch of {batch})\n"
        f"  start with {probes} probes {start:8.2f} s; later step of {PROBES} "
        f"{step:8.2f} s ({1e3 * step / PROBES:.0f} ms a probe)"
    )
    for every in (1, 5, 10):
        share = step / (every * epoch + step)
        print(f"  every {every:2d} epochs: {100 * share:5.1f} % of the time")
    print(f"  peak memory of the process {peak:,.0f} MiB", flush=True)


def main() -> None:
    """Runs and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=tuple(CASES), default=[*CASES])
    parser.add_argument("--probes", type=int, default=PROBES, help="that are timed")
    parser.add_argument("--batches", type=int, default=20, help="that are timed")
    parser.add_argument("--noise", type=float, default=1e-4)
    parser.add_argument("--exact", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    precision = "exact" if args.exact else "dashboard"
    print(f"1 thread, torch {torch.__version__}, precision={precision!r}")
    for name in args.only:
        arguments = {"precision": precision, "noise_std": args.noise}
        case(name, args.probes, args.batches, arguments)


if __name__ == "__main__":
    main()
