"""What the range of pixels changes: predictions against the attack that knows it.

    LEAKWATCH_TEST_DATA=data python benchmarks/range.py [--images 24] [--first 1000]
        [--networks lenet-sigmoid lenet-relu] [--noise 1e-5 1e-4 1e-3]

One Gaussian δ is added to the gradient of each test image. ``i2f_bayes_psnr`` (knows
mean and spread of the pixels), ``i2f_range_psnr`` (and their range) and
``i2f_told_psnr`` (and which pixels lie at its ends) predict the quality averaged over
the noise: they don't know δ. Gauss–Newton at the maximum of the posterior, with the
same prior and in the range, achieves one for δ, from a near start (the worst case).

Prior, for scores and attacker alike: N(μ, R²) per pixel, μ the mean training image and
R² the mean pixel variance. Matched: the gradient is met as well as the noise allows.
"""

from __future__ import annotations

import argparse
import math
import time

import torch
from networks import RECIPES, load, network, pixels
from torch import Tensor

from leakwatch import score
from leakwatch.attacks import GaussNewton, PixelScale, SharedGradient, Start
from leakwatch.derivatives import GradientMap

SCORES = ("i2f_bayes_psnr", "i2f_range_psnr", "i2f_told_psnr")


def main() -> None:
    """Runs and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=24)
    parser.add_argument("--first", type=int, default=1000, help="test image")
    parser.add_argument("--data", default="MNIST")
    parser.add_argument(
        "--networks",
        nargs="+",
        choices=tuple(RECIPES),
        default=["lenet-sigmoid", "lenet-relu"],
    )
    parser.add_argument("--noise", nargs="+", type=float, default=[1e-5, 1e-4, 1e-3])
    parser.add_argument("--radius", type=float, default=0.05, help="pixels")
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    torch.set_num_threads(1)
    last = args.first + args.images - 1
    print(f"{args.data}, test images {args.first} to {last}, torch {torch.__version__}")
    print(
        "medians, dB; off: |predicted − achieved|; above: share of matched attacks "
        "more than 2 dB above the prediction"
    )
    for name in args.networks:
        _compare(name, args)


def _compare(name: str, args: argparse.Namespace) -> None:
    net = network(name, args.data)
    known = load(args.data, 1, RECIPES[name].size)
    which = slice(args.first, args.first + args.images)
    x, y = (v[which] for v in pixels(args.data, train=False, size=RECIPES[name].size))
    x = (x.double() - known.mean) / known.std
    gradients = GradientMap(net, dtype=torch.float64)
    print(
        f"\n{name}\n   noise matched achieved" + "".join(f" | {s:>24}" for s in SCORES)
    )
    for noise_std in args.noise:
        start = time.perf_counter()
        generator = torch.Generator().manual_seed(0)
        delta = noise_std * torch.randn(
            len(x), gradients.size, generator=generator, dtype=torch.float64
        )
        predicted = score(
            net,
            x,
            y,
            SCORES,
            noise_std=noise_std,
            prior_std=known.prior_std,
            prior_mean=known.prior_mean,
            mean=[known.mean],
            std=[known.std],
            solver="exact",
            dtype=torch.float64,
        )
        scored = time.perf_counter() - start
        shared = SharedGradient(
            gradients(x, y) + delta,
            y[:, None],
            tuple(x.shape[1:]),
            noise_std=noise_std,
        )
        found = GaussNewton(
            steps=args.steps,
            box=True,
            prior_std=known.prior_std,
            prior_mean=known.prior_mean,
        ).run(
            gradients,
            shared,
            pixels=PixelScale([known.mean], [known.std]),
            start=Start.near(x, args.radius / known.std),
            seed=0,
            restarts=1,
        )
        squared = ((found.images - x) * known.std).flatten(1).square().mean(1)
        achieved = -10 * squared.log10()
        noise = noise_std * math.sqrt(gradients.size) / shared.gradient.norm(dim=1)
        matched = found.relative <= 1.02 * noise + 1e-4
        cells = [_cell(predicted[s], achieved, matched) for s in SCORES]
        seconds = time.perf_counter() - start
        print(
            f"{noise_std:8.0e} {int(matched.sum()):4d}/{len(x)} "
            f"{float(achieved.median()):8.1f} | {' | '.join(cells)}"
            f"  ({scored:.0f} s of {seconds:.0f} s for the scores)",
            flush=True,
        )


def _cell(predicted: Tensor, achieved: Tensor, matched: Tensor) -> str:
    off = (predicted - achieved).abs().nanmedian()
    above = (achieved - predicted)[matched] > 2
    share = f"{100 * float(above.double().mean()):.0f} %" if len(above) else "–"
    return f"{float(predicted.nanmedian()):5.1f} off {float(off):4.1f} above {share:>5}"


if __name__ == "__main__":
    main()
