"""Do the scores foresee what attacks rebuild? LAVP's Table 1 on this machine.

    LEAKWATCH_TEST_DATA=data OMP_NUM_THREADS=1 python benchmarks/correlations.py

For each network: scores of every test image, then an L2 and a cosine attack (the best
of three random starts by matching loss, as in the paper) and one from a near start
(radius 0.01), without noise. Prints Spearman's correlation of every score with every
measure of quality, averaged over the networks as in Tables 1 to 3 of LAVP (Hong et al.,
AAAI 2024), then each network alone with 95 % bootstrap intervals, and how many attacks
matched their gradient. ``--json`` keeps all single values; ``--read`` prints the tables
of several such files together.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from networks import load, network
from torch import Tensor

import leakwatch
from leakwatch.attacks import attack
from leakwatch.quality import quality
from leakwatch.reporting.statistics.correlation import spearman
from leakwatch.reporting.statistics.correlation_table import (
    Measurement,
    correlation_table,
)

SCORES = (
    "grad_norm",
    "lavp_l2_max",
    "lavp_l2_min",
    "lavp_cos_max",
    "lavp_cos_min",
    "lavp_fusion",
    "i2f",
    "i2f_bayes",
)
METRICS = ("mse", "ssim", "psnr")
NETWORKS = ["lenet-sigmoid", "lenet-relu", "resnet8"]
ATTACKS = {"L2": "lavp-l2", "cosine": "lavp-cosine"}


def baselines(x: Tensor, mean: float, std: float) -> dict[str, np.ndarray]:
    """What is known without any Jacobian: contrast and total variation."""
    seen = (x.double() * std + mean).flatten(1)
    image = seen.view_as(x)
    tv = image.diff(dim=-1).abs().flatten(1).mean(1)
    tv = tv + image.diff(dim=-2).abs().flatten(1).mean(1)
    return {"image_std": seen.std(1).numpy(), "image_tv": tv.numpy()}


def measure(name: str, args: argparse.Namespace) -> list[Measurement]:
    """All attacks on one network."""
    data = load(args.data, args.images)
    net = network(name, args.data)
    started = time.perf_counter()
    found = leakwatch.score(
        net,
        data.x,
        data.y,
        [*SCORES, "loss"],
        noise_std=1e-3,
        mean=[data.mean],
        std=[data.std],
        prior_std=data.prior_std,
        max_memory=args.max_memory,
    )
    scores = {k: found[k].numpy() for k in (*SCORES, "loss")}
    scores |= baselines(data.x, data.mean, data.std)
    print(f"  {name}: scores in {time.perf_counter() - started:.0f} s", flush=True)
    out = []
    for distance, preset in ATTACKS.items():
        for start in ("random", "near"):
            started = time.perf_counter()
            rec = attack(
                net,
                data.x,
                data.y,
                preset,
                start="near" if start == "near" else None,
                radius=0.01,
                steps=args.steps,
                restarts=args.restarts if start == "random" else 1,
                mean=[data.mean],
                std=[data.std],
                **({"lr": 0.01} if start == "near" else {}),
            )
            got = quality(
                rec.images, data.x, mean=[data.mean], std=[data.std], metrics=METRICS
            )
            matched = sum(s.word == "ok" for s in rec.status)
            psnr = got["psnr"]
            print(
                f"  {name}, {distance}, {start}: median PSNR {psnr.median():.1f} dB, "
                f"{int((psnr > 20).sum())} over 20 dB, {matched} of {len(psnr)} "
                f"matched, {time.perf_counter() - started:.0f} s",
                flush=True,
            )
            out.append(
                Measurement(
                    f"{distance}, {start} start",
                    name,
                    scores,
                    {m: got[m].numpy() for m in METRICS},
                )
            )
    return out


def kept(path: Path) -> list[Measurement]:
    """What a run with ``--json`` has written."""
    return [
        Measurement(
            one["setting"],
            one["architecture"],
            {k: np.array(v) for k, v in one["scores"].items()},
            {k: np.array(v) for k, v in one["metrics"].items()},
        )
        for one in json.loads(path.read_text())
    ]


def main() -> None:
    """Measures and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="MNIST", choices=("MNIST", "FashionMNIST"))
    parser.add_argument("--networks", nargs="+", default=NETWORKS)
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--restarts", type=int, default=3)
    parser.add_argument("--max-memory", type=float, default=8192)
    parser.add_argument("--json", type=Path, help="keep all values in this file")
    parser.add_argument("--read", type=Path, nargs="+", help="files kept before")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.read:
        found = [m for path in args.read for m in kept(path)]
    else:
        print(f"{args.data}, {args.images} test images, {args.steps} steps")
        found = [m for name in args.networks for m in measure(name, args)]
    if args.json:
        args.json.write_text(
            json.dumps(
                [
                    {
                        "setting": m.setting,
                        "architecture": m.architecture,
                        "scores": {k: list(map(float, v)) for k, v in m.scores.items()},
                        "metrics": {
                            k: list(map(float, v)) for k, v in m.metrics.items()
                        },
                    }
                    for m in found
                ]
            )
        )
    print()
    print(correlation_table(found).to_markdown())
    print("\nEach network alone, correlation with MSE [95 % interval]:\n")
    print("| attack | network | " + " | ".join([*found[0].scores]) + " |")
    print("|" + "---|" * (len(found[0].scores) + 2))
    for m in found:
        cells = []
        for score in m.scores.values():
            c = spearman(score, m.metrics["mse"])
            cells.append(
                f"{c.rho:+.2f} [{c.low:+.2f}, {c.high:+.2f}]"
                if c.status.usable
                else "undefined"
            )
        print(f"| {m.setting} | {m.architecture} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
