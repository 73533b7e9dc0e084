"""How much mixtures of samples hide, and what is gained by asking several times.

    LEAKWATCH_TEST_DATA=data OMP_NUM_THREADS=1 python benchmarks/mixtures.py
        [--coefficients 0.9 0.7 0.5] [--queries 1 4] [--samples 3] [--budgets 0.5]

The network and the attack of ``trade_off.py``: a LeNet with sigmoids, trained without a
defense on MNIST pooled to 14×14, then for some steps of SGD under each defense from the
same weights with the same batches. Test digits are mixed with training digits, and
attacked by who takes the message for the gradient of one image (naive), by who knows
α and both labels and what images are like (estimating), and by who knows the
partner (adaptive). With ``--queries 4`` each is mixed with four of them in turn. Other
``--defenses`` at ``--budgets`` stand beside; ``--coefficients`` without a number leaves
the mixtures out.

The data are found through ``LEAKWATCH_TEST_DATA``, a folder with ``MNIST/raw``.
"""

from __future__ import annotations

import argparse
import time
import warnings
from pathlib import Path

import torch
from trade_off import Images, begun, images

from leakwatch import trade_off
from leakwatch.attacks import GaussNewton
from leakwatch.cli.trade_training import LightningTraining, accuracy_on
from leakwatch.defenses import registered_defenses

PARTNERS = 1000


def main() -> None:
    """Measures and prints a table for each number of queries."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--coefficients", nargs="*", type=float, default=[0.9, 0.7, 0.5]
    )
    parser.add_argument(
        "--defenses", nargs="+", default=["gaussian"], choices=registered_defenses()
    )
    parser.add_argument("--budgets", nargs="*", type=float, default=[0.5])
    parser.add_argument("--queries", nargs="+", type=int, default=[1, 4])
    parser.add_argument(
        "--attackers", nargs="+", default=["naive", "estimating", "adaptive"]
    )
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--train-steps", type=int, default=25)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--start", default="near")
    parser.add_argument("--restarts", type=int, default=1)
    parser.add_argument("--epochs", type=int, help="before any defense")
    parser.add_argument("--test", type=int, default=2000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="lightning")
    data = Images("MNIST", 12_000, args.batch, args.test)
    lit = begun("MNIST", data, args.epochs)
    lit.lr = args.lr
    accuracy = accuracy_on(data, "test")
    print(f"torch {torch.__version__}: begins at {accuracy(lit):.4f}", flush=True)
    training = {"max_steps": args.train_steps, "max_epochs": -1, "accelerator": "cpu"}
    # After the images that accuracy is measured on: one of each class.
    u, v = images("MNIST", train=False)
    u, v = u[args.test :], v[args.test :]
    chosen = [int((v == c).nonzero()[0]) for c in range(args.samples)]
    for queries in args.queries:
        began = time.process_time()
        found = trade_off(
            lit,
            data.scaled(u[chosen]),
            v[chosen],
            LightningTraining(training, data),
            accuracy,
            defenses=args.defenses if args.budgets else [],
            budgets=args.budgets or [1.0],
            mixup=args.coefficients,
            partners=(data.scaled(data.x[:PARTNERS]), data.y[:PARTNERS]),
            queries=queries,
            attack=GaussNewton(patience=8),
            steps=args.steps,
            restarts=args.restarts,
            attackers=args.attackers,
            start=args.start,
            radius=0.1 / data.std,
            mean=[data.mean],
            std=[data.std],
            prior_std=data.prior_std,
            prior_mean=data.x.mean(0),
            progress=lambda line, began=began: print(
                f"{line}  ({time.process_time() - began:.0f} CPU s)", flush=True
            ),
        )
        print(f"queries: {queries}\n{found.table()}\n", flush=True)
        if args.out:
            found.save(args.out / f"queries-{queries}")


if __name__ == "__main__":
    main()
