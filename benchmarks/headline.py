"""The headline against attackers who know as much as it takes for granted.

    LEAKWATCH_TEST_DATA=data python benchmarks/headline.py [--data MNIST]
        [--networks lenet-sigmoid lenet-relu ...] [--images 24] [--first 1000]
        [--noise 1e-6 1e-5 ...] [--prior white data natural]
        [--smoothing 0.3] [--random 0] [--csv FILE]

For each network, each noise level and each of the test images from ``--first`` on, one
Gaussian δ is added to the gradient. ``i2f_range_psnr`` predicts the quality averaged
over the noise: it doesn't know δ. Gauss–Newton at the maximum of the posterior, with
the same prior and in the range of pixels, achieves one for δ: from near starts for all
images (the worst case: beside the image, ``--radius`` times its predicted error
away), and by ``combined`` from random starts for the first ``--random`` ones.

Priors, for scores and attackers alike: ``white`` knows the mean training image and the
mean pixel variance; ``data`` mean and covariance of the first 2,048 training images;
``natural`` the statistics of photographs. None of the test images is among them.

Matched: the gradient is met as well as the noise allows; others show nothing. Of the
matched ones with a prediction, off: median of |predicted − achieved|; above: share of
those more than 2 dB above the prediction. Predicted and achieved: medians of all.
Given: off and above of the prediction for the very δ of the attack: what is left is
the model's, not luck's.
"""

from __future__ import annotations

import argparse
import csv
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from networks import NAMES, RECIPES, load, network, pixels
from torch import Tensor

from leakwatch import attack, score
from leakwatch.attacks import GaussNewton
from leakwatch.attacks.combined import Combined
from leakwatch.derivatives import GradientMap
from leakwatch.priors import DensePrior, GaussianPrior, measured_prior, natural_prior
from leakwatch.scores.measure.pixel_range import PixelRange
from leakwatch.studies.noise.spectra import NoiseResponse, SpectrumKeeper

_PRIOR_SAMPLES = 2048


def main() -> None:
    """Runs and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="MNIST", choices=NAMES)
    parser.add_argument("--networks", nargs="+", choices=tuple(RECIPES),
                        default=["lenet-sigmoid", "lenet-relu"])  # fmt: skip
    parser.add_argument("--images", type=int, default=24)
    parser.add_argument("--first", type=int, default=1000, help="test image")
    parser.add_argument("--noise", nargs="+", type=float,
                        default=[1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1])  # fmt: skip
    parser.add_argument("--prior", nargs="+", choices=("white", "data", "natural"),
                        default=["white", "data"])  # fmt: skip
    parser.add_argument("--radius", type=float, default=2.0, help="predicted errors")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--smoothing", type=float, default=0.3, help="of kinks")
    parser.add_argument("--random", type=int, default=0, help="images")
    parser.add_argument("--seconds", type=float, default=30.0, help="each random one")
    parser.add_argument("--csv", help="a row for each image and attack")
    args = parser.parse_args()
    torch.set_num_threads(1)
    last = args.first + args.images - 1
    print(f"{args.data}, test images {args.first} to {last}, torch {torch.__version__}")
    print(
        f"{'network':16}{'prior':>8}{'noise':>8} {'start':>7}{'matched':>9}"
        f"{'predicted':>10}{'achieved':>9}{'off':>6}{'above':>7}{'given':>13}{'s/image':>9}"
    )
    rows: list[dict[str, Any]] = []
    for name in args.networks:
        for prior in args.prior:
            rows += _compare(name, prior, args)
            if args.csv:
                with open(args.csv, "w", newline="") as file:
                    writer = csv.DictWriter(file, rows[0])
                    writer.writeheader()
                    writer.writerows(rows)


def _prior(kind: str, data: str, size: int) -> GaussianPrior:
    known = load(data, 1, size)
    if kind == "natural":
        return natural_prior(tuple(known.x.shape[1:]))
    if kind == "data":
        return measured_prior(pixels(data, train=True, size=size)[0][:_PRIOR_SAMPLES])
    eye = torch.eye(known.x[0].numel(), dtype=torch.float64)
    return DensePrior(known.prior_mean, known.prior_std**2 * eye)


def _compare(name: str, kind: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    size = RECIPES[name].size
    net, known = network(name, args.data), load(args.data, 1, size)
    prior = _prior(kind, args.data, size)
    which = slice(args.first, args.first + args.images)
    x, y = (v[which] for v in pixels(args.data, train=False, size=size))
    x = (x.double() - known.mean) / known.std
    scale: dict[str, Any] = {"mean": [known.mean], "std": [known.std]}
    keeper = SpectrumKeeper()
    result = score(net, x, y, [keeper.score], prior=prior, solver="exact",
                   dtype=torch.float64, **scale)  # fmt: skip
    spectra = keeper.of(result)
    gradients = GradientMap(net, dtype=torch.float64)
    lengths = gradients(x, y).norm(dim=1)
    rows: list[dict[str, Any]] = []
    for s in args.noise:
        predicted = torch.tensor([one.psnr(s).number for one in spectra])
        given = _given(spectra, gradients, x, y, s, known.std)
        # Further from the truth than the prediction, so as not to beat it for nothing.
        far = args.radius * 10 ** (-predicted.nan_to_num(20.0) / 20)
        noise = s * math.sqrt(gradients.size)
        allowed = 1.02 * noise / lengths.hypot(torch.tensor(noise)) + 1e-4
        near = GaussNewton(
            steps=args.steps, logits=False, prior=prior, smoothing=args.smoothing
        )
        random = Combined(second=GaussNewton(prior=prior))
        limit = {"time_limit": args.seconds}
        jobs: list[tuple[str, GaussNewton | Combined, int, list[dict[str, float]]]] = [
            ("near", near, len(x), [{"radius": r / known.std} for r in far.tolist()]),
            ("random", random, args.random, [limit] * args.random),
        ]
        for start, engine, count, more in jobs:
            if count == 0:
                continue
            began = time.process_time()
            found = _attack(net, x[:count], y[:count], engine, s, start, scale, more)
            took = (time.process_time() - began) / count
            squared = ((found[0] - x[:count]) * known.std).flatten(1).square().mean(1)
            achieved = -10 * squared.log10()
            matched = found[1] <= allowed[:count]
            _print(name, kind, s, start, predicted[:count], given[:count], achieved,
                   matched, took)  # fmt: skip
            rows += [
                {"data": args.data, "network": name, "prior": kind, "noise": s,
                 "start": start, "image": args.first + i, "label": int(y[i]),
                 "predicted": float(predicted[i]), "given": float(given[i]),
                 "achieved": float(achieved[i]),
                 "matched": bool(matched[i])}
                for i in range(count)
            ]  # fmt: skip
    return rows


def _given(
    spectra: Sequence[NoiseResponse],
    gradients: GradientMap,
    x: Tensor,
    y: Tensor,
    noise_std: float,
    std: float,
) -> Tensor:
    """Predictions for the noise that attacks get; of a linear network."""
    rows = []
    for i in range(len(x)):
        generator = torch.Generator().manual_seed(i)
        rows.append(
            torch.randn(gradients.size, dtype=torch.float64, generator=generator)
        )
    pulled = gradients.vjp(x, y, noise_std * torch.stack(rows)).flatten(1) / std
    decibels = [math.nan] * len(x)
    for i, one in enumerate(spectra):
        if one.spectrum is None or not isinstance(one.spectrum.pixel_range, PixelRange):
            continue
        settings = replace(one.settings, noise_std=noise_std)
        found = one.spectrum.pixel_range.errors(settings, noise_std, pulled[i])
        decibels[i] = -10 * math.log10(float(found.squared.mean()) / x[i].numel())
    return torch.tensor(decibels)


def _attack(
    net: torch.nn.Module,
    x: Tensor,
    y: Tensor,
    engine: GaussNewton | Combined,
    noise_std: float,
    start: str,
    scale: dict[str, Any],
    more: Sequence[dict[str, Any]],
) -> tuple[Tensor, Tensor]:
    """Images and the relative rest of the gradient; one by one."""
    kind: Literal["near", "normal"] = "near" if start == "near" else "normal"
    results = [
        attack(net, x[i : i + 1], y[i : i + 1], engine, start=kind, noise_std=noise_std,
               data_range=1.0, restarts=1 if start == "near" else 4, seed=i,
               dtype=torch.float64, **scale, **more[i])
        for i in range(len(x))
    ]  # fmt: skip
    images = torch.cat([r.images for r in results]).double()
    return images, torch.cat([r.relative for r in results]).double()


def _print(
    name: str,
    prior: str,
    noise: float,
    start: str,
    predicted: Tensor,
    given: Tensor,
    achieved: Tensor,
    matched: Tensor,
    seconds: float,
) -> None:

    def off_and_above(foreseen: Tensor) -> tuple[str, str]:
        # Where nothing was predicted there is nothing to be off.
        gap = (achieved - foreseen)[matched & ~foreseen.isnan()]
        if len(gap) == 0:
            return "–", "–"
        above = 100 * float((gap > 2).double().mean())
        return f"{float(gap.abs().median()):.2f}", f"{above:.0f} %"

    off, above = off_and_above(predicted)
    told = " ".join(off_and_above(given))
    met = f"{int(matched.sum())}/{len(matched)}"
    print(
        f"{name:16}{prior:>8}{noise:8.0e} {start:>7}{met:>9}"
        f"{float(predicted.nanmedian()):10.1f}{float(achieved.median()):9.1f}"
        f"{off:>6}{above:>7}{told:>13}{seconds:9.1f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
