"""Which attack recovers most at equal time per image, from random starts.

    LEAKWATCH_TEST_DATA=data python benchmarks/strength.py [--images 16] [--seconds 30]
        [--networks lenet-sigmoid lenet-relu resnet8]
        [--attacks lavp-l2 lavp-cosine inverting-gradients gauss-newton combined]

Attacks are presets by name (start and restarts as there), and ``combined``: cosine
descent, then Gauss–Newton. All images are attacked at once, and the clock is CPU
seconds times images. A first-order attack gets as many steps as fit its time, measured
before, so that its step decay ends with it; in float32, its usual arithmetic.
Gauss–Newton starts new waves until time is over; it and the combination work in
float64. Labels are known, networks trained (``benchmarks/networks.py``), images the
first of the test set, evenly by class.

Columns: share of images above 20 dB and median PSNR of the returned images (peak 1,
pixel units), share whose gradient was matched, CPU seconds per image.
"""

from __future__ import annotations

import argparse
import time

import torch
from networks import RECIPES, Data, load, network
from torch import Tensor

from leakwatch.attacks import (
    Attack,
    FirstOrder,
    PixelScale,
    Reconstruction,
    SharedGradient,
    Start,
    presets,
)
from leakwatch.attacks.combined import Combined
from leakwatch.derivatives import GradientMap

_TRIAL_STEPS = 20
_WAVES = 50


def prepared(name: str) -> tuple[Attack, Start, int]:
    """Attack, start and restarts of that name."""
    if name == "combined":
        return Combined(), Start.normal(), 4
    preset = presets.get(name)
    restarts = preset.restarts if isinstance(preset.attack, FirstOrder) else _WAVES
    return preset.attack, Start(preset.start), restarts


def run(
    name: str, net: torch.nn.Module, data: Data, seconds: float, seed: int
) -> tuple[Reconstruction, Tensor]:
    """The attack's result within seconds per image, and its PSNR."""
    attack, start, restarts = prepared(name)
    first = isinstance(attack, FirstOrder)
    dtype = torch.float32 if first else torch.float64
    gradients = GradientMap(net, dtype=dtype)
    x = data.x.to(dtype)
    shared = SharedGradient.of(gradients, x, data.y)
    limit = seconds * len(x)

    def go(a: Attack, time_limit: float | None) -> Reconstruction:
        return a.run(
            gradients,
            shared,
            pixels=PixelScale([data.mean], [data.std]),
            start=start,
            seed=seed,
            restarts=restarts,
            time_limit=time_limit,
        )

    if isinstance(attack, FirstOrder):
        go(attack.changed(steps=2), None)
        began = time.perf_counter()
        go(attack.changed(steps=_TRIAL_STEPS), None)
        each = (time.perf_counter() - began) / _TRIAL_STEPS
        attack = attack.changed(steps=max(1, int(0.95 * limit / each)))
    found = go(attack, limit)
    gap = ((found.images.double() - data.x) * data.std).square().flatten(1).mean(1)
    return found, -10 * gap.clamp_min(1e-40).log10()


def main() -> None:
    """Runs and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", default="MNIST")
    parser.add_argument(
        "--networks",
        nargs="+",
        choices=tuple(RECIPES),
        default=["lenet-sigmoid", "lenet-relu", "resnet8"],
    )
    parser.add_argument(
        "--attacks",
        nargs="+",
        default=[
            "lavp-l2",
            "lavp-cosine",
            "inverting-gradients",
            "gauss-newton",
            "combined",
        ],
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    # The attacks' clock counts this process's own seconds, so that other jobs on the
    # machine can't decide who wins.
    time.perf_counter = time.process_time
    print(
        f"{args.data}, {args.images} images, {args.seconds:.0f} CPU seconds an image, "
        f"random starts, 1 thread, torch {torch.__version__}"
    )
    print(
        f"{'network':16}{'attack':22}{'> 20 dB':>8}{'median':>9}{'matched':>9}{'s':>7}"
    )
    for name in args.networks:
        net = network(name, args.data)
        data = load(args.data, args.images, RECIPES[name].size)
        for attack in args.attacks:
            found, quality = run(attack, net, data, args.seconds, args.seed)
            matched = sum(found.matched) / len(quality)
            print(
                f"{name:16}{attack:22}"
                f"{100 * float((quality > 20).double().mean()):6.0f} %"
                f"{float(quality.median()):6.1f} dB{100 * matched:7.0f} %"
                f"{found.seconds / args.images:7.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
