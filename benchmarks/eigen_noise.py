"""Figure 5 of I²F in small: the same ‖δ‖ along directions of different λ.

    LEAKWATCH_TEST_DATA=data OMP_NUM_THREADS=1 python benchmarks/eigen_noise.py
        [--images 4] [--directions 0 30 200 600] [--sizes 0.01 0.1 1] [--table]

The gradient of each digit is moved by ±‖δ‖ along one parameter-space singular vector
v_i = J u_i/σ_i (``EigenNoise`` with ``Single``), and Gauss–Newton, without prior or box
and from beside the true image, recovers what matches. To first order its squared error
is ‖δ‖²/λ_i, so in log-log the slope of the error against λ is −1.

For each ‖δ‖: the slope over all digits and directions, with a 95 % interval from a
bootstrap over digits; the median of |10 log₁₀(achieved/predicted)|; and how well the
shared gradient was matched, for where that is not good no error says anything.

``--table`` compares defenses at an equal budget relative to ‖g‖ instead, by what the
naive and the adaptive attacker are predicted to reach, and by the share of the budget
that lands in the range of J.
"""

from __future__ import annotations

import argparse
import math
import time

import torch
from networks import Data, load, network
from torch import Tensor, nn

from leakwatch.attacks import GaussNewton, PixelScale, SharedGradient, Start
from leakwatch.defenses import (
    Budget,
    Defense,
    EigenNoise,
    GaussianNoise,
    Samples,
    Single,
    Smallest,
    Waterfill,
    energy_share,
    predicted_errors,
)
from leakwatch.derivatives import GradientMap

RADIUS = 0.01


def samples_of(net: nn.Module, data: Data) -> Samples:
    """Float64, with directions in pixels."""
    scale = torch.full((data.x[0].numel(),), 1 / data.std, dtype=torch.float64)
    gradients = GradientMap(net, dtype=torch.float64)
    return Samples(gradients, data.x.double(), data.y, input_scale=scale)


def achieved(
    samples: Samples, data: Data, messages: Tensor, steps: int
) -> tuple[Tensor, Tensor]:
    """Mean squared error of each pixel, and ‖g(x̂) − g̃‖/‖g̃‖."""
    shared = SharedGradient(messages, data.y[:, None], tuple(data.x.shape[1:]))
    found = GaussNewton(steps=steps, box=False).run(
        samples.gradients,
        shared,
        pixels=PixelScale([data.mean], [data.std]),
        start=Start.near(samples.x, RADIUS / data.std),
        seed=0,
    )
    error = ((found.images - samples.x) * data.std).flatten(1).square().mean(1)
    return error, found.relative


def slope(x: Tensor, y: Tensor) -> Tensor:
    """Least-squares slope of flattened points."""
    a, b = x.flatten() - x.mean(), y.flatten() - y.mean()
    return (a * b).sum() / a.square().sum()


def interval(x: Tensor, y: Tensor, draws: int = 2000) -> tuple[float, float]:
    """95 % interval of the slope, by resampling rows (digits)."""
    stream = torch.Generator().manual_seed(0)
    slopes = []
    for _ in range(draws):
        rows = torch.randint(len(x), (len(x),), generator=stream)
        slopes.append(slope(x[rows], y[rows]))
    ends = torch.stack(slopes).quantile(torch.tensor([0.025, 0.975]).double())
    return float(ends[0]), float(ends[1])


def figure(samples: Samples, data: Data, args: argparse.Namespace) -> None:
    """Prints the slope for each size of the perturbation."""
    lam = samples.basis.eigenvalues[:, args.directions]
    spread = [f"{float(v):.2e}" for v in lam.median(0).values]
    print(f"median λ of directions {args.directions}: {', '.join(spread)}")
    print(f"{'|δ|':>8}{'slope':>8}{'95 % interval':>20}{'off, dB':>9}{'rest':>9}  RMSE")
    for size in args.sizes:
        start = time.perf_counter()
        columns, rests = [], []
        for direction in args.directions:
            noise = EigenNoise(Budget(size, "norm"), Single(direction), "sign")
            made = noise.protect(
                samples.gradient,
                generator=torch.Generator().manual_seed(0),
                samples=samples,
            )
            error, rest = achieved(samples, data, made.gradient, args.steps)
            columns.append(error)
            rests.append(rest)
        mse = torch.stack(columns, 1)
        predicted = size**2 / lam / data.x[0].numel()
        x, y = lam.log10(), mse.log10()
        low, high = interval(x, y)
        off = (10 * (mse / predicted).log10()).abs().median()
        rmse = " ".join(f"{float(v):.4f}" for v in mse.median(0).values.sqrt())
        print(
            f"{size:8g}{float(slope(x, y)):8.3f}     [{low:6.3f}, {high:6.3f}]"
            f"{float(off):9.2f}{float(torch.stack(rests).max()):9.0e}  {rmse}"
            f"  ({time.perf_counter() - start:.0f} s)",
            flush=True,
        )


def table(samples: Samples, data: Data, budget: float) -> None:
    """Prints predicted PSNR of both attackers under each defense."""
    asked = Budget(budget, "relative")
    defenses: list[Defense] = [
        GaussianNoise(asked),
        EigenNoise(asked, "diagonal"),
        EigenNoise(asked, "proportional"),
        EigenNoise(asked, Smallest(50)),
        EigenNoise(asked, Waterfill(data.prior_std)),
    ]
    pixels = data.x[0].numel()
    print(f"budget {budget:g} of |g|, prior R = {data.prior_std:.3f}; medians")
    print(f"{'':20}{'spent':>8}{'in range':>10}{'naive, dB':>11}{'adaptive':>10}")
    norm = samples.gradient.norm(dim=1)
    for defense in defenses:
        made = defense.protect(
            samples.gradient, generator=torch.Generator(), samples=samples
        )
        covariance = made.knowledge.covariance
        assert covariance is not None
        errors = predicted_errors(made, samples, prior_std=data.prior_std)
        spent = (made.variance.sqrt() / norm).median()
        share = energy_share(covariance, samples.basis).median()
        both = [
            float(10 * math.log10(pixels / float(e.median())))
            for e in (errors.naive, errors.adaptive)
        ]
        print(
            f"{defense.name:20}{float(spent):8.4f}{float(share):10.4f}"
            f"{both[0]:11.1f}{both[1]:10.1f}",
            flush=True,
        )


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", default="lenet-sigmoid-untrained")
    parser.add_argument("--images", type=int, default=4)
    parser.add_argument("--directions", nargs="+", type=int, default=[0, 30, 200, 600])
    parser.add_argument("--sizes", nargs="+", type=float, default=[0.01, 0.1, 1])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--budgets", nargs="+", type=float, default=[0.01, 0.1, 1])
    args = parser.parse_args()
    torch.set_num_threads(1)
    net, data = network(args.network), load("MNIST", args.images)
    samples = samples_of(net, data)
    start = time.perf_counter()
    resolved = samples.basis.resolved.sum(1)
    print(
        f"{args.network}, {args.images} digits, torch {torch.__version__}; resolved "
        f"{int(resolved.min())} to {int(resolved.max())} of {data.x[0].numel()} "
        f"directions ({time.perf_counter() - start:.0f} s); |g| "
        f"{float(samples.gradient.norm(dim=1).median()):.2f}"
    )
    if args.table:
        for budget in args.budgets:
            table(samples, data, budget)
    else:
        figure(samples, data, args)


if __name__ == "__main__":
    main()
