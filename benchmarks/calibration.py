"""Does following the influence foresee the best attacker better than a linear step?

    LEAKWATCH_TEST_DATA=data python benchmarks/calibration.py [--images 16]
        [--networks lenet-sigmoid lenet-relu ...] [--variances 1e-6 1e-4 ...]
        [--influence-steps 8] [--radius 0.05]

For each network and noise variance, one Gaussian δ is added to the gradient of each
image. ``i2f_bayes`` for that δ, linear and integrated in ``--influence-steps``,
predicts the error; Gauss–Newton at the maximum of the posterior, with the same prior
and from beside the image, achieves one. All errors are root mean squares per pixel.

Prior, for score and attacker alike: N(μ, R²) per pixel, μ the mean training image and
R² the mean pixel variance; no box, because a Gaussian prior has none.

Columns: median of |20 log₁₀(predicted/achieved)|, and Spearman's rank correlation over
the images of one noise level. Whether scores rank images better than ‖g‖ is an
experiment, ``leakwatch reproduce leakwatch-question-1``; what the headline is worth
says ``headline.py``.
"""

from __future__ import annotations

import argparse
import math
import time

import torch
from networks import RECIPES, Data, load, network
from torch import Tensor, nn

from leakwatch import score
from leakwatch.attacks import GaussNewton, PixelScale, SharedGradient, Start
from leakwatch.derivatives import GradientMap

VARIANCES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)


def spearman(a: Tensor, b: Tensor) -> float:
    """Rank correlation; NaN where one of them is constant."""
    ranks = [v.double().argsort().argsort().double() for v in (a, b)]
    if len(a) < 3 or any(float(v.std()) == 0 for v in (a, b)):
        return math.nan
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])


def predictions(
    net: nn.Module, data: Data, noise_std: float, delta: Tensor, steps: int
) -> dict[str, Tensor]:
    """Error per pixel, extrapolated and followed."""
    taken = {"integrated": steps, "linear": 1}
    return {
        name: score(
            net,
            data.x,
            data.y,
            ["i2f_bayes"],
            noise_std=noise_std,
            delta=delta,
            prior_std=data.prior_std,
            prior_mean=data.prior_mean,
            mean=[data.mean],
            std=[data.std],
            solver="exact",
            dtype=torch.float64,
            influence_steps=count,
        )["i2f_bayes"]
        / math.sqrt(data.x[0].numel())
        for name, count in taken.items()
    }


def achieved(
    net: nn.Module,
    data: Data,
    noise_std: float,
    delta: Tensor,
    args: argparse.Namespace,
) -> Tensor:
    """Error per pixel of the attacker."""
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
    found = attack.run(
        gradients,
        shared,
        pixels=PixelScale([data.mean], [data.std]),
        start=Start.near(x, args.radius / data.std),
        seed=0,
        restarts=args.restarts,
    )
    return ((found.images - x) * data.std).flatten(1).square().mean(1).sqrt()


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
    parser.add_argument("--radius", type=float, default=0.05, help="pixels")
    parser.add_argument("--restarts", type=int, default=1)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--influence-steps", type=int, default=8)
    parser.add_argument("--smoothing", type=float, default=0.3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"{args.data}, {args.images} images, near starts, prior around the mean image, "
        f"no box, torch {torch.__version__}"
    )
    for name in args.networks:
        net = network(name, args.data)
        data = load(args.data, args.images, RECIPES[name].size)
        size = sum(p.numel() for p in net.parameters())
        print(
            f"\n{name}, R = {data.prior_std:.3f}\n{'variance':>9}{'RMSE':>8} |"
            + "".join(f"{s:>10} dB{'rho':>7}" for s in ("integrated", "linear"))
        )
        for variance in args.variances:
            start = time.perf_counter()
            noise_std = math.sqrt(variance)
            generator = torch.Generator().manual_seed(0)
            delta = noise_std * torch.randn(
                args.images, size, generator=generator, dtype=torch.float64
            )
            predicted = predictions(net, data, noise_std, delta, args.influence_steps)
            error = achieved(net, data, noise_std, delta, args)
            cells = [
                f"{(20 * (p / error).log10()).abs().nanmedian():10.2f}   "
                f"{spearman(p, error):7.2f}"
                for p in predicted.values()
            ]
            print(
                f"{variance:9.0e}{float(error.median()):8.4f} |{''.join(cells)}"
                f"   ({time.perf_counter() - start:.0f} s)",
                flush=True,
            )


if __name__ == "__main__":
    main()
