"""Predicted against achieved error of the best attacker, image by image.

    LEAKWATCH_TEST_DATA=data python benchmarks/calibration.py [--images 16]
        [--networks lenet-sigmoid lenet-relu ...] [--variances 1e-6 1e-4 ...]
        [--influence-steps 8] [--start near|random] [--radius 0.05] [--csv FILE]

For each network and noise variance, one Gaussian δ is added to the gradient of each
image. ``i2f_bayes`` (for that δ; linear, and integrated in ``--influence-steps``),
``i2f`` (for that δ, exact), ``i2f_lb`` and the baselines predict the error;
Gauss–Newton at the maximum of the posterior, with the same prior, achieves one. All
errors are root mean squares per pixel.

Prior, for score and attacker alike: N(μ, R²) per pixel, μ the mean training image and
R² the mean pixel variance; no box, because a Gaussian prior has none.

From a near start (x* ± radius per pixel, the worst case) all images count; from random
starts those whose gradient was matched as well as the noise allows *and* that came
nearer than the prior mean. Columns: median of |20 log₁₀(predicted/achieved)|, and
Spearman's rank correlation over the images of one noise level.
"""

from __future__ import annotations

import argparse
import csv
import math
import time

import torch
from networks import RECIPES, Data, load, network
from torch import Tensor, nn

from leakwatch import score
from leakwatch.attacks import GaussNewton, PixelScale, SharedGradient, Start
from leakwatch.derivatives import GradientMap

VARIANCES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
SCORES = ("i2f_bayes", "i2f", "i2f_lb")
COLUMNS = ("integrated", *SCORES)


def spearman(a: Tensor, b: Tensor) -> float:
    """Rank correlation; NaN where one of them is constant."""
    ranks = [v.double().argsort().argsort().double() for v in (a, b)]
    if len(a) < 3 or any(float(v.std()) == 0 for v in (a, b)):
        return math.nan
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])


def predictions(
    net: nn.Module, data: Data, noise_std: float, delta: Tensor, steps: int
) -> dict[str, Tensor]:
    """Error per pixel that each score predicts, or the score itself."""
    linear, path = (
        score(
            net,
            data.x,
            data.y,
            names,
            noise_std=noise_std,
            delta=delta,
            prior_std=data.prior_std,
            prior_mean=data.prior_mean,
            mean=[data.mean],
            std=[data.std],
            solver="exact",
            dtype=torch.float64,
            influence_steps=taken,
        )
        for names, taken in (([*SCORES, "grad_norm", "loss"], 1), ("i2f_bayes", steps))
    )
    out = {name: linear[name] for name in linear}
    out["integrated"] = path["i2f_bayes"]
    for name in COLUMNS:
        out[name] = out[name] / math.sqrt(data.x[0].numel())
    out["image std"] = data.x.flatten(1).std(1)
    return out


def achieved(
    net: nn.Module,
    data: Data,
    noise_std: float,
    delta: Tensor,
    args: argparse.Namespace,
) -> tuple[Tensor, Tensor]:
    """Error per pixel of the attacker, and whether it counts."""
    gradients = GradientMap(net, dtype=torch.float64)
    x = data.x.double()
    shared = SharedGradient(
        gradients(x, data.y) + delta,
        data.y[:, None],
        tuple(x.shape[1:]),
        noise_std=noise_std,
    )
    attack = GaussNewton(
        steps=args.steps,
        box=False,
        prior_std=data.prior_std,
        prior_mean=data.prior_mean,
        smoothing=args.smoothing,
    )
    near = args.start == "near"
    radius = args.radius / data.std
    found = attack.run(
        gradients,
        shared,
        pixels=PixelScale([data.mean], [data.std]),
        start=Start.near(x, radius) if near else Start.uniform(),
        seed=0,
        restarts=args.restarts,
    )
    error = ((found.images - x) * data.std).flatten(1).square().mean(1).sqrt()
    noise = noise_std * math.sqrt(delta.shape[1]) / shared.gradient.norm(dim=1)
    mean = (data.prior_mean - data.mean) / data.std
    guess = ((mean - x) * data.std).flatten(1).square().mean(1).sqrt()
    recovered = (found.relative <= 1.02 * noise + 1e-4) & (error < guess)
    return error, torch.ones_like(recovered) if near else recovered


def main() -> None:
    """Runs and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--data", default="MNIST")
    parser.add_argument(
        "--networks",
        nargs="+",
        choices=tuple(RECIPES),
        default=["lenet-sigmoid-untrained", "lenet-sigmoid", "lenet-relu"],
    )
    parser.add_argument("--variances", nargs="+", type=float, default=VARIANCES)
    parser.add_argument("--start", choices=("near", "random"), default="near")
    parser.add_argument("--radius", type=float, default=0.05, help="pixels")
    parser.add_argument("--restarts", type=int, default=6)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--influence-steps", type=int, default=8)
    parser.add_argument("--smoothing", type=float, default=0.3)
    parser.add_argument("--csv", help="one line for each image and noise level")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"{args.data}, {args.images} images, {args.start} starts, prior around the "
        f"mean image, no box, torch {torch.__version__}"
    )
    rows: list[list[object]] = []
    for name in args.networks:
        net = network(name, args.data)
        data = load(args.data, args.images, RECIPES[name].size)
        size = sum(p.numel() for p in net.parameters())
        print(
            f"\n{name}, R = {data.prior_std:.3f}\n{'variance':>9}{'n':>4}{'RMSE':>8} |"
            + "".join(f"{s:>10} dB{'rho':>7}" for s in COLUMNS)
            + "   rho of: grad_norm   loss  image std"
        )
        for variance in args.variances:
            start = time.perf_counter()
            noise_std = math.sqrt(variance)
            generator = torch.Generator().manual_seed(0)
            delta = noise_std * torch.randn(
                args.images, size, generator=generator, dtype=torch.float64
            )
            predicted = predictions(net, data, noise_std, delta, args.influence_steps)
            error, counts = achieved(net, data, noise_std, delta, args)
            e = error[counts]
            cells = []
            for s in COLUMNS:
                p = predicted[s][counts]
                gap = (20 * (p / e).log10()).abs()
                cells.append(f"{gap.nanmedian():10.2f}   {spearman(p, e):7.2f}")
            others = [
                f"{spearman(predicted[s][counts], e):10.2f}"
                for s in ("grad_norm", "loss", "image std")
            ]
            median = float(e.median()) if len(e) else math.nan
            print(
                f"{variance:9.0e}{len(e):4d}{median:8.4f} |{''.join(cells)}"
                f"   {''.join(others)}   ({time.perf_counter() - start:.0f} s)",
                flush=True,
            )
            for i in range(args.images):
                rows.append(
                    [name, variance, i, float(error[i]), bool(counts[i])]
                    + [float(predicted[s][i]) for s in COLUMNS]
                )
    if args.csv:
        with open(args.csv, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(
                ["network", "variance", "image", "rmse", "counts", *COLUMNS]
            )
            writer.writerows(rows)


if __name__ == "__main__":
    main()
