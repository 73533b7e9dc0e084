"""Photographs: ``combined`` against a peer's default attack at equal CPU time.

    LEAKWATCH_TEST_DATA=data python benchmarks/photographs.py [--data CIFAR10 ImageNet]
        [--networks lenet-relu-32 ...] [--sizes 32 64] [--first 1012] [--images 4]
        [--seconds 6]

The peer: signed Adam at 0.1 with step decay, cosine distance, total variation 0.2, one
start, with as many steps as fit. Both know labels and normalisation, and begin at
noise. ``ImageNet`` is ``imagenet-20.npz`` (``test_images``, 224×224, bytes, channels
last), averaged to the size; its networks are untrained.

Columns: mean and median PSNR of what is returned, and mean of the nearest of all
restarts, which only an auditor can choose; CPU seconds an image; each image's PSNR.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import numpy as np
import torch
from networks import RECIPES, load, network, pixels
from torch import Tensor, nn

from leakwatch.attacks import (
    FirstOrder,
    PixelScale,
    Priors,
    Reconstruction,
    SharedGradient,
    Start,
)
from leakwatch.attacks.combined import Combined
from leakwatch.derivatives import GradientMap
from leakwatch.models import build_model, initialize

PEER = FirstOrder(
    name="peer", distance="cosine", lr=0.1, signed=True, priors=Priors(tv=0.2)
)
_TRIAL_STEPS = 40
_SCHEMES = {"lenet": "kaiming", "resnet8": "default"}
_RELU = {"activation": "relu"}


def crops(size: int, images: int) -> tuple[Tensor, Tensor]:
    """Photographs in [0, 1], averaged to a size, and labels of ten classes."""
    with np.load(Path(os.environ["LEAKWATCH_TEST_DATA"]) / "imagenet-20.npz") as file:
        x = torch.from_numpy(file["test_images"][:images]).permute(0, 3, 1, 2)
    x = nn.functional.interpolate(x.float() / 255, (size, size), mode="area")
    return x, torch.arange(images) % 10


def untrained(model: str, size: int) -> nn.Module:
    """A network for images of that size."""
    torch.manual_seed(0)
    net = build_model(
        model, in_channels=3, num_classes=10, image_size=size, model_args=_RELU
    )
    initialize(net, _SCHEMES[model])
    return net.eval()


def compare(
    title: str, net: nn.Module, p: Tensor, y: Tensor, mean: float, std: float, s: float
) -> None:
    """Prints a row for each attack.

    Args:
        title: of the rows.
        net: the network.
        p: images in [0, 1].
        y: labels.
        mean: of the normalisation.
        std: of the normalisation.
        s: CPU seconds an image.
    """
    x = (p - mean) / std

    def run(
        attack: FirstOrder | Combined, limit: float | None, dtype: torch.dtype
    ) -> Reconstruction:
        gradients = GradientMap(net, dtype=dtype)
        shared = SharedGradient.of(gradients, x.to(dtype), y)
        return attack.run(
            gradients, shared, pixels=PixelScale([mean], [std], low=0.0, high=1.0),
            start=Start.normal(), seed=0, time_limit=limit,
            restarts=4 if isinstance(attack, Combined) else 1,
        )  # fmt: skip

    run(PEER.changed(steps=1), None, torch.float32)
    clock = [time.process_time()]
    for steps in (1, 1 + _TRIAL_STEPS):
        run(PEER.changed(steps=steps), None, torch.float32)
        clock.append(time.process_time())
    each = (clock[2] - 2 * clock[1] + clock[0]) / _TRIAL_STEPS
    peer = PEER.changed(steps=max(1, int(s * len(x) / max(each, 1e-9))))
    for attack, limit in ((peer, None), (Combined(), s * len(x))):
        began = time.process_time()
        dtype = torch.float32 if limit is None else torch.float64
        found = run(attack, limit, dtype)
        took = (time.process_time() - began) / len(x)
        every = found.restart_images.double().view(-1, *x.shape)
        gaps = ((torch.cat([found.images.double()[None], every]) - x) * std).square()
        got = -10 * gaps.flatten(2).mean(2).log10()
        print(
            f"{title:36}{attack.name:10}{float(got[0].mean()):7.1f}"
            f"{float(got[0].quantile(0.5)):8.1f}{float(got.amax(0).mean()):8.1f}"
            f"{took:7.1f}   {' '.join(f'{v:.1f}' for v in got[0].tolist())}",
            flush=True,
        )


def main() -> None:
    """Runs and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    kinds = ("CIFAR10", "ImageNet")
    parser.add_argument("--data", nargs="+", choices=kinds, default=list(kinds))
    colour = [name for name, r in RECIPES.items() if r.size == 32]
    parser.add_argument("--networks", nargs="+", choices=colour,
                        default=["lenet-relu-32", "lenet-relu-32-untrained",
                                 "resnet8-32", "resnet8-32-untrained"])  # fmt: skip
    parser.add_argument("--models", nargs="+", choices=tuple(_SCHEMES),
                        default=list(_SCHEMES), help="of ImageNet")  # fmt: skip
    parser.add_argument("--sizes", nargs="+", type=int, default=[32, 64])
    parser.add_argument("--first", type=int, default=1012, help="test image")
    parser.add_argument("--images", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=6.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    # The attacks' clock counts this process's own seconds.
    time.perf_counter = time.process_time
    known = load("CIFAR10", 1, 32)
    print(
        f"{args.images} images, {args.seconds:g} CPU s each, torch {torch.__version__}"
    )
    print(f"{'network':36}{'attack':10}{'mean':>7}{'median':>8}{'nearest':>8}{'s':>7}")
    if "CIFAR10" in args.data:
        which = slice(args.first, args.first + args.images)
        p, y = (v[which] for v in pixels("CIFAR10", train=False, size=32))
        for name in args.networks:
            net = network(name, "CIFAR10")
            title = f"CIFAR10 {name}"
            compare(title, net, p, y, known.mean, known.std, args.seconds)
    if "ImageNet" in args.data:
        for size in args.sizes:
            p, y = crops(size, args.images)
            for model in args.models:
                title = f"ImageNet {model}, {size}×{size}, untrained"
                net = untrained(model, size)
                compare(title, net, p, y, known.mean, known.std, args.seconds)


if __name__ == "__main__":
    main()
