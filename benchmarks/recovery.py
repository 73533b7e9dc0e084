"""How well the presets recover images from their clean gradients, with pictures.

    LEAKWATCH_TEST_DATA=data OMP_NUM_THREADS=1 python benchmarks/recovery.py
        [--data MNIST|CIFAR10] [--networks lenet resnet8] [--images 32]
        [--attacks inverting-gradients lavp-l2 lavp-cosine combined] [--out FOLDER]

The networks are untrained: the LeNet of I²F (sigmoids, uniform initialisation) and
ResNet8 (ReLU, PyTorch's initialisation, BatchNorm in evaluation mode). Presets are as
they are, in their usual arithmetic; ``--steps`` and ``--restarts`` change that.
``--out`` keeps one picture for each row: originals above reconstructions.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
from generators import cifar
from networks import load
from torch import Tensor, nn
from torchvision.utils import save_image

import leakwatch
from leakwatch.attacks import GaussNewton, presets
from leakwatch.attacks.combined import Combined
from leakwatch.models import build_model, initialize
from leakwatch.quality import quality

SCHEMES = {"lenet": "uniform", "resnet8": "default"}


def images(name: str, n: int) -> tuple[Tensor, Tensor]:
    """Pixels in [0, 1], and labels."""
    if name == "CIFAR10":
        x, y = cifar(os.environ.get("LEAKWATCH_TEST_DATA", "."))
        return x[:n], y[:n]
    data = load(name, n)
    return data.x * data.std + data.mean, data.y


def untrained(name: str, x: Tensor) -> nn.Module:
    """The network for images of that size."""
    torch.manual_seed(0)
    net = build_model(
        name, in_channels=x.shape[1], num_classes=10, image_size=x.shape[-1]
    )
    initialize(net, SCHEMES[name], seed=0)
    return net.eval()


def main() -> None:
    """Runs and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="MNIST", choices=("MNIST", "CIFAR10"))
    parser.add_argument("--networks", nargs="+", default=["lenet"], choices=SCHEMES)
    parser.add_argument("--images", type=int, default=32)
    parser.add_argument(
        "--attacks",
        nargs="+",
        default=["inverting-gradients", "lavp-l2", "lavp-cosine"],
        choices=presets.available(),
    )
    parser.add_argument("--steps", type=int)
    parser.add_argument("--restarts", type=int)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    x, y = images(args.data, args.images)
    print(f"{args.data}, {len(x)} images, 1 thread, torch {torch.__version__}")
    print(
        f"{'network':9}{'attack':21}{'least':>7}{'lower quartile':>16}{'median':>8}"
        f"{'SSIM':>7}{'CPU s':>8}"
    )
    for name in args.networks:
        net = untrained(name, x)
        for preset in args.attacks:
            second = isinstance(presets.get(preset).attack, GaussNewton | Combined)
            began = time.process_time()
            found = leakwatch.attack(
                net,
                x,
                y,
                preset,
                steps=args.steps,
                restarts=args.restarts,
                data_range=1.0,
                dtype=torch.float64 if second else torch.float32,
            )
            seconds = time.process_time() - began
            got = quality(found.images.float(), x, metrics=("psnr", "ssim"))
            low, quarter, half = torch.quantile(
                got["psnr"].double(), torch.tensor([0.0, 0.25, 0.5]).double()
            ).tolist()
            print(
                f"{name:9}{preset:21}{low:7.1f}{quarter:16.1f}{half:8.1f}"
                f"{got['ssim'].median():7.3f}{seconds:8.0f}",
                flush=True,
            )
            if args.out:
                args.out.mkdir(parents=True, exist_ok=True)
                shown = torch.cat([x, found.images.float().clamp(0, 1)])
                path = args.out / f"{args.data}-{name}-{preset}.png"
                save_image(shown, path, nrow=len(x))


if __name__ == "__main__":
    main()
